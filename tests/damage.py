"""Changes to the files of a trace that no writer would make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tracer.files import METADATA_KEY


def edit_table(
    trace: Path,
    table: str,
    change: Callable[[pa.Table], pa.Table] = lambda rows: rows,
    metadata: Callable[[bytes], bytes] = lambda text: text,
) -> None:
    """Write one table anew, each row group changed, under its old metadata or changed ones."""
    path = trace / f"{table}.parquet"
    with pq.ParquetFile(path) as file:
        groups = [change(file.read_row_group(i)) for i in range(file.num_row_groups)]
        text = metadata(file.metadata.metadata[METADATA_KEY])
    with pq.ParquetWriter(path, groups[0].schema.remove_metadata()) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=max(group.num_rows, 1))
        if text:
            writer.add_key_value_metadata({METADATA_KEY: text})


def set_values(trace: Path, table: str, column: str, change: Callable[[list[dict[str, Any]]], dict[int, Any]]) -> None:
    """Set values of one column; `change` gets all rows as dictionaries and names row -> value."""
    path = trace / f"{table}.parquet"
    with pq.ParquetFile(path) as file:
        values = change(file.read().to_pylist())
    assert values
    first = 0

    def replaced(rows: pa.Table) -> pa.Table:
        nonlocal first
        new = rows.column(column).to_pylist()
        for row, value in values.items():
            if first <= row < first + len(new):
                new[row - first] = value
        first += len(new)
        index = rows.schema.get_field_index(column)
        kind = rows.schema.field(index).type
        # pyarrow builds no dictionary of its own from a list
        array = (
            pa.array(new, pa.string()).dictionary_encode().cast(kind)
            if pa.types.is_dictionary(kind)
            else pa.array(new, kind)
        )
        return rows.set_column(index, pa.field(column, kind), array)

    edit_table(trace, table, replaced)


def drop_rows(trace: Path, table: str, **keys: int) -> None:
    """Leave out the rows with these values."""
    edit_table(
        trace,
        table,
        lambda rows: rows.filter(
            pa.array([any(row[k] != v for k, v in keys.items()) for row in rows.select(list(keys)).to_pylist()])
        ),
    )
