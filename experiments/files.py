"""The files of a run, in a directory of their own that is there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.arguments import Arguments
from experiments.errors import ConfigError
from experiments.identity import differences
from experiments.log_tables import to_arrow
from experiments.whole import names_in
from policies.log import LAYER_COLUMNS, LAYER_LISTS, LogChunk
from tracer.exchange import partial_beside, put_back, take_place
from tracer.records import read_object
from tracer.schema import TraceError

try:
    import fcntl
except ImportError:  # no such locks on Windows: what a killed process left stays there
    fcntl = None

ALWAYS = SUMMARY, MANIFEST, RESULT = "summary.json", "manifest.json", "result.parquet"
# only where the keys of `output` say so
ASKED = DECISIONS, TIMELINE, FORWARDS = "decisions.parquet", "timeline.pftrace", "forwards.parquet"
FILES = (*ALWAYS, *ASKED)
_GROUP_ROWS = 32_768  # at least, of decisions.parquet: the writer keeps what it says of each row group till the end
CELL = "cell.json"  # of a multirun: which grid ran it last, and its error


class Run(NamedTuple):
    """What a finished run says of itself."""

    summary: dict[str, Any]
    manifest: dict[str, Any]


def read_run(directory: Path) -> Run | None:
    """The run that a directory holds; None where it holds none, or not the whole of one."""
    if not all((directory / name).is_file() for name in ALWAYS):
        return None
    try:
        run = Run(read_object(directory / SUMMARY), read_object(directory / MANIFEST))
    except (FileNotFoundError, TraceError):  # replaced this moment, or damaged
        return None
    config = run.manifest.get("config", {})
    output = config.get("output", {}) if isinstance(config, dict) else None
    if not isinstance(output, dict):  # edited
        return None
    asked = [*[DECISIONS] * bool(output.get("decisions", True)), *[TIMELINE] * bool(output.get("timeline", False))]
    return run if all((directory / name).is_file() for name in asked) else None


def forwards_in(directory: Path) -> Path:
    """The file of a run that has a row for each forward; runs of old have none where `output.per_layer` was true."""
    own = directory / FORWARDS
    return own if own.is_file() else directory / RESULT


class RunFiles:
    """Writes to a hidden directory beside the run's, which takes its name and place when complete.

    Within `with`, an error removes what was written, and directories that were made for it; what a process that was
    killed left of the same run goes when it is made again. A directory of None writes nothing.

    Args:
        directory: absent, empty, or holding nothing but a run.
        given: what is to be written, and whether a finished run of any configuration is replaced.
        config: what was asked for; a finished run that was asked for the same is replaced.

    Raises:
        ConfigError: the directory cannot be replaced, or not without being told so.
    """

    def __init__(self, directory: str | Path | None, given: Arguments, config: Mapping[str, Any]) -> None:
        self._directory = None if directory is None else Path(directory)
        self._given, self._config = given, config
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []  # of decisions.parquet, to be one row group
        self._made: list[Path] = []  # directories that were not there before, innermost first
        self._is_alive = ExitStack()  # holds what tells others that the hidden directory is in use
        self._opened = ExitStack()  # files that others write

    def __enter__(self) -> RunFiles:
        if self._directory is not None:
            self._final = self._directory.resolve()  # of a link, what it points to is replaced
            put_back(self._final)
            self._check_target(self._directory)
            remove_abandoned(self._final)
            self._partial = partial_beside(self._final)
            self._made = [path for path in self._final.parents if not path.exists()]
            self._partial.mkdir(parents=True)
            self._is_alive.enter_context(in_use(self._partial))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._directory is None:
            return
        self._is_alive.close()
        with suppress(OSError):
            self._opened.close()
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):  # the error that led here is the one to report
                self._writer.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        for path in self._made:
            with suppress(OSError):  # holds something, or is gone
                path.rmdir()
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(self._directory)) from error

    def open(self, name: str) -> BinaryIO:
        """One of the run's files, for others to write; it is closed here.

        Raises:
            ConfigError: the run has no directory.
        """
        if self._directory is None:
            raise ConfigError(f"simulate: output must be a directory, where {name} is wanted")
        return self._opened.enter_context((self._partial / name).open("wb"))

    def add(self, chunk: LogChunk) -> None:
        """Append the layer executions of a chunk to decisions.parquet, where somebody wants them."""
        if self._directory is None or not (self._given.decisions or self._given.per_layer):
            return
        self._waiting.append(to_arrow(chunk.layers, LAYER_COLUMNS, LAYER_LISTS))
        if sum(rows.num_rows for rows in self._waiting) >= _GROUP_ROWS:
            self._write_group()

    def finish(self, summary: Mapping[str, Any], manifest: Mapping[str, Any], forwards: pl.DataFrame) -> None:
        """Write the other files and give the directory its name."""
        if self._directory is None:
            return
        self._opened.close()
        if self._waiting:
            self._write_group()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        write_parquet(forwards, self._partial / (FORWARDS if self._given.per_layer else RESULT))
        if self._given.per_layer and self._given.decisions:
            shutil.copyfile(self._partial / DECISIONS, self._partial / RESULT)
        elif self._given.per_layer:
            (self._partial / DECISIONS).rename(self._partial / RESULT)
        for name, values in ((MANIFEST, manifest), (SUMMARY, summary)):
            (self._partial / name).write_text(json.dumps(values, indent=2) + "\n")
        shown = self._directory
        take_place(self._partial, self._final, lambda: self._check_target(shown))

    def _write_group(self) -> None:
        group = pa.concat_tables(self._waiting)
        if self._writer is None:
            # dictionaries of ids and times make the file larger, and are kept in memory
            self._writer = pq.ParquetWriter(
                self._partial / DECISIONS, group.schema, compression="zstd", use_dictionary=False
            )
        self._writer.write_table(group)
        self._waiting.clear()

    def _check_target(self, shown: Path) -> None:
        is_empty = not names_in(shown, (*FILES, CELL), "a run")
        found = None if is_empty or self._given.overwrite else read_run(self._final)
        if found is not None and (keys := differences(found.manifest.get("config", {}), self._config)):
            raise ConfigError(f"{shown}: holds a run with another {', '.join(keys)}; output.overwrite=true replaces it")


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Within it, `remove_abandoned` leaves a hidden directory alone; a process that is killed lets go of it."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # of file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove hidden directories that were to take the place of `path`, of processes that are no more."""
    if fcntl is None:
        return
    for left in path.parent.glob(f".{escape(path.name)}.partial-*"):
        with suppress(OSError):  # in use, or gone
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def write_parquet(table: pl.DataFrame, path: Path) -> None:
    """Write a Parquet file by way of memory, so that what a disk refuses is an OSError like all others."""
    whole = BytesIO()
    table.write_parquet(whole)
    path.write_bytes(whole.getbuffer())
