"""How many expert slots are taken at any time, from the log, which says when residents leave and copies come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from experiments.timeline_slices import Execution, chunk_kernels
from policies.profile import Costs


class Prefetch(NamedTuple):
    """A copy that a prefetch brought about, whether it was promoted or not."""

    layer: int
    expert: int
    start_ns: int
    end_ns: int


@dataclass
class _Pool:
    """Slots of a layer, or of all layers where the pool is global."""

    num_resident: int = 0
    at_gate: int = 0  # residents when the gate of its running layer was read
    in_flight: int = 0  # prefetches
    promised: int = 0  # transfers of the running layer that will stay


class _Kind(IntEnum):
    """What changes a pool, in the order of one instant; `num_slots` of the event is how many it is about."""

    LANDED = 0  # a prefetch becomes resident
    READ = 1  # residents leave after the kernel over the hits
    RAN = 2  # copies leave after the kernel over their chunk
    GATE = 3  # residents of the layer, as the log has them
    PLAN = 4  # residents that stay, or have to be read before they leave
    PROMISED = 5  # transfers that will stay
    ENTERED = 6  # do so
    COPY = 7  # a demand copy takes a slot
    PREFETCH = 8  # a prefetch takes a free slot, or that of a resident which gives way


class _Event(NamedTuple):
    time_ns: int
    kind: _Kind
    pool: int
    num_slots: int = 1


class SlotCounter:
    """Follows a run forward by forward, and says how many slots of the GPU hold an expert or are reserved for one.

    Slots are taken by residents, by prefetches under way, and by demand copies until their kernel has run. The log
    does not say which resident gave way to a prefetch, but one did just where its pool had no free slot. Residents
    that leave between two forwards for another reason than a smaller capacity are counted until their layer's gate. Of
    a global pool the counts hold from the first plan on.

    Args:
        num_experts: of a layer.
        is_global: one pool for all layers.
        costs: that the run was charged.
    """

    def __init__(self, num_experts: int, is_global: bool, costs: Costs) -> None:
        self._num_experts, self._is_global, self._costs = num_experts, is_global, costs
        self._pools: dict[int, _Pool] = {}
        self._num_taken = 0
        self._later: list[_Event] = []  # after the forwards so far

    def read(self, rows: Sequence[Execution], end_ns: int, prefetches: Sequence[Prefetch]) -> Iterator[tuple[int, int]]:
        """How many slots are taken when the forward begins and whenever that changes: times, in order, and numbers.

        Args:
            rows: the layers of the next forward.
            end_ns: of that forward.
            prefetches: that started before `end_ns`, and not before that of the forward before.
        """
        events = self._later
        for one in prefetches:
            pool = self._pool(one.layer)
            events += [_Event(one.start_ns, _Kind.PREFETCH, pool), _Event(one.end_ns, _Kind.LANDED, pool)]
        self._begin(rows, events)
        for row in rows:
            events += self._events(row)
        events.sort(key=lambda event: event[:2])
        num_due = sum(event.time_ns <= end_ns for event in events)
        due, self._later = events[:num_due], events[num_due:]
        capacity = {self._pool(row.layer): row.capacity for row in rows}
        shown = -1
        if not due or due[0].time_ns > rows[0].start_ns:
            yield rows[0].start_ns, (shown := self._num_taken)
        for event, following in zip(due, [*due[1:], None], strict=True):
            self._apply(event, capacity[event.pool])
            if (following is None or following.time_ns > event.time_ns) and self._num_taken != shown:
                yield event.time_ns, (shown := self._num_taken)

    def _pool(self, layer: int) -> int:
        return 0 if self._is_global else layer

    def _gate_ns(self, row: Execution) -> int:
        return row.plan_ns - self._costs.policy_ns

    def _begin(self, rows: Sequence[Execution], events: Sequence[_Event]) -> None:
        """What the pools hold when the forward begins: what they held, or what their gates will find."""
        if self._is_global:
            if not self._pools:
                self._add_pool(0, sum(row.num_resident for row in rows))
            return
        for row in rows:
            if row.layer in self._pools:
                pool = self._pools[row.layer]
                self._set_resident(pool, min(pool.num_resident, row.capacity - pool.in_flight))
            else:
                landed = sum(
                    event.pool == row.layer and event.kind == _Kind.LANDED and event.time_ns <= self._gate_ns(row)
                    for event in events
                )
                self._add_pool(row.layer, row.num_resident - landed)

    def _add_pool(self, pool: int, num_resident: int) -> None:
        self._pools[pool] = _Pool()
        self._set_resident(self._pools[pool], num_resident)

    def _set_resident(self, pool: _Pool, num_resident: int) -> None:
        self._num_taken += num_resident - pool.num_resident
        pool.num_resident = num_resident

    def _events(self, row: Execution) -> Iterator[_Event]:
        """What a layer execution does to slots."""
        pool = self._pool(row.layer)
        first = row.layer * self._num_experts if self._is_global else 0
        retained = set(row.retained)
        stays = [first + expert in retained for expert in row.transfers]
        num_leaving = sum(first + expert not in retained for expert in row.hits)
        num_promised = sum(stays[row.num_promoted :])
        yield _Event(self._gate_ns(row), _Kind.GATE, pool, row.num_resident)
        yield _Event(row.plan_ns, _Kind.PLAN, pool, len(retained) - sum(stays) + num_leaving)
        yield _Event(row.plan_ns, _Kind.PROMISED, pool, num_promised)
        yield _Event(row.hits_end_ns, _Kind.READ, pool, num_leaving)
        for start_ns in row.transfer_start_ns[row.num_promoted :]:
            yield _Event(start_ns, _Kind.COPY, pool)
        size = self._costs.transfer_chunk
        for nth, kernel in enumerate(chunk_kernels(row, self._costs)):
            yield _Event(kernel.end_ns, _Kind.RAN, pool, stays[nth * size : (nth + 1) * size].count(False))
        yield _Event(row.end_ns, _Kind.ENTERED, pool, num_promised)

    def _apply(self, event: _Event, capacity: int) -> None:
        pool, num_slots = self._pools[event.pool], event.num_slots
        match event.kind:
            case _Kind.LANDED:  # in the slot that it had taken
                pool.in_flight -= 1
                pool.num_resident += 1
            case _Kind.READ:
                self._set_resident(pool, pool.num_resident - num_slots)
            case _Kind.RAN:
                self._num_taken -= num_slots
            case _Kind.GATE:
                if not self._is_global:
                    self._set_resident(pool, num_slots)
                pool.at_gate = pool.num_resident
            case _Kind.PLAN:
                self._set_resident(pool, pool.num_resident - pool.at_gate + num_slots)
            case _Kind.PROMISED:
                pool.promised += num_slots
            case _Kind.ENTERED:  # in the slots that their copies had taken
                pool.promised -= num_slots
                pool.num_resident += num_slots
            case _Kind.COPY:
                self._num_taken += 1
            case _Kind.PREFETCH:
                is_full = pool.num_resident + pool.in_flight + pool.promised >= capacity
                self._set_resident(pool, pool.num_resident - is_full)
                pool.in_flight += 1
                self._num_taken += 1
