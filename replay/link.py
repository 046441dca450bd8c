"""The link from host to GPU: a plan's copies issued in order ahead of time, prefetches one by one when it is idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from replay.device import Device, Event
from replay.slots import Freed, Slots

Counts = dict[str, Any]


@dataclass(slots=True)
class Copy:
    """One expert that was put on its way to the GPU."""

    layer: int
    expert: int
    begin: Event | Copy  # an event of its own, or the copy before, behind which it starts at once
    end: Event
    is_promoted: bool = False  # a prefetch whose expert a layer misses while it is on its way


class Link:
    """Copies what is demanded, in order, and when nothing is, prefetches by priority and then issue number.

    Copies of a plan are put on the stream of copies at once, each behind the event that frees its slot. A prefetch is
    chosen when the link is idle, which the calling thread finds out by `pick`.

    Args:
        sources: what a copy of each expert reads, [L][E].
        target: what a copy writes in each slot on the device.
        score: [L, E] of the policy's state, read when a prefetch needs a victim; None where the policy has none.
        note: told of each copy that was put on the stream.
    """

    def __init__(
        self,
        device: Device,
        sources: list[list[Tensor]],
        slots: Slots,
        target: list[Tensor],
        score: NDArray[np.float64] | None,
        note: Callable[[Copy], None],
    ) -> None:
        self.current: Copy | None = None  # the prefetch that was started and has not landed
        self.is_held = False  # no copy starts between the reading at a gate and its plan
        self.counts: Counts = {}  # of the layer execution that is going on
        self._device, self._sources, self._slots, self._target = device, sources, slots, target
        self._score, self._note = score, note
        self._last: Copy | None = None  # that was put on the stream
        self._is_gapless = False  # nothing has come between it and the next one
        self._queue = np.empty((0, 2), np.int64)  # layer, expert of what is queued; the next one last
        self._keys = np.empty((3, 0))  # of each: issue number, then priority, the first part last
        self._num_issued = 0

    # Demand copies

    def begin_batch(self) -> None:
        """The copies that follow are put on an idle link, or behind a prefetch in progress."""
        self._is_gapless = False

    def demand(self, layer: int, expert: int, freed: Freed) -> Copy:
        """Put a copy on the stream, into a slot that was taken for it, behind the event that frees it."""
        if freed.event is not None:
            self._device.copies.wait_event(freed.event)
            self._is_gapless = False
        return self._put(layer, expert, freed.slot)

    def _put(self, layer: int, expert: int, slot: int) -> Copy:
        device = self._device
        if self._is_gapless and self._last is not None:
            begin = self._last
        else:
            begin = device.event()
            begin.record(device.copies)
        device.copy(self._target[slot], self._sources[layer][expert])
        copy = Copy(layer, expert, begin, device.event())
        copy.end.record(device.copies)
        self._last, self._is_gapless = copy, True
        self._note(copy)
        return copy

    # Prefetches

    def issue(self, prefetches: NDArray[np.int64], priority: NDArray[np.float64]) -> None:
        """Queue prefetches of (layer, expert), [N, 2], with a pair of priorities each, [N, 2]."""
        numbers = np.arange(self._num_issued, self._num_issued + len(prefetches))
        self._num_issued += len(prefetches)
        keys = np.concatenate([self._keys, [numbers, priority[:, 1], priority[:, 0]]], axis=1)
        order = np.lexsort(keys)[::-1]
        self._keys, self._queue = keys[:, order], np.concatenate([self._queue, prefetches])[order]
        self.counts["prefetch_issued"] += len(prefetches)

    def clear(self) -> None:
        """Drop what is queued, because the policy says so."""
        self.counts["prefetch_dropped_flag"] += len(self._queue)
        self._keep(np.zeros(len(self._queue), np.bool_))

    def drop(self, layer: int) -> set[int]:
        """Drop what is queued for a layer that begins; returns the experts."""
        if not len(self._queue):
            return set()
        goes = self._queue[:, 0] == layer
        dropped = self._queue[goes, 1].tolist()
        self.counts["prefetch_dropped_begin"] += len(dropped)
        self._keep(~goes)
        return set(dropped)

    def _keep(self, kept: NDArray[np.bool_] | slice) -> None:
        self._keys, self._queue = self._keys[:, kept], self._queue[kept]

    def notice(self) -> None:
        """Note that the prefetch in progress has landed, if it has."""
        current = self.current
        if current is not None and current.end.query():
            self.current = None
            self._slots.land(current.layer, current.expert, current.is_promoted)
            self.counts["prefetch_landed"] += 1

    def pick(self) -> None:
        """Start the next prefetch, if there is one and the link is idle."""
        is_idle = self.current is None and (self._last is None or self._last.end.query())
        if len(self._queue) and is_idle and not self.is_held:
            self._pick_prefetch()

    def _pick_prefetch(self) -> None:
        slots = self._slots
        while len(self._queue):
            layer, expert = self._queue[-1].tolist()
            is_needed = not slots.holds(layer, expert)
            has_slot = is_needed and slots.free(layer) > 0
            if has_slot and not slots.is_free_now():
                return  # a demand copy has borrowed the free slot until its kernel has run
            self._keep(slice(-1))
            if has_slot or (is_needed and self._score is not None and slots.give_way(layer, expert, self._score)):
                self._is_gapless = False
                self.current = self._put(layer, expert, slots.reserve(layer, expert))
                self.counts["prefetch_started"] += 1
                return
            self.counts["prefetch_dropped_victim"] += 1
