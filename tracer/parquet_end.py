"""Parquet files whose writer was stopped before it wrote their end: the end is made anew from their pages.

Source: parquet.thrift of Apache Parquet, for the numbers of fields.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tracer.files import write_options
from tracer.schema import TraceError, TraceMetadata
from tracer.tables import Column, columns_of, schema_of, to_arrow
from tracer.thrift import I16, I32, I64, STRUCT, Field, List, Struct, ThriftError, dump, parse

MAGIC = b"PAR1"
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # types of pages
_VALUES_IN = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}  # the field of a page's header that counts its values
_HEADER_BYTES = 1 << 16  # far more than a header has


class _Page(NamedTuple):
    """A page of a column chunk, header included."""

    type: int
    start: int
    num_values: int
    compressed_bytes: int
    uncompressed_bytes: int


def end_of(path: Path, table: str, metadata: TraceMetadata, group_ends: Sequence[int], rows: Sequence[int]) -> bytes:
    """What must follow the last of these row groups for the file to be whole.

    Args:
        path: of a table that a TraceWriter began.
        table: its name.
        metadata: of the trace.
        group_ends: bytes of the file up to the end of each row group.
        rows: of each.

    Raises:
        TraceError: the pages are not those of such groups.
    """
    columns = columns_of(table, metadata)
    footer, group = _templates(table, metadata)
    groups = []
    with path.open("rb") as file:
        for start, end, num_rows in zip([len(MAGIC), *group_ends[:-1]], group_ends, rows, strict=True):
            try:
                chunks = _chunks(columns, num_rows, _pages(file, start, end))
            except ThriftError as error:
                raise TraceError(f"{path}, row group {len(groups)}: its pages cannot be told apart: {error}") from None
            groups.append(_group(group, chunks, num_rows, len(groups)))
    footer |= {3: Field(I64, sum(rows)), 4: Field(footer[4].type, List(footer[4].value.type, groups))}
    data = dump(footer)
    return data + struct.pack("<I", len(data)) + MAGIC


def _templates(table: str, metadata: TraceMetadata) -> tuple[Struct, Struct]:
    """The end of a file of this table with one row, and its row group."""
    columns = columns_of(table, metadata)
    row = {column.name: np.zeros((1, column.width) if column.width else 1, column.dtype) for column in columns}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema_of(columns), **write_options(table, metadata)) as writer:
        writer.write_table(to_arrow(columns, row))
    data = sink.getvalue().to_pybytes()
    (size,) = struct.unpack("<I", data[-8:-4])
    footer, _ = parse(data[-8 - size : -8])
    return footer, footer[4].value.values[0]


def _pages(file: BinaryIO, start: int, end: int) -> list[_Page]:
    pages = []
    while start < end:
        file.seek(start)
        header, header_bytes = parse(file.read(min(_HEADER_BYTES, end - start)))
        kind = _number(header, 1)
        counts = header.get(_VALUES_IN.get(kind, -1))
        if counts is None or counts.type != STRUCT:
            raise ThriftError(f"a page of type {kind} at byte {start}")
        compressed, uncompressed = (header_bytes + _number(header, number) for number in (3, 2))
        pages.append(_Page(kind, start, _number(counts.value, 1), compressed, uncompressed))
        start += compressed
    if start != end:
        raise ThriftError(f"a page goes on beyond byte {end}")
    return pages


def _number(struct: Struct, number: int) -> int:
    """A whole number from 0 that a structure must have."""
    field = struct.get(number)
    if field is None or field.type not in (I16, I32, I64) or field.value < 0:
        raise ThriftError(f"field {number} is {field}, must be a number")
    return field.value


def _chunks(columns: Sequence[Column], num_rows: int, pages: list[_Page]) -> list[list[_Page]]:
    """Pages of each column: a dictionary begins a new one, and so does what comes when all values were there."""
    chunks: list[list[_Page]] = [[]]
    for page in pages:
        column = columns[min(len(chunks), len(columns)) - 1]
        found = sum(other.num_values for other in chunks[-1] if other.type != _DICTIONARY)
        is_whole = not (column.width and column.nullable) and found >= num_rows * max(column.width, 1)
        if chunks[-1] and (page.type == _DICTIONARY or is_whole):
            chunks.append([])
        chunks[-1].append(page)
    if len(chunks) != len(columns):
        raise ThriftError(f"{len(chunks)} columns where {len(columns)} belong")
    return chunks


def _group(template: Struct, chunks: list[list[_Page]], num_rows: int, ordinal: int) -> Struct:
    columns = template[1].value
    made = [_chunk(column, pages) for column, pages in zip(columns.values, chunks, strict=True)]
    compressed, uncompressed = (
        sum(getattr(page, name) for pages in chunks for page in pages)
        for name in ("compressed_bytes", "uncompressed_bytes")
    )
    return template | {
        1: Field(template[1].type, List(columns.type, made)),
        2: Field(I64, uncompressed),
        3: Field(I64, num_rows),
        5: Field(I64, chunks[0][0].start),
        6: Field(I64, compressed),
        7: Field(I16, ordinal),
    }


def _chunk(template: Struct, pages: list[_Page]) -> Struct:
    data = [page for page in pages if page.type != _DICTIONARY]
    if not data:
        raise ThriftError(f"a column without data at byte {pages[0].start}")
    known = {number: field for number, field in template[3].value.items() if number not in (11, 12, 13, 16)}
    known |= {
        5: Field(I64, sum(page.num_values for page in data)),
        6: Field(I64, sum(page.uncompressed_bytes for page in pages)),
        7: Field(I64, sum(page.compressed_bytes for page in pages)),
        9: Field(I64, data[0].start),
    }
    if pages[0].type == _DICTIONARY:
        known[11] = Field(I64, pages[0].start)
    return {2: template[2]._replace(value=0), 3: Field(template[3].type, known)}
