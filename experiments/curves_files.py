"""The files of `oled-curves`, in a directory of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from experiments.errors import ConfigError
from experiments.files import write_parquet
from experiments.identity import asked, differences, sources, versions
from experiments.whole import names_in
from tracer.files import metadata_hash
from tracer.records import read_object
from tracer.schema import TraceError
from tracer.store import TraceReader

TABLE, PLOT, MANIFEST = FILES = "curves.parquet", "curves.png", "manifest.json"


def write(frame: pl.DataFrame, config: Mapping[str, Any], reader: TraceReader, directory: Path) -> None:
    """Write the table, and the manifest of what was asked for, beside the plot."""
    write_parquet(frame, directory / TABLE)
    metadata = reader.metadata
    manifest = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": asked(config),
        "trace": {"path": str(reader.path), "hash": metadata_hash(metadata), "source": metadata.source},
        "sources": sources(),
        "versions": versions(("oledsim", "numpy", "numba", "polars")),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def check(directory: Path, config: Mapping[str, Any], overwrite: bool) -> None:
    """Refuse a directory that holds anything but curves, or, unless told to replace them, other ones than are asked for.

    Raises:
        ConfigError: it is such a directory.
    """
    if not names_in(directory, FILES, "curves") or overwrite:
        return
    try:
        manifest = read_object(directory / MANIFEST)
    except (FileNotFoundError, TraceError):  # replaced this moment, or damaged
        return
    if keys := differences(manifest.get("config", {}), asked(config)):
        raise ConfigError(
            f"{directory}: holds curves with another {', '.join(keys)}; output.overwrite=true replaces them"
        )
