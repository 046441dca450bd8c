"""Which experts are on the GPU, and the only places where that changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.check import check_boundary, check_place, check_plan, check_start, place_of
from policies.contract import End, Estimates, Plan, Policy, PolicyError, Step, View
from policies.jit import jit
from policies.pool import number_in_pool, part_of_pool, pool_of
from tracer.schema import ModelShape


class Held(NamedTuple):
    """The arrays of Residents, for compiled loops, which change the first three in place."""

    resident: NDArray[np.bool_]  # [L, E]
    in_flight: NDArray[np.bool_]  # [L, E]
    capacity: NDArray[np.int64]  # [L] or [1]
    shown_resident: NDArray[np.bool_]  # the same memory, read-only, as views have it
    shown_in_flight: NDArray[np.bool_]
    shown_capacity: NDArray[np.int64]
    estimates: Estimates
    asked_at: NDArray[np.int64]  # [1] where the policy is asked: layer of a gate, L after the last layer, -1 to place


@jit
def free_slots_of(held, layer):
    """Slots of a layer's pool that hold neither a resident nor a copy in flight."""
    num_pools = held.capacity.size
    first, last = (layer, layer + 1) if num_pools > 1 else (0, held.resident.shape[0])
    taken = 0
    for at in range(first, last):
        resident, in_flight = held.resident[at], held.in_flight[at]
        for expert in range(resident.size):
            taken += resident[expert]
        for expert in range(in_flight.size):
            taken += in_flight[expert]
    return held.capacity[pool_of(held.capacity, layer)] - taken


@jit
def view_at(held, layer):
    """What the policy is shown at the gate of a layer."""
    free_slots = free_slots_of(held, layer)
    return View(held.shown_resident, held.shown_in_flight, held.shown_capacity, free_slots, held.estimates)


class Residents:
    """The residents of one run of a policy, with the policy's state.

    A driver asks it for what the policy may see, and tells it what happened. It knows no clock: a driver whose
    prefetches land between gates sets `resident` and `in_flight` itself, at the moments of its clock.

    Args:
        policy: built for this shape.
        slots: of all layers together.
        estimates: what the policy believes an expert costs.

    Raises:
        PolicyError: the policy does not start with these slots.
    """

    state: Any
    resident: NDArray[np.bool_]  # [L, E] landed
    in_flight: NDArray[np.bool_]  # [L, E] prefetches that were started and have not landed; each has its slot
    capacity: NDArray[np.int64]  # [L], or [1] where the pool is global

    def __init__(self, policy: Policy, shape: ModelShape, slots: int, estimates: Estimates) -> None:
        self._policy, self._estimates = policy, estimates
        self.state, resident, capacity = policy.init(policy.params, shape, slots)
        check_start(resident, capacity, policy, shape, slots)
        self.resident, self.capacity = resident.copy(), capacity.copy()
        self.in_flight = np.zeros_like(self.resident)
        self._shown = _read_only(self.resident), _read_only(self.in_flight), _read_only(self.capacity)

    @property
    def held(self) -> Held:
        """The arrays, as compiled loops take them."""
        return Held(self.resident, self.in_flight, self.capacity, *self._shown, self._estimates, np.zeros(1, np.int64))

    def of_pool(self, layer: int, experts: NDArray[Any]) -> NDArray[Any]:
        """The part of an [L, E] array that is the pool of a layer: [E], or [L * E] where the pool is global."""
        return part_of_pool(self.capacity, layer, experts)

    def capacity_of(self, layer: int) -> int:
        """Slots of the pool that a layer uses."""
        return int(self.capacity[pool_of(self.capacity, layer)])

    def number(self, layer: int, expert: Any) -> Any:
        """Number of an expert, or of each of an array of them, within the pool of its layer."""
        return number_in_pool(self.capacity, self.resident.shape[1], layer, expert)

    def free_slots(self, layer: int) -> int:
        """Slots of a layer's pool that hold neither a resident nor a copy in flight."""
        taken = self.of_pool(layer, self.resident).sum() + self.of_pool(layer, self.in_flight).sum()
        return self.capacity_of(layer) - int(taken)

    def view(self, layer: int) -> View:
        """What the policy is shown now. Its arrays cannot be written to, and change when the residents do."""
        resident, in_flight, capacity = self._shown
        return View(resident, in_flight, capacity, self.free_slots(layer), self._estimates)

    def place(self, step: Step) -> None:
        """Before the gate: let a policy that may do so place the layer's experts at no cost."""
        if self._policy.place is not None:
            placed = self._policy.place(self._policy.params, self.state, step)
            check_place(placed, step, self.view(step.layer))
            self.resident[step.layer] = placed

    def decide(self, step: Step) -> Plan:
        """At the gate: ask the policy, and check what it answers. Errors say where.

        Raises:
            PlanError: the plan breaks the contract.
            PolicyError: the policy cannot decide on this trace.
        """
        view = self.view(step.layer)
        try:
            plan = self._policy.decide(self._policy.params, self.state, step, view)
        except PolicyError as error:
            raise PolicyError(f"{place_of(step)}: {error}") from error
        check_plan(plan, step, view)
        return plan

    def settle(self, layer: int, at_gate: NDArray[np.bool_], plan: Plan) -> None:
        """At the layer's end: of the pool's residents at the gate, those not retained leave; retained transfers enter.

        What else happened meanwhile stays as it is: a resident that made room for a prefetch does not return, and
        one that landed does not leave.

        Args:
            layer: that has ended.
            at_gate: copy of `of_pool(layer, resident)` at its gate.
            plan: that it ran.
        """
        resident = self.of_pool(layer, self.resident)
        resident[at_gate & ~plan.retained] = False
        numbers = self.number(layer, plan.transfers)
        resident[numbers[plan.retained[numbers]]] = True

    def boundary(self, end: End) -> None:
        """After the last layer of a forward: let the policy move slots between layers and evict what no longer fits.

        Errors say where.

        Raises:
            PlanError: the answer does not add up.
            PolicyError: the policy cannot decide on this trace.
        """
        if self._policy.boundary is not None:
            view = self.view(0)
            try:
                capacity, evictions = self._policy.boundary(self._policy.params, self.state, end, view)
            except PolicyError as error:
                raise PolicyError(f"{place_of(end)}: {error}") from error
            check_boundary(capacity, evictions, end, view)
            self.resident[evictions] = False
            self.capacity[:] = capacity


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
