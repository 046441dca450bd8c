"""The expert slots of the GPU: which are taken, by whom, and who gives way to a prefetch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies.contract import End, Step
from policies.pool import pool_of
from policies.residents import Residents
from simulator.counts import Counts


class Slots:
    """One fungible set of slots: the capacity of all pools, and staging.

    A slot is taken by a resident, by the prefetch in progress, or by a demand copy of the running layer. A resident
    that a plan does not retain is one no longer when its slot becomes free, not only when the layer ends. Within a
    pool experts are numbered as in `Plan.retained`.

    Args:
        residents: of the run, at its start.
        staging: slots beyond all capacity, for demand copies.
        counts: of the layer execution that is going on.
    """

    def __init__(self, residents: Residents, staging: int, counts: Counts) -> None:
        self.residents, self._counts = residents, counts
        self.num_slots = int(residents.capacity.sum()) + staging
        self._in_use = np.zeros_like(residents.resident)  # [L, E] a kernel of the running layer has yet to read them
        self._untried = np.zeros_like(residents.resident)  # [L, E] landed by prefetch and not activated since
        self._last_activated = np.full(residents.resident.shape, -1)  # [L, E] layer execution, counted over the run
        self._num_executions = 0
        self._num_held = 0  # by demand copies
        self._layer = 0  # the running one
        self._leaving = np.zeros(0, np.bool_)  # [E] or [L * E] of its pool, residents not retained but still in use
        self._entering: set[int] = set()  # numbers of its demand copies that are retained

    @property
    def num_taken(self) -> int:
        """Slots that hold an expert, or are about to."""
        return (
            int(np.count_nonzero(self.residents.resident) + np.count_nonzero(self.residents.in_flight)) + self._num_held
        )

    @property
    def has_room(self) -> bool:
        """Some slot is free, whichever pool it belongs to."""
        return self.num_taken < self.num_slots

    def free(self, layer: int) -> int:
        """Free slots of a layer's pool: capacity less residents, the prefetch in progress and what will be retained.

        It is negative while residents that leave are still read by the kernel over the hits.
        """
        capacity = self.residents.capacity
        shares_pool = pool_of(capacity, layer) == pool_of(capacity, self._layer)
        return self.residents.free_slots(layer) - (len(self._entering) if shares_pool else 0)

    def begin(self, layer: int) -> None:
        """A layer begins."""
        self._layer = layer

    def place(self, step: Step) -> None:
        """Let the policy place the layer's residents, if it may."""
        self.residents.place(step)
        self._count_unused()

    def activate(self, activated: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The gate of the running layer is read; returns the hits, [E], which are in use from now on."""
        hits = activated & self.residents.resident[self._layer]
        self._in_use[self._layer] = hits
        self._untried[self._layer, activated] = False
        self._last_activated[self._layer, activated] = self._num_executions
        self._num_executions += 1
        return hits

    def used(self, experts: Iterable[int]) -> None:
        """A kernel over these residents of the running layer has run; those that are not retained leave."""
        in_use = self.residents.of_pool(self._layer, self._in_use)
        self._in_use[self._layer, list(experts)] = False
        self._leave(self._layer, np.flatnonzero(self._leaving & ~in_use))
        self._leaving &= in_use

    def retain(self, at_gate: NDArray[np.bool_], retained: NDArray[np.bool_], demanded: Iterable[int]) -> None:
        """The running layer's plan acts: residents that are not retained leave, those in use when they were used.

        Args:
            at_gate: [E] or [L * E] residents of the pool when the gate was read.
            retained: [E] or [L * E] of the plan.
            demanded: experts of its transfers, but for a promoted one; they have yet to take a slot each.
        """
        in_use = self.residents.of_pool(self._layer, self._in_use)
        leaving = at_gate & ~retained
        self._leaving = leaving & in_use
        self._leave(self._layer, np.flatnonzero(leaving & ~in_use))
        numbers = [self.residents.number(self._layer, expert) for expert in demanded]
        self._entering = {number for number in numbers if retained[number]}

    def hold(self) -> None:
        """A demand copy takes a slot."""
        self._num_held += 1

    def release(self, experts: Iterable[int]) -> None:
        """The kernel over these demand copies has run; those that are not retained give up their slots."""
        numbers = [self.residents.number(self._layer, expert) for expert in experts]
        self._num_held -= sum(number not in self._entering for number in numbers)

    def enter(self) -> None:
        """The running layer ends: the transfers that it retains become residents."""
        self.residents.of_pool(self._layer, self.residents.resident)[list(self._entering)] = True
        self._num_held -= len(self._entering)
        self._entering = set()

    def boundary(self, end: End) -> None:
        """Let the policy move slots between layers, if it does so."""
        self.residents.boundary(end)
        self._count_unused()

    # Prefetches

    def holds(self, layer: int, expert: int) -> bool:
        """An expert is resident, or will be when the running layer ends."""
        is_entering = layer == self._layer and self.residents.number(layer, expert) in self._entering
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

    def reserve(self, layer: int, expert: int) -> None:
        """The prefetch of an expert starts."""
        self.residents.in_flight[layer, expert] = True

    def land(self, layer: int, expert: int, is_promoted: bool) -> None:
        """A prefetched expert becomes resident; one that was promoted is in use until its kernel has run."""
        self.residents.in_flight[layer, expert] = False
        self.residents.resident[layer, expert] = True
        self._untried[layer, expert] = not is_promoted
        self._in_use[layer, expert] = is_promoted

    def _leave(self, layer: int, numbers: NDArray[np.int64]) -> None:
        if len(numbers):
            self.residents.of_pool(layer, self.residents.resident)[numbers] = False
            self._count_unused()

    def _count_unused(self) -> None:
        gone = self._untried & ~self.residents.resident
        self._counts.add("prefetch_unused", int(np.count_nonzero(gone)))
        self._untried &= self.residents.resident
