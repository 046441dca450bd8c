"""The files of `oled-curves`, in a directory of their own that is there whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl

from experiments.errors import ConfigError
from experiments.files import write_parquet
from experiments.identity import asked, differences, sources
from tracer.exchange import partial_beside, put_back, take_place
from tracer.files import metadata_hash
from tracer.records import read_object
from tracer.schema import TraceError
from tracer.store import TraceReader

TABLE, PLOT, MANIFEST = FILES = "curves.parquet", "curves.png", "manifest.json"


class CurveFiles:
    """A hidden directory, which takes its name and place when complete; within `with`, an error removes it.

    Args:
        directory: absent, empty, or holding nothing but curves; None is outputs/DATE/TIME.
        config: what was asked for; curves that were asked for the same are replaced.
        reader: of the trace.
        overwrite: replace curves that something else was asked for.

    Raises:
        ConfigError: the directory cannot be replaced, or not without being told so.
    """

    partial: Path  # where files are written until then
    shown: str  # what messages call the directory

    def __init__(
        self, directory: str | None, config: Mapping[str, Any], reader: TraceReader, overwrite: bool = False
    ) -> None:
        self.shown = directory or f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
        self._final = Path(self.shown).resolve()
        self._config, self._reader, self._overwrite = asked(config), reader, overwrite

    def __enter__(self) -> CurveFiles:
        put_back(self._final)
        self._check()
        self.partial = partial_beside(self._final)
        self._made = [path for path in self._final.parents if not path.exists()]  # innermost first
        self.partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        for path in self._made:
            with suppress(OSError):  # holds something, or is gone
                path.rmdir()

    def finish(self, frame: pl.DataFrame) -> None:
        """Write the table and the manifest beside the plot, and give the directory its name."""
        write_parquet(frame, self.partial / TABLE)
        metadata = self._reader.metadata
        manifest = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": self._config,
            "trace": {"path": str(self._reader.path), "hash": metadata_hash(metadata), "source": metadata.source},
            "sources": sources(),
            "versions": {name: version(name) for name in ("oledsim", "numpy", "numba", "polars")},
        }
        (self.partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        take_place(self.partial, self._final, self._check)

    def _check(self) -> None:
        if not self._final.exists():
            return
        if not self._final.is_dir() or self._final.is_mount() or Path.cwd().is_relative_to(self._final):
            raise ConfigError(f"{self.shown}: curves cannot take its place; must be a directory of their own")
        found = sorted(path.name for path in self._final.iterdir())
        if foreign := [name for name in found if name not in FILES]:
            raise ConfigError(
                f"{self.shown}: holds {foreign[0]}, which is not of curves; must be a directory of its own"
            )
        if found and not self._overwrite and (keys := self._differences()):
            raise ConfigError(
                f"{self.shown}: holds curves with another {', '.join(keys)}; output.overwrite=true replaces them"
            )

    def _differences(self) -> list[str]:
        try:
            manifest = read_object(self._final / MANIFEST)
        except (FileNotFoundError, TraceError):  # replaced this moment, or damaged
            return []
        return differences(manifest.get("config", {}), self._config)
