"""Write a trace that is either whole or absent, and stream one in bounded memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow.parquet as pq

from tracer.checks import refuse_errors
from tracer.consistency import Order
from tracer.exchange import partial_beside, put_back, take_place
from tracer.files import (
    METADATA_KEY,
    PARQUET_ERRORS,
    dump_metadata,
    first_line,
    is_table,
    open_groups,
    read_footer,
    tables_in,
    write_options,
)
from tracer.journal import JOURNAL, Journal
from tracer.parts import join
from tracer.rows import decode, encode
from tracer.schema import Pass, TraceError, TraceMetadata
from tracer.tables import REQUIRED_TABLES, TABLES, Columns, ContentHash, columns_of, to_arrow
from tracer.values import require_sound

MAX_GROUP_IDS = 1 << 20  # expert ids of routing and signals in a row group; bounds the memory of a reader


def _may_be_replaced(path: Path) -> bool:
    """An empty directory, or one that holds tables of a trace and nothing else; names alone prove nothing."""
    if not path.is_dir():
        return False
    tables = {f"{table}.parquet" for table in TABLES}
    entries = list(path.iterdir())
    return not entries or all(entry.name in tables and is_table(entry) for entry in entries)


class TraceWriter:
    """Writes passes to a hidden directory beside `path`, which takes that name only when it is closed whole.

    Within `with`, an exception removes what was written; so does an error of the writer itself. Each token's
    experts are stored in the order of their ids. Row groups end where no request goes on, and at a pass boundary
    when they grow large; group i of every table holds the same passes.

    Args:
        path: directory to be made; parents are made too.
        metadata: everything but `content_hash`, which is filled in.
        overwrite: replace a trace of that name at the very end; anything that is not a trace is refused.
        keep_finished: whatever stops the writer, leave its files if a request was finished: `recover` makes a trace of
            these. `kept` is the directory then. A process that is killed at once always leaves them.

    Raises:
        TraceError: the name is taken, a pass cannot be stored, or the disk refuses.
    """

    kept: Path | None = None

    def __init__(
        self, path: Path | str, metadata: TraceMetadata, *, overwrite: bool = False, keep_finished: bool = False
    ) -> None:
        self.path = Path(path)
        self._metadata = metadata
        self._overwrite = overwrite
        self._keep_finished = keep_finished
        put_back(self.path)
        self._check_target()
        text = dump_metadata(metadata, 0, 0)  # what JSON cannot hold is refused before the work, not after it
        self._hash = ContentHash()
        self._pending: list[Pass] = []
        self._pending_ids = 0
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._has_signals = False
        self._last_pass = -1
        self._last_requests: set[int] = set()
        self._num_passes = 0
        self._requests: set[int] = set()
        self._stored: set[int] = set()  # requests of the row groups that are on disk
        self._going_on: list[int] = []  # of these, which may have more passes
        self._partial = partial_beside(self.path)
        self._open = True
        try:
            self._partial.mkdir(parents=True)
            self._journal = Journal(self._partial, text)
        except BaseException as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise TraceError(f"{self.path}: cannot make the trace: {first_line(error)}") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def write(self, pass_: Pass) -> None:
        """Add the next pass; nothing of it is kept by reference. Its values are checked with those of its row group."""
        if not self._open:
            raise TraceError(f"{self.path}: pass {pass_.pass_id} after the trace was closed")
        if pass_.pass_id <= self._last_pass:
            raise TraceError(
                f"{self.path}: pass {pass_.pass_id} after pass {self._last_pass}; needs ascending ids from 0"
            )
        if self._num_passes and self._has_signals != (pass_.signals is not None):
            found, rest = ("no signals", "have them") if self._has_signals else ("signals", "have none")
            raise TraceError(f"{self.path}: pass {pass_.pass_id} has {found}; the passes before {rest}")
        num_ids, requests = _num_ids(pass_), set(pass_.requests.tolist())
        going_on = requests & self._last_requests
        if self._pending and (not going_on or self._pending_ids + num_ids > MAX_GROUP_IDS):
            self._flush(sorted(going_on))
        self._pending.append(join([pass_], pass_.pass_id, pass_.wall_ns))  # a copy
        self._pending_ids += num_ids
        self._has_signals = pass_.signals is not None
        self._last_pass = pass_.pass_id
        self._last_requests = requests
        self._num_passes += 1
        self._requests |= requests

    def flush(self) -> None:
        """Put on disk what was written so far, each request of which is complete: all of them can be recovered then."""
        if self._pending:
            self._flush([])

    def close(self) -> None:
        """Finish the files, put them on disk, and give the directory its name; closing again does nothing."""
        if not self._open:
            return
        with self._whole_or_gone():
            if not self._num_passes:
                raise TraceError(f"{self.path}: no pass was written; a trace has one or more")
            self.flush()
            metadata = replace(self._metadata, content_hash=self._hash.hexdigest())
            text = dump_metadata(metadata, self._num_passes, len(self._requests))
            for table, writer in self._writers.items():
                writer.add_key_value_metadata({METADATA_KEY: text})
                writer.close()
                with (self._partial / f"{table}.parquet").open("r+b") as file:
                    os.fsync(file.fileno())
            self._check_target()  # while there are notes still
            self._journal.close(keep=False)
            _sync_directory(self._partial)
            take_place(self._partial, self.path, self._check_target)
            self._open = False
            _sync_directory(self.path.parent)

    def _check_target(self) -> None:
        if self.path.is_symlink():  # the trace would take the place of the link, not of what it points to
            raise TraceError(f"{self.path}: is a symbolic link; name the trace itself")
        if not self.path.exists():
            if ".." in self.path.parts and not self.path.parent.is_dir():  # making it would make what .. leaves again
                raise TraceError(f"{self.path}: no directory {self.path.parent}; one named with .. must be there")
            return
        if not self._overwrite:
            raise TraceError(f"{self.path}: exists already; choose another name, or ask to overwrite it")
        if not _may_be_replaced(self.path):
            raise TraceError(f"{self.path}: is not a trace; only a trace is overwritten")

    def _flush(self, going_on: list[int]) -> None:
        """Write what is pending as one row group of each table, and note which of its requests may have more."""
        sizes, num_rows = {}, {}
        with self._whole_or_gone():
            try:
                group = encode(self._pending, self._metadata)
            except TraceError as error:
                raise TraceError(f"{self.path}: {error}") from error
            for table in TABLES if self._has_signals else REQUIRED_TABLES:
                arrays: Columns = getattr(group, table)
                self._hash.update(table, arrays)
                rows = to_arrow(columns_of(table, self._metadata), arrays)
                if table not in self._writers:
                    options = write_options(table, self._metadata)
                    self._writers[table] = pq.ParquetWriter(self._partial / f"{table}.parquet", rows.schema, **options)
                self._writers[table].write_table(rows, row_group_size=rows.num_rows)
                sizes[table] = (self._partial / f"{table}.parquet").stat().st_size
                num_rows[table] = rows.num_rows
            self._journal.add(sizes, num_rows, going_on)
            self._stored.update(group.forwards["request"].tolist())
        self._going_on = going_on
        self._pending = []
        self._pending_ids = 0

    @contextmanager
    def _whole_or_gone(self) -> Iterator[None]:
        try:
            yield
        except PARQUET_ERRORS as error:
            self._discard()
            kept = f"{'finished requests are' if self.kept else 'nothing is'} kept"
            raise TraceError(f"{self.path}: cannot be written, {kept}: {first_line(error)}") from error
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        self._open = False
        for writer in self._writers.values():
            with suppress(*PARQUET_ERRORS):  # the error that led here is the one to report
                writer.close()
        self._journal.close(keep=True)
        has_finished = bool(self._stored - set(self._going_on))
        if self._keep_finished and has_finished and (self._partial / JOURNAL).is_file():
            self.kept = self._partial
        else:
            shutil.rmtree(self._partial, ignore_errors=True)


def _num_ids(pass_: Pass) -> int:
    signals = pass_.signals
    return pass_.expert_ids.size + (signals.score_ids.size + signals.ahead_ids.size if signals else 0)


def _sync_directory(path: Path) -> None:
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class TraceReader:
    """Streams the passes of a trace, row group by row group; opening reads only the ends of the files.

    Bytes that changed on disk are found by the checksums of their pages. Values that were changed by a tool which wrote
    new checksums are found as far as they contradict each other, and otherwise by the doctor alone, who compares
    the hash over all values.

    Raises:
        TraceError: the directory does not hold a whole trace; while streaming, a page with a wrong checksum, rows that
            do not make a pass, or a forward that does not continue its request, with pass, request and layer.
    """

    metadata: TraceMetadata
    path: Path
    num_passes: int
    num_requests: int
    has_signals: bool

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        put_back(self.path)
        if not self.path.is_dir():
            raise TraceError(f"{self.path}: no such directory; a trace is a directory of Parquet tables")
        footers = {table: read_footer(self.path, table) for table in tables_in(self.path)}
        first = footers["forwards"]
        for table, footer in footers.items():
            if footer.metadata != first.metadata:
                raise TraceError(f"{self.path}: metadata of {table}.parquet and forwards.parquet differ")
            if len(footer.rows) != len(first.rows):
                found = f"{len(footer.rows)} row groups in {table}.parquet, {len(first.rows)} in forwards.parquet"
                raise TraceError(f"{self.path}: {found}; needs equally many")
        self.metadata = first.metadata
        self.num_passes = first.num_passes
        self.num_requests = first.num_requests
        self.has_signals = "signals" in footers
        self._num_groups = len(first.rows)

    def __iter__(self) -> Iterator[Pass]:
        return self.passes()

    def passes(self, *, signals: bool = False) -> Iterator[Pass]:
        """Passes in order, from the start at each call; with `signals` the optional table is read too."""
        if signals and not self.has_signals:
            raise TraceError(f"{self.path}: has no signals; record the trace with signals to use them")
        return self._stream(signals)

    def _stream(self, signals: bool) -> Iterator[Pass]:
        last_pass = -1
        num_passes = 0
        requests: set[int] = set()
        order = Order()
        with open_groups(self.path, self.metadata, signals=signals) as read:
            for index in range(self._num_groups):
                group = read(index)
                try:
                    layout = require_sound(group, self.metadata, last_pass)
                    refuse_errors(order.check(group))
                except TraceError as error:
                    raise TraceError(f"{self.path}: {error}") from None
                requests.update(group.forwards["request"].tolist())
                last_pass = int(group.forwards["pass_id"][-1])
                for pass_ in decode(group, layout, self.metadata.shape):
                    num_passes += 1
                    yield pass_
        if num_passes != self.num_passes:
            raise TraceError(f"{self.path}: {num_passes} passes; its metadata says {self.num_passes}")
        if len(requests) != self.num_requests:
            raise TraceError(f"{self.path}: {len(requests)} requests; its metadata says {self.num_requests}")
