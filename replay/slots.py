"""The expert slots of the GPU: who lies in which, who is resident by the timing rules, and when a slot is free again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.contract import End
from policies.pool import pool_of
from policies.residents import Residents
from replay.device import Event


@dataclass(slots=True)
class Freed:
    """A slot that may be written once an event has come; at once where there is none."""

    slot: int
    event: Event | None
    serial: int  # of the event among all that free slots


class Slots:
    """One fungible set of slots: the capacity of all pools, and staging.

    Slots are freed in the order in which kernels that read them run, and taken in that order, so that it is known when
    a plan is made which slot each of its copies will go to, and after which kernel. Residency follows the rules of
    the simulator: a resident that is not retained is one no longer when its slot becomes free.

    Args:
        residents: of the run, at its start.
        staging: slots beyond all capacity, for demand copies.
    """

    def __init__(self, residents: Residents, staging: int) -> None:
        self.residents = residents
        shape = residents.resident.shape
        self.num_slots = int(residents.capacity.sum()) + staging
        self.slot_of = np.full(shape, -1, np.int32)  # [L, E] of whoever is on the GPU, or on the way to it
        self.num_unused = 0  # prefetched experts that left without being activated, since this was last read
        self._freed = deque(Freed(slot, None, -1) for slot in range(self.num_slots))
        self._in_use = np.zeros(shape, np.bool_)  # [L, E] a kernel of the running layer has yet to read them
        self._untried = np.zeros(shape, np.bool_)  # [L, E] landed by prefetch and not activated since
        self._last_activated = np.full(shape, -1)  # [L, E] layer execution, counted over the run
        self._num_executions = 0
        self._layer = 0
        self._leaving = np.zeros(0, np.bool_)
        self._entering: set[int] = set()
        for layer, expert in np.argwhere(residents.resident).tolist():
            self.take(layer, expert)

    # Slots

    def take(self, layer: int, expert: int) -> Freed:
        """Give an expert the slot that is free first."""
        freed = self._freed.popleft()
        self.slot_of[layer, expert] = freed.slot
        return freed

    def is_free_now(self) -> bool:
        """A slot can be written at once."""
        return bool(self._freed) and (self._freed[0].event is None or self._freed[0].event.query())

    def give(self, slots: Iterable[int], event: Event, serial: int) -> None:
        """Slots are free once an event has come, the one of this number among all that free slots."""
        self._freed.extend([Freed(slot, event, serial) for slot in slots])

    # The running layer

    def begin(self, layer: int) -> None:
        """A layer begins."""
        self._layer = layer

    def activate(self, activated: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The gate of the running layer is read; returns the hits, ascending, which are in use from now on."""
        hits = activated & self.residents.resident[self._layer]
        self._in_use[self._layer] = hits
        self._untried[self._layer, activated] = False
        self._last_activated[self._layer, activated] = self._num_executions
        self._num_executions += 1
        return np.flatnonzero(hits)

    def retain(
        self, at_gate: NDArray[np.bool_], retained: NDArray[np.bool_], demanded: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The plan acts: residents that are not retained leave, those in use when they were used.

        Args:
            at_gate: [E] or [L * E] residents of the pool when the gate was read.
            retained: [E] or [L * E] of the plan.
            demanded: experts of its transfers, but for a promoted one.

        Returns:
            Hits of the running layer whose slots are free when their kernel has run.
        """
        in_use = self.residents.of_pool(self._layer, self._in_use)
        leaving = at_gate & ~retained
        self._leaving = leaving & in_use
        numbers = self.residents.number(self._layer, demanded)
        self._entering = set(numbers[retained[numbers]].tolist())
        self._leave(self._layer, np.flatnonzero(leaving & ~in_use))
        return np.flatnonzero(self._leaving) - int(self.residents.number(self._layer, 0))

    def used(self, experts: Sequence[int] | NDArray[np.int64]) -> None:
        """A kernel over these residents of the running layer has run; those that are not retained leave."""
        in_use = self.residents.of_pool(self._layer, self._in_use)
        self._in_use[self._layer, experts] = False
        gone = np.flatnonzero(self._leaving & ~in_use)
        self.residents.of_pool(self._layer, self.residents.resident)[gone] = False
        self._leaving &= in_use
        if len(gone):
            self._count_unused()

    def enter(self) -> None:
        """The running layer ends: the transfers that it retains become residents."""
        self.residents.of_pool(self._layer, self.residents.resident)[list(self._entering)] = True
        self._entering = set()

    def boundary(self, end: End) -> None:
        """Let the policy move slots between layers, if it does so; whom it evicts is free at once."""
        before = self.residents.resident.copy()
        self.residents.boundary(end)
        gone = before & ~self.residents.resident
        self._freed.extendleft([Freed(slot, None, -1) for slot in self.slot_of[gone].tolist()])
        self._count_unused()

    # Prefetches

    def free(self, layer: int) -> int:
        """Free slots of a layer's pool: capacity less residents, the prefetch in progress and what will be retained."""
        capacity = self.residents.capacity
        shares_pool = pool_of(capacity, layer) == pool_of(capacity, self._layer)
        return self.residents.free_slots(layer) - (len(self._entering) if shares_pool else 0)

    def holds(self, layer: int, expert: int) -> bool:
        """An expert is resident, or will be when the running layer ends."""
        is_entering = layer == self._layer and int(self.residents.number(layer, expert)) in self._entering
        return is_entering or bool(self.residents.resident[layer, expert])

    def give_way(self, layer: int, expert: int, score: NDArray[np.float64]) -> bool:
        """Evict the resident of lowest score from an expert's pool, if it scores strictly below that expert.

        Ties: the one activated least recently, then the highest number. Experts in use are safe.
        """
        of_pool = self.residents.of_pool
        candidates = np.flatnonzero(of_pool(layer, self.residents.resident & ~self._in_use))
        scores = of_pool(layer, score)[candidates]
        if not scores.size or not scores.min() < score[layer, expert]:
            return False
        lowest = candidates[scores == scores.min()]
        activated = of_pool(layer, self._last_activated)[lowest]
        self._leave(layer, lowest[activated == activated.min()][-1:])
        return True

    def reserve(self, layer: int, expert: int) -> int:
        """The prefetch of an expert starts; returns its slot."""
        self.residents.in_flight[layer, expert] = True
        return self.take(layer, expert).slot

    def land(self, layer: int, expert: int, is_promoted: bool) -> None:
        """A prefetched expert becomes resident; one that was promoted is in use until its kernel has run."""
        self.residents.in_flight[layer, expert] = False
        self.residents.resident[layer, expert] = True
        self._untried[layer, expert] = not is_promoted
        self._in_use[layer, expert] = is_promoted

    def _leave(self, layer: int, numbers: NDArray[np.int64]) -> None:
        """Residents of a layer's pool leave, and their slots are free at once."""
        if not len(numbers):
            return
        resident, slot_of = (self.residents.of_pool(layer, array) for array in (self.residents.resident, self.slot_of))
        resident[numbers] = False
        # taken before those that wait for a kernel
        self._freed.extendleft([Freed(slot, None, -1) for slot in slot_of[numbers].tolist()])
        self._count_unused()

    def _count_unused(self) -> None:
        gone = self._untried & ~self.residents.resident
        self.num_unused += int(np.count_nonzero(gone))
        self._untried &= self.residents.resident
