"""The files of a comparison, in a directory of their own."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.compare_cells import as_table
from experiments.compare_judge import Comparison
from experiments.compare_plot import plot_comparison
from experiments.compare_runs import RUNS, TABLES, write_runs
from experiments.compare_table import as_markdown
from experiments.errors import ConfigError
from experiments.files import write_parquet
from experiments.whole import names_in

TABLE, NUMBERS, CELLS, PLOT, TIMELINE = "table.md", "comparison.json", "cells.parquet", "plot.png", "timeline.pftrace"
FILES = (TABLE, NUMBERS, CELLS, PLOT, TIMELINE, RUNS, TABLES)


def write(comparison: Comparison, directory: Path) -> None:
    """Write everything but the timelines into a directory that is there; `read_runs` of it gives the runs again."""
    write_runs(comparison.runs, directory)
    (directory / NUMBERS).write_text(json.dumps(comparison.as_plain(), indent=1) + "\n")
    write_parquet(as_table(comparison.cells), directory / CELLS)
    (directory / TABLE).write_text(as_markdown(comparison), encoding="utf-8")
    plot_comparison(comparison, directory / PLOT)


def check(directory: Path, overwrite: bool) -> None:
    """Refuse a directory that holds anything but a comparison, or one that is not to be replaced.

    Raises:
        ConfigError: it is such a directory.
    """
    if names_in(directory, FILES, "a comparison") and not overwrite:
        raise ConfigError(f"{directory}: holds a comparison; --overwrite replaces it")
