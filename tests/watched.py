"""What must hold at any time of a run, and of its whole log, whatever the policy: slots that watch, and laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.link import Copy
from simulator.slots import Slots


class WatchedSlots(Slots):
    """Slots that check after every change what must hold at any time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.safe: set[int] = set()  # experts of the running layer that a kernel has yet to read

    def check(self) -> None:
        assert self.num_taken <= self.num_slots
        assert self._num_held >= 0
        assert self.residents.resident[self._layer, sorted(self.safe)].all()
        assert not (self.residents.resident & self.residents.in_flight).any()
        assert self.residents.in_flight.sum() <= 1

    def activate(self, activated: NDArray[np.bool_]) -> NDArray[np.bool_]:
        hits = super().activate(activated)
        self.safe = set(np.flatnonzero(hits).tolist())
        return hits

    def retain(self, *args: Any) -> None:
        super().retain(*args)
        self.check()

    def used(self, experts: Any) -> None:
        self.check()
        self.safe -= set(experts)
        super().used(experts)
        self.check()

    def hold(self) -> None:
        super().hold()
        self.check()

    def reserve(self, layer: int, expert: int) -> None:
        super().reserve(layer, expert)
        self.check()

    def land(self, layer: int, expert: int, is_promoted: bool) -> None:
        super().land(layer, expert, is_promoted)
        self.safe |= {expert} if is_promoted else set()
        self.check()

    def enter(self) -> None:
        super().enter()
        self.check()
        assert self._num_held == 0
        for layer in range(len(self.residents.resident)):
            assert self.free(layer) >= 0


def check_laws(rows: Sequence[Mapping[str, Any]], copies: Sequence[Copy], policy_ns: int) -> None:
    """Refuse a log whose copies, prefetches and misses do not add up.

    Args:
        rows: layer executions of a whole run.
        copies: all that landed in it.
        policy_ns: decision time of a layer.
    """

    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    # one copy at a time, each counted once; a prefetch may be in progress at the end
    assert all(0 <= copy.start_ns <= copy.end_ns for copy in copies)
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(copies))
    assert sum(copy.end_ns - copy.start_ns for copy in copies) == total("link_busy_ns")
    num_demanded = sum(len(row["transfers"]) for row in rows)
    assert len(copies) == num_demanded - total("num_promoted") + total("prefetch_landed")
    assert sum(copy.is_prefetch for copy in copies) == total("prefetch_landed")
    # each prefetch has one fate
    num_dropped = sum(total(f"prefetch_dropped_{why}") for why in ("begin", "flag", "victim"))
    assert total("prefetch_issued") >= total("prefetch_started") + num_dropped
    assert total("prefetch_started") - total("prefetch_landed") in (0, 1)
    assert total("prefetch_unserved") <= total("prefetch_dropped_begin")
    assert total("prefetch_unused") + total("prefetch_late") <= total("prefetch_started")
    for row in rows:
        demands = row["transfer_start_ns"][row["num_promoted"] :]
        starts = [copy.start_ns for copy in copies if copy.is_prefetch]
        gate_ns = row["plan_ns"] - policy_ns
        assert not any(gate_ns <= start < row["plan_ns"] for start in starts)
        if demands:
            assert not any(row["plan_ns"] <= start < demands[-1] for start in starts)
        assert row["prefetch_late"] == row["num_promoted"] <= 1
        missed = row["num_activated"] - len(row["hits"])
        assert missed == len(row["transfers"]) + len(row["on_cpu"])
