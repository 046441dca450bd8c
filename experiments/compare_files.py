"""The files of a comparison, in a directory of their own that is there whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from experiments.compare_cells import as_table
from experiments.compare_judge import Comparison
from experiments.compare_plot import plot_comparison
from experiments.compare_runs import FORWARDS, RUNS, write_runs
from experiments.compare_table import as_markdown
from experiments.errors import ConfigError
from experiments.files import write_parquet
from tracer.exchange import partial_beside, put_back, take_place

TABLE, NUMBERS, CELLS, PLOT, TIMELINE = "table.md", "comparison.json", "cells.parquet", "plot.png", "timeline.pftrace"
FILES = (TABLE, NUMBERS, CELLS, PLOT, TIMELINE, RUNS, FORWARDS)


def write(comparison: Comparison, directory: Path) -> None:
    """Write everything but the timelines into a directory that is there; `read_runs` of it gives the runs again."""
    write_runs(comparison.runs, directory)
    (directory / NUMBERS).write_text(json.dumps(comparison.as_plain(), indent=1) + "\n")
    write_parquet(as_table(comparison.cells), directory / CELLS)
    (directory / TABLE).write_text(as_markdown(comparison), encoding="utf-8")
    plot_comparison(comparison, directory / PLOT)


@contextmanager
def whole(path: Path, overwrite: bool) -> Iterator[Path]:
    """A hidden directory to write into, which takes this name when all went well, and is removed when not.

    Args:
        path: absent, or empty; with `overwrite` also one that holds a comparison and nothing else.
        overwrite: replace what is there.

    Raises:
        ConfigError: the directory cannot be replaced.
    """
    final = path.resolve()
    put_back(final)
    _check(path, overwrite)
    partial = partial_beside(final)
    made = [parent for parent in final.parents if not parent.exists()]  # innermost first
    partial.mkdir(parents=True)
    try:
        yield partial
        take_place(partial, final, lambda: _check(path, overwrite))
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # holds something, or is gone
                parent.rmdir()


def _check(path: Path, overwrite: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir() or path.is_mount() or Path.cwd().is_relative_to(path.resolve()):
        raise ConfigError(f"{path}: a comparison cannot take its place; must be a directory of its own")
    found = sorted(file.name for file in path.iterdir())
    if foreign := [name for name in found if name not in FILES]:
        raise ConfigError(f"{path}: holds {foreign[0]}, which is not of a comparison; must be a directory of its own")
    if found and not overwrite:
        raise ConfigError(f"{path}: holds a comparison; --overwrite replaces it")
