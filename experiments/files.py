"""The files of a run, in a directory of their own that is there whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.errors import ConfigError
from experiments.identity import differences
from policies.log import LAYER_COLUMNS, LAYER_LISTS, LogChunk
from tracer.exchange import partial_beside, put_back, take_place
from tracer.records import read_object
from tracer.schema import TraceError

SUMMARY, MANIFEST, RESULT, DECISIONS = FILES = "summary.json", "manifest.json", "result.parquet", "decisions.parquet"
CELL = "cell.json"  # of a multirun: which grid ran it last, and its error


class Run(NamedTuple):
    """What a finished run says of itself."""

    summary: dict[str, Any]
    manifest: dict[str, Any]


def read_run(directory: Path) -> Run | None:
    """The run that a directory holds; None where it holds none, or not the whole of one."""
    if not all((directory / name).is_file() for name in FILES):
        return None
    try:
        return Run(read_object(directory / SUMMARY), read_object(directory / MANIFEST))
    except (FileNotFoundError, TraceError):  # replaced this moment, or damaged
        return None


class RunFiles:
    """Writes to a hidden directory beside the run's, which takes its name and place when complete.

    Within `with`, an error removes what was written, and directories that were made for it. A directory of None writes
    nothing.

    Args:
        directory: absent, empty, or holding nothing but a run.
        config: what was asked for; a finished run that was asked for the same is replaced.
        overwrite: replace a finished run of any configuration.

    Raises:
        ConfigError: the directory cannot be replaced, or not without being told so.
    """

    def __init__(self, directory: str | Path | None, config: Mapping[str, Any], overwrite: bool = False) -> None:
        self._directory = None if directory is None else Path(directory)
        self._config, self._overwrite = config, overwrite
        self._writer: pq.ParquetWriter | None = None
        self._made: list[Path] = []  # directories that were not there before, innermost first

    def __enter__(self) -> RunFiles:
        if self._directory is not None:
            self._final = self._directory.resolve()  # of a link, what it points to is replaced
            put_back(self._final)
            self._check_target(self._directory)
            self._partial = partial_beside(self._final)
            self._made = [path for path in self._final.parents if not path.exists()]
            self._partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._directory is None:
            return
        if self._writer is not None:
            with suppress(OSError, pa.ArrowException):  # the error that led here is the one to report
                self._writer.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        for path in self._made:
            with suppress(OSError):  # holds something, or is gone
                path.rmdir()
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(self._directory)) from error

    def add(self, chunk: LogChunk) -> None:
        """Append the layer executions of a chunk to decisions.parquet."""
        if self._directory is None:
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
        """Write the other files and give the directory its name."""
        if self._directory is None:
            return
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if per_layer:
            shutil.copyfile(self._partial / DECISIONS, self._partial / RESULT)
        else:
            write_parquet(forwards, self._partial / RESULT)
        for name, values in ((MANIFEST, manifest), (SUMMARY, summary)):
            (self._partial / name).write_text(json.dumps(values, indent=2) + "\n")
        shown = self._directory
        take_place(self._partial, self._final, lambda: self._check_target(shown))

    def _check_target(self, shown: Path) -> None:
        if not self._final.exists():
            return
        if self._final.is_mount() or Path.cwd().is_relative_to(self._final):
            raise ConfigError(
                f"{shown}: is a mount point or the working directory, which no run can take the place of; "
                "must be a directory of its own"
            )
        foreign = sorted(path.name for path in self._final.iterdir() if path.name not in (*FILES, CELL))
        if foreign:
            raise ConfigError(f"{shown}: holds {foreign[0]}, which is not of a run; must be a directory of its own")
        found = None if self._overwrite else read_run(self._final)
        if found is not None and (keys := differences(found.manifest.get("config", {}), self._config)):
            raise ConfigError(f"{shown}: holds a run with another {', '.join(keys)}; output.overwrite=true replaces it")


def write_parquet(table: pl.DataFrame, path: Path) -> None:
    """Write a Parquet file by way of memory, so that what a disk refuses is an OSError like all others."""
    whole = BytesIO()
    table.write_parquet(whole)
    path.write_bytes(whole.getvalue())
