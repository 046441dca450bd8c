"""The files of a run, all of them or none."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from policies.log import LAYER_COLUMNS, LAYER_LISTS, LogChunk

SUMMARY, MANIFEST, RESULT, DECISIONS = "summary.json", "manifest.json", "result.parquet", "decisions.parquet"


class RunFiles:
    """Writes under a temporary name inside the run's directory, and moves the files to their place when complete.

    Within `with`, an error removes what was written, and the directory if it was made for it. A directory of None
    writes nothing.
    """

    def __init__(self, directory: str | Path | None) -> None:
        self._final = None if directory is None else Path(directory)
        self._writer: pq.ParquetWriter | None = None
        self._made: list[Path] = []  # directories that were not there before, innermost first

    def __enter__(self) -> RunFiles:
        if self._final is not None:
            self._made = [path for path in (self._final, *self._final.parents) if not path.exists()]
            self._final.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._final))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._final is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            for path in self._made:
                if not any(path.iterdir()):
                    path.rmdir()

    def add(self, chunk: LogChunk) -> None:
        """Append the layer executions of a chunk to decisions.parquet."""
        if self._final is None:
            return
        arrays: dict[str, pa.Array] = {name: pa.array(chunk.layers.scalars[name]) for name in LAYER_COLUMNS}
        for name in LAYER_LISTS:
            column = chunk.layers.lists[name]
            arrays[name] = pa.ListArray.from_arrays(pa.array(column.offsets, pa.int32()), pa.array(column.values))
        batch = pa.record_batch(arrays)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial / DECISIONS, batch.schema, compression="zstd")
        self._writer.write_batch(batch)

    def finish(
        self, summary: Mapping[str, Any], manifest: Mapping[str, Any], forwards: pl.DataFrame, per_layer: bool
    ) -> None:
        """Write the other files and move all of them to their place."""
        if self._final is None:
            return
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if per_layer:
            shutil.copyfile(self._partial / DECISIONS, self._partial / RESULT)
        else:
            forwards.write_parquet(self._partial / RESULT)
        for name, values in ((MANIFEST, manifest), (SUMMARY, summary)):
            (self._partial / name).write_text(json.dumps(values, indent=2) + "\n")
        # the summary goes first and comes last: a directory that holds one holds the rest, of the same run
        (self._final / SUMMARY).unlink(missing_ok=True)
        for name in (DECISIONS, RESULT, MANIFEST, SUMMARY):
            (self._partial / name).replace(self._final / name)
