"""The log of one replayed cell as one small Parquet file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.errors import ConfigError
from experiments.log_tables import from_arrow, to_arrow
from experiments.whole import whole_file
from policies.log import FORWARD_COLUMNS, FORWARD_LISTS, LAYER_COLUMNS, LAYER_LISTS, LogChunk, Ragged, Table

_NOTES, _FORWARDS = b"oledsim.notes", b"oledsim.forwards"
# lists of what is prefetched at each gate, thousands for some policies; that they are counted is enough
_LISTS = {name: kind for name, kind in LAYER_LISTS.items() if name not in ("prefetch_layers", "prefetch_experts")}
_NARROW = (np.int8,)  # that the encoding of differences does not take


def write_log(path: Path, chunks: Sequence[LogChunk], notes: Mapping[str, Any]) -> None:
    """Write the log of a run, but for the lists of prefetches; the file appears whole or not at all.

    Args:
        path: of the file.
        chunks: of the run, at least one.
        notes: what else is known of it, plain data.
    """
    layers = pa.concat_tables(to_arrow(chunk.layers, LAYER_COLUMNS, _LISTS) for chunk in chunks)
    forwards = pa.concat_tables(to_arrow(chunk.forwards, FORWARD_COLUMNS, FORWARD_LISTS) for chunk in chunks)
    metadata = {_NOTES: json.dumps(notes), _FORWARDS: json.dumps(forwards.to_pydict())}
    scalars = {name: kind for name, kind in LAYER_COLUMNS.items() if kind not in _NARROW}
    # ids ascend and times follow each other: differences are small
    encodings = dict.fromkeys((*scalars, *(f"{name}.list.element" for name in LAYER_LISTS)), "DELTA_BINARY_PACKED")
    with whole_file(path) as partial:
        pq.write_table(
            layers.replace_schema_metadata(metadata),
            partial,
            compression="zstd",
            compression_level=9,
            use_dictionary=False,
            column_encoding=encodings,
        )


def read_log(path: Path) -> tuple[LogChunk, dict[str, Any]]:
    """The log, with no prefetch in its lists, and the notes that `write_log` wrote.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
    metadata = table.schema.metadata or {}
    missing = [name for name in (*LAYER_COLUMNS, *_LISTS) if name not in table.column_names]
    if missing or _NOTES not in metadata or _FORWARDS not in metadata:
        raise ConfigError(f"{path}: is no log of a replayed cell: it lacks {missing[0] if missing else 'its notes'}")
    forwards = pa.table(json.loads(metadata[_FORWARDS]))
    layers = from_arrow(table, LAYER_COLUMNS, _LISTS)
    empty = {
        name: Ragged(np.zeros(len(layers) + 1, np.int64), np.empty(0, kind))
        for name, kind in LAYER_LISTS.items()
        if name not in _LISTS
    }
    chunk = LogChunk(
        Table(layers.scalars, {**layers.lists, **empty}), from_arrow(forwards, FORWARD_COLUMNS, FORWARD_LISTS)
    )
    return chunk, json.loads(metadata[_NOTES])
