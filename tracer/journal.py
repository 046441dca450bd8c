"""What a writer notes beside its unfinished files, so that finished requests can be had when it is stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tracer.files import first_line, parse_metadata
from tracer.records import make_record
from tracer.schema import TraceError, TraceMetadata

fcntl: ModuleType | None
try:
    import fcntl
except ModuleNotFoundError:  # Windows: nothing says whether a writer is at work
    fcntl = None

JOURNAL = "recovery.jsonl"


@dataclass(frozen=True)
class Flush:
    """A row group of each table that is wholly in its file."""

    bytes: dict[str, int]  # of each table's file up to its end
    rows: dict[str, int]
    going_on: tuple[int, ...]  # requests that may have more passes behind it


class Journal:
    """Notes of one writer, which are locked while it lives.

    Args:
        directory: of its files.
        metadata: of the trace, as every file will carry it.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, directory: Path, metadata: str) -> None:
        self._path = directory / JOURNAL
        self._file = self._path.open("x", encoding="utf-8")
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._write(metadata)

    def add(self, sizes: Mapping[str, int], rows: Mapping[str, int], going_on: Iterable[int]) -> None:
        """Note a row group."""
        self._write(json.dumps({"bytes": dict(sizes), "rows": dict(rows), "going_on": list(going_on)}))

    def close(self, *, keep: bool) -> None:
        """End the notes; without `keep` they go."""
        with suppress(OSError):  # what is not written is not relied upon
            self._file.close()
        if not keep:
            self._path.unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def is_in_use(directory: Path) -> bool:
    """Whether the writer that noted this is still at work, as far as the system can tell."""
    if fcntl is None:
        return False
    with (directory / JOURNAL).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def read_journal(directory: Path) -> tuple[TraceMetadata, list[Flush]]:
    """What a writer noted up to when it was stopped: metadata and the row groups whose bytes are there.

    Raises:
        TraceError: there is no such note, or it is not one.
    """
    path = directory / JOURNAL
    try:
        head, *lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {first_line(error)}") from None
    metadata, _, _ = parse_metadata(path, head.encode())
    flushes = []
    sizes = {file.stem: file.stat().st_size for file in directory.glob("*.parquet")}
    for line in lines[:-1]:  # behind the last end of a line stands nothing, or what was being written
        try:
            flush = make_record(Flush, json.loads(line), str(path), TraceError)
        except ValueError as error:
            raise TraceError(f"{path}: line {len(flushes) + 2}: {first_line(error)}") from None
        if any(sizes.get(table, 0) < size for table, size in flush.bytes.items()):
            break
        flushes.append(flush)
    return metadata, flushes
