"""Run cells of a grid in whatever process: a failure is one cell's, and a process whose launcher ends, ends too."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.files import CELL
from experiments.messages import USER_ERRORS, explain
from tracer.records import read_object
from tracer.schema import TraceError

_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "POLARS_MAX_THREADS",
)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its error in one line, and its traceback if it was not the user's."""

    label: str
    error: str | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class Grid:
    """One grid that is being run.

    Args:
        name: tells it from others of its directory.
        journal: file to which each cell adds a line when it begins and one when it ends; its directory is there.
        launcher: process id of whoever launched it.
    """

    name: str
    journal: Path
    launcher: int

    def run(self, label: str, work: Callable[[], Any], directory: Path | None = None) -> Outcome:
        """Do the work of one cell, in `directory` if that is known; what goes wrong there is its outcome."""
        self._write({"begun": label, "directory": None if directory is None else str(directory)})
        try:
            work()
            outcome = Outcome(label)
        except USER_ERRORS as error:
            outcome = Outcome(label, explain(error))
        # a bug, or a policy that ends the program: of one cell; the others go on, and all are listed at the end
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            outcome = Outcome(label, text, "".join(traceback.format_exception(error)))
        self._write(asdict(outcome))
        return outcome

    def _write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record) + "\n"
        descriptor = os.open(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())  # in one piece, as other processes write there too
        finally:
            os.close(descriptor)

    def note(self, directory: Path, overrides: Sequence[str], error: str | None) -> None:
        """Leave word in a cell's directory of what became of it."""
        directory.mkdir(parents=True, exist_ok=True)  # an equal cell may be taking its place this moment
        cell = {"grid": self.name, "overrides": list(overrides), "error": error}
        (directory / CELL).write_text(json.dumps(cell, indent=2) + "\n")

    def enter_process(self) -> None:
        """Make a process that was started for the grid end with its launcher, who alone hears of an interrupt."""
        if os.getpid() != self.launcher:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            if os.getppid() == self.launcher:
                _end_with(self.launcher)


@cache
def _end_with(parent: int) -> None:
    """End this process soon after its parent has ended, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="end with the launcher", daemon=True).start()


def _end_kept_processes() -> None:
    from joblib.externals.loky import get_reusable_executor  # slow to import, and single runs have no processes

    get_reusable_executor(max_workers=1).shutdown(wait=True)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes started within it use one thread each, unless the environment says otherwise, and end quietly.

    joblib keeps its processes for later calls. None of an earlier grid is used, as it would have the directory, the
    environment and the modules of then; and none is left with what it keeps in memory.
    """
    _end_kept_processes()
    before = dict(os.environ)
    for name in _THREADS:
        os.environ.setdefault(name, "1")
    # what watches over semaphores would complain of those of processes that were ended
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [before.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    try:
        yield
    finally:
        _end_kept_processes()
        for name in ("PYTHONWARNINGS", *_THREADS):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def cells_of(sweep: Path) -> dict[Path, dict[str, Any]]:
    """What became of each cell below a directory when it was run last: its `grid`, `overrides` and `error`, or null."""
    found = {}
    for path in sorted(sweep.rglob(CELL)):
        if any(part.startswith(".") for part in path.relative_to(sweep).parts):
            continue
        try:
            cell = read_object(path)
        except (FileNotFoundError, TraceError):  # replaced this moment; somebody else's, or cut short
            continue
        if {"grid", "overrides", "error"} == set(cell):
            found[path.parent] = cell
    return found
