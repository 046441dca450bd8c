"""Tables of a log in Arrow's form, and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from policies.log import Ragged, Table


def to_arrow(table: Table, scalars: Mapping[str, type], lists: Mapping[str, type]) -> pa.Table:
    """These columns of a table."""
    arrays: dict[str, pa.Array] = {name: pa.array(table.scalars[name]) for name in scalars}
    for name in lists:
        column = table.lists[name]
        arrays[name] = pa.ListArray.from_arrays(pa.array(column.offsets, pa.int32()), pa.array(column.values))
    return pa.table(arrays)


def from_arrow(table: pa.Table, scalars: Mapping[str, type], lists: Mapping[str, type]) -> Table:
    """These columns as a table, of these types.

    Raises:
        KeyError: a column is missing.
    """
    columns = {name: table[name].to_numpy().astype(kind) for name, kind in scalars.items()}
    return Table(columns, {name: _ragged(table[name], kind) for name, kind in lists.items()})


def _ragged(column: pa.ChunkedArray, kind: type) -> Ragged:
    rows = column.combine_chunks()
    offsets = rows.offsets.to_numpy().astype(np.int64)
    return Ragged(offsets - offsets[0], rows.flatten().to_numpy(zero_copy_only=False).astype(kind))
