"""What link and slots count for the log while a layer execution goes on."""

from __future__ import annotations

from policies.log import PREFETCH_COUNTS

_COUNTED = ("link_busy_ns", *PREFETCH_COUNTS)


class Counts:
    """Counts prefetches and the link's time in the log's row of the layer execution that is going on.

    The engine begins the next row when the next layer begins, after the forward's tail if need be.
    """

    def __init__(self) -> None:
        self._row: dict[str, int] = {}

    def begin(self, row: dict[str, int]) -> None:
        """Count in this row from now on, from 0."""
        row.update(dict.fromkeys(_COUNTED, 0))
        self._row = row

    def add(self, name: str, count: int = 1) -> None:
        """Add to one column of the log."""
        self._row[name] += count
