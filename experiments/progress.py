"""Cells as they finish, whatever process they run in: a bar with the time left, or a line for each."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

_INTERVAL_S = 0.2


class Progress:
    """Watches the journal of a grid while it runs; at its end prints each traceback once, and removes the file.

    Args:
        program: name at the head of lines.
        journal: to which cells add lines when they begin and end.
        num_cells: of the grid.
        has_bar: show a bar where stderr is a terminal.
        has_lines: show a line for each cell where there is no bar.
    """

    def __init__(
        self, program: str, journal: Path, num_cells: int, *, has_bar: bool = True, has_lines: bool = True
    ) -> None:
        self._program, self._journal, self._num_cells = program, journal, num_cells
        self._has_bar = has_bar and sys.stderr.isatty()
        self._has_lines = has_lines and not self._has_bar
        self._num_seen, self._offset = 0, 0
        self.under_way: dict[str, str | None] = {}  # cells that have begun and not ended: label and directory
        self._tracebacks: dict[str, None] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._bar = tqdm(total=self._num_cells, unit="cell", disable=not self._has_bar, dynamic_ncols=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._read()
        self._bar.close()
        self._journal.unlink(missing_ok=True)
        for text in self._tracebacks:
            print(text, end="", file=sys.stderr)

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self._read()

    def _read(self) -> None:
        if not self._journal.exists():
            return
        with self._journal.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._offset += len(line)
                self._show(json.loads(line))

    def _show(self, outcome: dict[str, Any]) -> None:
        if "begun" in outcome:
            self.under_way[outcome["begun"]] = outcome["directory"]
            return
        self.under_way.pop(outcome["label"], None)
        self._num_seen += 1
        self._bar.update()
        if outcome["traceback"] is not None:
            self._tracebacks.setdefault(outcome["traceback"])
        if self._has_lines:
            failed = " failed" if outcome["error"] is not None else ""
            print(
                f"{self._program}: cell {self._num_seen} of {self._num_cells}{failed}: {outcome['label']}",
                file=sys.stderr,
            )
