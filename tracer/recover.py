"""Finished requests of a recording that was stopped, as a trace of their own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from glob import escape
from io import RawIOBase
from pathlib import Path

import pyarrow.parquet as pq

from tracer.files import read_group
from tracer.journal import JOURNAL, Flush, is_in_use, read_journal
from tracer.parquet_end import end_of
from tracer.parts import join, split
from tracer.rows import decode
from tracer.schema import Pass, TraceError, TraceMetadata, counted
from tracer.store import TraceWriter
from tracer.tables import TABLES, Group, columns_of
from tracer.values import require_sound

_PARTIAL = re.compile(r"\..+\.partial-[0-9a-f]+")


@dataclass(frozen=True)
class Recovered:
    """What was recovered: request numbers as in the recording."""

    path: Path
    num_requests: int
    lost: tuple[int, ...]  # requests that were begun, as far as is known
    num_damaged: int  # row groups that could not be read, and all behind the first

    def __str__(self) -> str:
        lost = f"; begun, and not finished: {', '.join(map(str, self.lost))}" if self.lost else ""
        damaged = f"; {counted(self.num_damaged, 'row group')} could not be read" if self.num_damaged else ""
        return f"{self.path}: recovered {counted(self.num_requests, 'finished request')}{lost}{damaged}"


def recover(place: Path, output: Path | None = None) -> Recovered:
    """Make a trace of the finished requests of a recording that was stopped, then remove what was left of it.

    A request is finished if the writer went on without it. Of passes that it shared with others, its part is kept.

    Args:
        place: what was left, `.NAME.partial-*`, or the name that the trace should have had.
        output: directory to be made; None is that name.

    Raises:
        TraceError: nothing can be recovered there, the writer is at work, or the name is taken.
    """
    partial = _partial_of(place)
    if is_in_use(partial):
        raise TraceError(f"{partial}: its writer is at work; wait for it, or stop it first")
    metadata, flushes = read_journal(partial)
    left = _Left(partial, metadata, flushes)
    seen = left.count()
    going_on = set(flushes[left.num_whole - 1].going_on) if left.num_whole else set()
    finished = seen - going_on
    if not finished:
        raise TraceError(f"{partial}: no request was finished, so there is nothing to recover; it can be deleted")
    lost = tuple(sorted(going_on))
    details = metadata.details | {"recovered": {"num_requests": len(finished), "lost": list(lost)}}
    path = output or partial.with_name(partial.name.removeprefix(".").rpartition(".partial-")[0])
    with TraceWriter(path, replace(metadata, details=details, content_hash="")) as writer:
        for pass_ in (pass_ for _, passes in left.groups() for pass_ in passes):
            mine = [part for part in split(pass_) if int(part.requests[0]) in finished]
            if mine:
                writer.write(pass_ if len(mine) == pass_.requests.size else join(mine, pass_.pass_id))
    shutil.rmtree(partial)
    return Recovered(path, len(finished), lost, len(flushes) - left.num_whole)


def partials_of(path: Path) -> list[Path]:
    """What stopped writers of a trace left beside its name, of which something may be recovered."""
    found = path.absolute().parent.glob(f".{escape(path.name)}.partial-*")
    return sorted(partial for partial in found if (partial / JOURNAL).is_file())


def _partial_of(place: Path) -> Path:
    if (place / JOURNAL).is_file() and _PARTIAL.fullmatch(place.absolute().name):
        return place.absolute()
    found = partials_of(place)
    if not found:
        raise TraceError(
            f"{place}: nothing to recover: it is nothing that a stopped writer left, nor is there any beside it"
        )
    if len(found) > 1:
        raise TraceError(f"{place}: several writers were stopped; name one of {', '.join(map(str, found))}")
    return found[0]


class _Left:
    """The whole row groups of unfinished files; `num_whole` of them turn out to be readable."""

    def __init__(self, partial: Path, metadata: TraceMetadata, flushes: list[Flush]) -> None:
        self._partial, self._metadata = partial, metadata
        self._tables = [table for table in TABLES if flushes and table in flushes[0].bytes]
        self.num_whole = len(flushes)
        self._ends: dict[str, tuple[int, bytes]] = {}
        while self.num_whole:
            whole = flushes[: self.num_whole]
            try:
                self._ends = {table: self._end(table, whole) for table in self._tables}
                return
            except TraceError:
                self.num_whole -= 1

    def _end(self, table: str, whole: list[Flush]) -> tuple[int, bytes]:
        """Where the last whole row group of a table ends, and what must follow it."""
        sizes, rows = [flush.bytes[table] for flush in whole], [flush.rows[table] for flush in whole]
        return sizes[-1], end_of(self._partial / f"{table}.parquet", table, self._metadata, sizes, rows)

    def count(self) -> set[int]:
        """Read everything once, up to what cannot be read; the requests in it."""
        seen: set[int] = set()
        num_read = 0
        with suppress(TraceError):
            for group, _ in self.groups():
                seen.update(group.forwards["request"].tolist())
                num_read += 1
        self.num_whole = num_read
        return seen

    def groups(self) -> Iterator[tuple[Group, list[Pass]]]:
        """Row groups in order, each with its passes.

        Raises:
            TraceError: one cannot be read, or its rows do not make passes.
        """
        last_pass = -1
        columns = {table: columns_of(table, self._metadata) for table in self._tables}
        with ExitStack() as stack:
            files = {}
            for table, (size, end) in self._ends.items():
                source = _Ended(self._partial / f"{table}.parquet", size, end)
                stack.callback(source.close)
                files[table] = stack.enter_context(pq.ParquetFile(source, page_checksum_verification=True))
            for index in range(self.num_whole):
                group = Group(
                    **{t: read_group(files[t], self._partial / f"{t}.parquet", index, columns[t]) for t in files}
                )
                layout = require_sound(group, self._metadata, last_pass)
                last_pass = int(group.forwards["pass_id"][-1])
                yield group, list(decode(group, layout, self._metadata.shape))


class _Ended(RawIOBase):
    """The first bytes of a file, and others behind them."""

    def __init__(self, path: Path, size: int, end: bytes) -> None:
        self._file, self._size, self._end, self._at = path.open("rb"), size, end, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        self._at = offset + (0, self._at, self._size + len(self._end))[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        stop = self._size + len(self._end) if size < 0 else self._at + size
        self._file.seek(self._at)
        found = self._file.read(max(min(stop, self._size) - self._at, 0)) if self._at < self._size else b""
        found += self._end[max(self._at - self._size, 0) : max(stop - self._size, 0)]
        self._at += len(found)
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
