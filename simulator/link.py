"""The link from host to GPU: one copy at a time, demand before prefetches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from policies.profile import Costs, copy_ns
from simulator.clock import Clock, Stage
from simulator.counts import Counts
from simulator.slots import Slots


@dataclass(slots=True)
class Chunk:
    """Transfers that one grouped kernel runs over once all have landed."""

    copies: list[Copy]
    num_waiting: int = 0

    def __post_init__(self) -> None:
        self.num_waiting = len(self.copies)
        for copy in self.copies:
            copy.chunk = self


@dataclass(slots=True)
class Copy:
    """One expert on its way to the GPU; a prefetch is in a chunk only once it is promoted."""

    layer: int
    expert: int
    is_prefetch: bool
    chunk: Chunk | None = None
    start_ns: int = -1
    end_ns: int = -1


class Link:
    """Copies what is demanded, in order, and when nothing is, prefetches by priority and then issue number.

    A copy in progress is never interrupted. A prefetch is dropped, and counted as for want of a victim, also if its
    expert has come to the GPU by other means when the copy would start.

    Args:
        score: [L, E] of the policy's state, read when a prefetch needs a victim; None where the policy has none.
        counts: of the layer execution that is going on.
        on_copy: told of every copy that has landed.
    """

    def __init__(
        self,
        clock: Clock,
        slots: Slots,
        costs: Costs,
        score: NDArray[np.float64] | None,
        counts: Counts,
        on_copy: Callable[[Copy], None] | None = None,
    ) -> None:
        self.current: Copy | None = None
        self.is_held = False  # no copy starts between the reading at a gate and its plan
        self.slow_until_ns = 0  # end of the CPU batch
        self._clock, self._slots, self._score = clock, slots, score
        self._counts, self._on_copy = counts, on_copy
        self._copy_ns, self._slow_copy_ns = copy_ns(costs, False), copy_ns(costs, True)
        self._demands: deque[Copy] = deque()
        self._queue: list[tuple[float, float, int, int, int]] = []  # priority, number, layer, expert; the next one last
        self._num_issued = 0
        self._is_woken = False

    def demand(self, copies: Iterable[Copy]) -> None:
        """Queue a plan's transfers."""
        self._demands.extend(copies)
        self.wake()

    def issue(self, prefetches: NDArray[np.int64], priority: NDArray[np.float64]) -> None:
        """Queue prefetches of (layer, expert), [N, 2], with a pair of priorities each, [N, 2]."""
        for pair, target in zip(priority.tolist(), prefetches.tolist(), strict=True):
            (first, second), (layer, expert) = pair, target
            self._queue.append((first, second, self._num_issued, layer, expert))
            self._num_issued += 1
        self._queue.sort(reverse=True)
        self._counts.add("prefetch_issued", len(prefetches))
        self.wake()

    def clear(self) -> None:
        """Drop what is queued, because the policy says so."""
        self._counts.add("prefetch_dropped_flag", len(self._queue))
        self._queue.clear()

    def drop(self, layer: int) -> set[int]:
        """Drop what is queued for a layer that begins; returns the experts."""
        kept = [entry for entry in self._queue if entry[3] != layer]
        dropped = {entry[4] for entry in self._queue if entry[3] == layer}
        self._counts.add("prefetch_dropped_begin", len(self._queue) - len(kept))
        self._queue = kept
        return dropped

    def wake(self) -> None:
        """Let an idle link look for its next copy, when all else that happens at this instant has happened."""
        if self.current is None and not self._is_woken and (self._demands or self._queue):
            self._is_woken = True
            self._clock.at(Stage.PICK, then=self._pick)

    def _pick(self) -> None:
        self._is_woken = False
        if self.is_held:
            return
        if not self._demands:
            self._pick_prefetch()
        # Without room the copy waits until a kernel ends, which wakes the link. One always ends: when the hits have
        # run, residents, prefetches in progress and the transfers to be retained fit into capacity together, and of
        # other transfers no more are left than the open chunk has before this one, fewer than a chunk. Staging holds
        # a whole chunk, so there is room at the latest when the kernels of all earlier chunks have run.
        elif self._slots.has_room:
            self._slots.hold()
            self._start(self._demands.popleft())

    def _pick_prefetch(self) -> None:
        while self._queue:
            layer, expert = self._queue[-1][3:]
            is_needed = not self._slots.holds(layer, expert)
            has_slot = is_needed and self._slots.free(layer) > 0
            if has_slot and not self._slots.has_room:
                return  # a demand copy has borrowed the free slot; its kernel's end will wake the link
            self._queue.pop()
            # without a score a plan that prefetches was refused
            if has_slot or (is_needed and self._slots.give_way(layer, expert, self._score)):  # pyright: ignore[reportArgumentType]
                self._slots.reserve(layer, expert)
                self._counts.add("prefetch_started")
                self._start(Copy(layer, expert, is_prefetch=True))
                return
            self._counts.add("prefetch_dropped_victim")

    def _start(self, copy: Copy) -> None:
        now_ns = self._clock.now_ns
        copy.start_ns, self.current = now_ns, copy
        copy_ns = self._slow_copy_ns if now_ns < self.slow_until_ns else self._copy_ns
        self._clock.at(Stage.LAND, copy_ns, partial(self._land, copy))

    def _land(self, copy: Copy) -> None:
        self.current = None
        copy.end_ns = self._clock.now_ns
        self._counts.add("link_busy_ns", copy.end_ns - copy.start_ns)
        if copy.is_prefetch:
            self._slots.land(copy.layer, copy.expert, is_promoted=copy.chunk is not None)
            self._counts.add("prefetch_landed")
        if copy.chunk is not None:
            copy.chunk.num_waiting -= 1
        if self._on_copy is not None:
            self._on_copy(copy)
        self.wake()
