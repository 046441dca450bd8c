"""The files of a trace: how they are encoded, what their metadata says, and their row groups."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from tracer.records import make_record
from tracer.schema import SCHEMA_VERSION, TraceError, TraceMetadata
from tracer.tables import REQUIRED_TABLES, TABLES, Column, Columns, Group, columns_of, from_arrow

METADATA_KEY = b"oledsim"
PARQUET_ERRORS = (OSError, pa.ArrowException, UnicodeDecodeError)  # the last one for names in a damaged footer


def tables_in(directory: Path) -> tuple[str, ...]:
    """Tables that a trace in this directory has, or must have."""
    return TABLES if os.path.lexists(directory / "signals.parquet") else REQUIRED_TABLES  # a dangling link is a fault


def write_options(table: str, metadata: TraceMetadata) -> dict[str, Any]:
    """Encodings of a table, chosen by measurement.

    Dictionaries are smallest for everything but gates of 32 bits, of which the upper bytes alone compress: these
    are split by byte. Only lists of ids gain by a higher level; beyond 9, which takes no more time than 3, the whole
    table would take two to three times as long and be 2 to 3 % smaller.
    """
    columns = columns_of(table, metadata)
    split = [c.parquet_path for c in columns if c.name in ("gates", "scores") and metadata.gate_dtype == "float32"]
    return {
        "compression": "zstd",
        "compression_level": {c.parquet_path: 9 if c.width and c.stored == pa.uint16() else 3 for c in columns},
        "use_dictionary": [c.parquet_path for c in columns if c.parquet_path not in split],
        "use_byte_stream_split": split or False,
        "write_statistics": ["pass_id", "request"],
        "write_page_checksum": True,
    }


def dump_metadata(metadata: TraceMetadata, num_passes: int, num_requests: int) -> str:
    """Metadata as the JSON text that every file carries.

    Raises:
        TraceError: a value of `decode` or `details` that JSON cannot hold.
    """
    record = asdict(metadata) | {"num_passes": num_passes, "num_requests": num_requests}
    try:
        return json.dumps(record, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceError(f"metadata must be of values that JSON can hold: {error}") from error


def metadata_hash(metadata: TraceMetadata) -> str:
    """SHA-256 over all metadata, the content hash of the values among them: the same for traces that are the same."""
    return hashlib.sha256(json.dumps(asdict(metadata), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Counts:
    """What metadata on disk says beyond TraceMetadata."""

    num_passes: int
    num_requests: int


@dataclass(frozen=True)
class Footer:
    """What the end of one file says: enough to open a trace without reading it."""

    metadata: TraceMetadata
    num_passes: int
    num_requests: int
    rows: tuple[int, ...]  # of each row group
    num_bytes: int  # of the file


def is_table(path: Path) -> bool:
    """A whole Parquet file with the metadata of a trace."""
    try:
        return path.is_file() and METADATA_KEY in (pq.read_metadata(path).metadata or {})
    except PARQUET_ERRORS:
        return False


def read_footer(directory: Path, table: str) -> Footer:
    """Read and check the footer of one table.

    Raises:
        TraceError: the file is missing, cut short, of another format, or lacks metadata or a column.
    """
    path = directory / f"{table}.parquet"
    if not path.is_file():
        raise TraceError(
            f"{path}: missing; a whole trace has {', '.join(f'{name}.parquet' for name in REQUIRED_TABLES)}"
        )
    try:
        with pq.ParquetFile(path) as file:
            footer, schema = file.metadata, file.schema_arrow
            text = (footer.metadata or {}).get(METADATA_KEY)
            rows = tuple(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
    except PARQUET_ERRORS as error:
        raise TraceError(f"{path}: not a whole Parquet file: {first_line(error)}") from error
    if text is None:
        raise TraceError(f"{path}: no oledsim metadata; a trace of format {SCHEMA_VERSION} has it in every file")
    metadata, num_passes, num_requests = parse_metadata(path, text)
    for column in columns_of(table, metadata):
        index = schema.get_field_index(column.name)
        if index < 0:
            raise TraceError(f"{path}: column {column.name} is missing; needs {column.arrow_type}")
        if schema.field(index).type != column.arrow_type:
            raise TraceError(f"{path}: column {column.name} is {schema.field(index).type}; needs {column.arrow_type}")
    return Footer(metadata, num_passes, num_requests, rows, path.stat().st_size)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def parse_metadata(path: Path, text: bytes) -> tuple[TraceMetadata, int, int]:
    """Metadata as `dump_metadata` wrote it, with the numbers of passes and requests.

    Raises:
        TraceError: it is not so.
    """
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(record, ensure_ascii=False).encode()  # half a character cannot be shown
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: metadata: {first_line(error)}") from error
    where = f"{path}: metadata"
    if not isinstance(record, dict):
        raise TraceError(f"{where} is {type(record).__name__}, must hold keys and values")
    if (found := record.get("schema_version")) != SCHEMA_VERSION:
        raise TraceError(f"{where}: trace format {found}; this version reads format {SCHEMA_VERSION}")
    counts = {name: record.pop(name) for name in ("num_passes", "num_requests") if name in record}
    made, metadata = (
        make_record(Counts, counts, where, TraceError),
        make_record(TraceMetadata, record, where, TraceError),
    )
    return metadata, made.num_passes, made.num_requests


def read_group(file: pq.ParquetFile, path: Path, index: int, columns: tuple[Column, ...]) -> Columns:
    """Read one row group.

    Raises:
        TraceError: it cannot be read, or holds a null where a value must be.
    """
    where = f"{path}, row group {index}"
    try:
        table = file.read_row_group(index, columns=[c.name for c in columns], use_threads=False)
    except PARQUET_ERRORS as error:
        raise TraceError(f"{where}: cannot be read: {first_line(error)}") from error
    try:
        return from_arrow(columns, table)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error


@contextmanager
def open_groups(directory: Path, metadata: TraceMetadata, *, signals: bool) -> Iterator[Callable[[int], Group]]:
    """Open the tables of a trace; gives a function that reads row group i of each."""
    tables = TABLES if signals else REQUIRED_TABLES
    paths = {table: directory / f"{table}.parquet" for table in tables}
    columns = {table: columns_of(table, metadata) for table in tables}
    with ExitStack() as stack:
        try:
            files = {
                t: stack.enter_context(pq.ParquetFile(p, page_checksum_verification=True)) for t, p in paths.items()
            }
        except PARQUET_ERRORS as error:
            raise TraceError(f"{directory}: cannot be read: {first_line(error)}") from error
        yield lambda index: Group(**{t: read_group(files[t], paths[t], index, columns[t]) for t in tables})


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
