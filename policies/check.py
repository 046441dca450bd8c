"""Refuse a policy's answer that breaks the contract, where it is made, with request, forward, layer and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.contract import End, Plan, PlanError, Policy, PolicyError, Step, View
from policies.jit import jit
from policies.pool import part_of_pool, pool_of
from tracer.schema import ModelShape

# What is wrong with a plan, as `find_violation` answers; an expert, or its number in the pool, goes with each
FINE = 0
TRANSFER_RANGE = 1
CPU_RANGE = 2
SERVED_TWICE = 3
NOT_MISSED = 4
NOT_SERVED = 5
IN_FLIGHT_ON_CPU = 6
NOT_HELD = 7
TOO_MANY = 8
PROMOTED_LEAVES = 9
PREFETCH_RANGE = 10
PREFETCH_HELD = 11
PREFETCH_TWICE = 12
PRIORITY_NAN = 13
DELAY_NEGATIVE = 14

LACKS_SCORE = "its state needs a score, [L, E], to rank residents by"


@jit
def find_violation(plan, step, view):
    """The first rule that a plan breaks, and at which expert; (FINE, -1) if none. For plans of the right types."""
    num_experts = view.resident.shape[1]
    layer = step.layer
    load, resident, in_flight = step.load, view.resident[layer], view.in_flight[layer]
    served = np.zeros(num_experts, np.int8)
    for turn in range(2):
        for expert in plan.transfers if turn == 0 else plan.on_cpu:
            if not 0 <= expert < num_experts:
                return (TRANSFER_RANGE if turn == 0 else CPU_RANGE), expert
            if served[expert] > 0:
                return SERVED_TWICE, expert
            if load[expert] == 0 or resident[expert]:
                return NOT_MISSED, expert
            served[expert] = turn + 1
    broken = FINE  # in these loops branches would be guessed wrongly often: who breaks a rule is looked for afterwards
    for expert in range(num_experts):
        broken |= _serving(load[expert], resident[expert], in_flight[expert], served[expert])
    if broken != FINE:
        for expert in range(num_experts):
            broken = _serving(load[expert], resident[expert], in_flight[expert], served[expert])
            if broken != FINE:
                return broken, expert

    pool = pool_of(view.capacity, layer)
    num_layers = plan.retained.size // num_experts
    taken = 0
    for at in range(pool, pool + num_layers):
        retained = plan.retained[(at - pool) * num_experts : (at - pool + 1) * num_experts]
        resident, in_flight, here = view.resident[at], view.in_flight[at], at == layer
        broken = FINE
        for expert in range(num_experts):
            broken |= _staying(retained[expert], resident[expert], in_flight[expert], here & (served[expert] == 1))
            taken += retained[expert] | in_flight[expert]
        if broken != FINE:
            for expert in range(num_experts):
                broken = _staying(retained[expert], resident[expert], in_flight[expert], here & (served[expert] == 1))
                if broken != FINE:
                    return broken, expert if broken == PROMOTED_LEAVES else (at - pool) * num_experts + expert
    if taken > view.capacity[pool]:
        return TOO_MANY, taken
    return _prefetching(plan, view)


@jit
def _serving(load, resident, in_flight, served):
    """Whether an expert of the layer is served as it must be; served is 1 by a transfer, 2 on the CPU."""
    return NOT_SERVED * ((load > 0) & (not resident) & (served == 0)) | IN_FLIGHT_ON_CPU * ((served == 2) & in_flight)


@jit
def _staying(retained, resident, in_flight, arrives):
    """Whether an expert of the pool may stay, and may leave."""
    not_held = retained & (not resident) & (not in_flight) & (not arrives)
    return NOT_HELD * not_held | PROMOTED_LEAVES * ((not retained) & in_flight & arrives)


@jit
def _prefetching(plan, view):
    """The first rule that the plan's prefetches break, and in which row."""
    if plan.prefetch_delay_ns < 0:
        return DELAY_NEGATIVE, -1
    if plan.prefetches.shape[0] == 0:
        return FINE, -1
    num_layers, num_experts = view.resident.shape
    # thousands, at every gate: a loop that takes its arrays out of tuples, or returns, counts references to them
    prefetches, priority, resident, in_flight = plan.prefetches, plan.prefetch_priority, view.resident, view.in_flight
    named = np.zeros((num_layers, num_experts), np.bool_)
    broken, which = FINE, -1
    for row in range(prefetches.shape[0]):
        at, expert = prefetches[row, 0], prefetches[row, 1]
        if not (0 <= at < num_layers and 0 <= expert < num_experts):
            broken = PREFETCH_RANGE
        elif resident[at, expert] or in_flight[at, expert]:
            broken = PREFETCH_HELD
        elif named[at, expert]:
            broken = PREFETCH_TWICE
        elif np.isnan(priority[row, 0]) or np.isnan(priority[row, 1]):
            broken = PRIORITY_NAN
        if broken != FINE:
            which = row
            break
        named[at, expert] = True
    return broken, which


def place_of(at: Step | End) -> str:
    """Where a policy is asked, as messages begin with it: request, forward, and layer where there is one."""
    layer = f"layer {at.layer}" if isinstance(at, Step) else "after the last layer"
    return f"request {int(at.request.min())}, forward {at.forward}, {layer}"


def check_plan(plan: Plan, step: Step, view: View) -> None:
    """Refuse a plan that breaks the contract.

    Every miss is served exactly once, by a transfer or on the CPU, and nothing else is; one whose prefetch is in
    flight is among the transfers and retained. What is retained is resident, in flight or transferred, and leaves
    room in its pool for all copies in flight. Prefetches name experts that are neither resident nor in flight, once.

    Raises:
        PlanError: with request, forward, layer and experts.
    """
    where = place_of(step)
    _check_types(plan, where, view)
    code, which = find_violation(plan, step, view)
    if code != FINE:
        raise PlanError(f"{where}: {_explain(code, which, plan, step, view)}")


def check_ranked(policy: Policy, plan: Plan, has_score: bool) -> None:
    """Refuse prefetches of a policy whose state has no score: the residents that make room for them are ranked by it."""
    if len(plan.prefetches) and not has_score:
        raise PolicyError(f"{policy.name} prefetches, so {LACKS_SCORE}")


def _check_types(plan: Plan, where: str, view: View) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"{where}: the plan is {type(plan).__name__}, must be Plan")
    _check_array(where, "transfers", plan.transfers, np.int64, (None,))
    _check_array(where, "on_cpu", plan.on_cpu, np.int64, (None,))
    _check_array(where, "retained", plan.retained, np.bool_, (view.resident.size // view.capacity.size,))
    _check_array(where, "prefetches", plan.prefetches, np.int64, (None, 2))
    _check_array(where, "prefetch_priority", plan.prefetch_priority, np.float64, (len(plan.prefetches), 2))


def _check_array(where: str, name: str, array: Any, dtype: Any, shape: Sequence[int | None]) -> None:
    if not isinstance(array, np.ndarray):
        raise PlanError(f"{where}: {name} is {type(array).__name__}, must be an array")
    fits = array.ndim == len(shape) and all(
        size in (None, found) for size, found in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise PlanError(
            f"{where}: {name} is {array.dtype} of shape {array.shape}, must be {np.dtype(dtype)} of ({wanted})"
        )


def _explain(code: int, which: int, plan: Plan, step: Step, view: View) -> str:
    num_layers, num_experts = view.resident.shape
    pool = pool_of(view.capacity, step.layer)
    transfers, on_cpu = plan.transfers.tolist(), plan.on_cpu.tolist()
    missed = np.flatnonzero((step.load > 0) & ~view.resident[step.layer]).tolist()
    served = f"missed {missed}, transfers {transfers}, on CPU {on_cpu}"
    if code in (TRANSFER_RANGE, CPU_RANGE):
        return f"{'transfers' if code == TRANSFER_RANGE else 'on_cpu'} names expert {which}, allowed are 0 to {num_experts - 1}"
    if code == SERVED_TWICE:
        return f"expert {which} is served twice: {served}"
    if code == NOT_MISSED:
        return f"expert {which} is served but was not missed: {served}"
    if code == NOT_SERVED:
        return f"expert {which} was missed and is not served: {served}"
    if code == IN_FLIGHT_ON_CPU:
        return f"expert {which} is in flight and must be among the transfers: {served}"
    if code == NOT_HELD:
        at, expert = pool + which // num_experts, which % num_experts
        return f"expert {expert} of layer {at} is retained but neither resident nor transferred: transfers {transfers}"
    if code == PROMOTED_LEAVES:
        return f"expert {which} is in flight and transferred, and must be retained"
    if code == TOO_MANY:
        capacity, retained = view.capacity[pool], np.flatnonzero(plan.retained).tolist()
        return f"retained and copies in flight need {which} slots, the capacity is {capacity}: retained {retained}"
    if code == DELAY_NEGATIVE:
        return f"prefetch_delay_ns is {plan.prefetch_delay_ns}, must be at least 0"
    at, expert = plan.prefetches[which].tolist()
    if code == PREFETCH_RANGE:
        return f"prefetch of expert {expert} of layer {at}, allowed are layers 0 to {num_layers - 1}, experts 0 to {num_experts - 1}"
    if code == PREFETCH_HELD:
        return f"prefetch of expert {expert} of layer {at}, which is resident or in flight"
    if code == PREFETCH_TWICE:
        return f"prefetch of expert {expert} of layer {at} is listed twice"
    return f"prefetch of expert {expert} of layer {at} has priority {plan.prefetch_priority[which].tolist()}, must be numbers"


def check_boundary(capacity: NDArray[np.int64], evictions: NDArray[np.bool_], end: End, view: View) -> None:
    """Refuse what `boundary` answered, unless it moves slots between pools and keeps what stays within them.

    Raises:
        PlanError: with request, forward, and layer where there is one.
    """
    where = place_of(end)
    _check_array(where, "capacity", capacity, np.int64, view.capacity.shape)
    _check_array(where, "evictions", evictions, np.bool_, view.resident.shape)
    if capacity.sum() != view.capacity.sum() or capacity.min() < 0:
        raise PlanError(
            f"{where}: capacity {capacity.tolist()}, must be at least 0 each and {view.capacity.sum()} in all"
        )
    wrong = np.argwhere(evictions & ~view.resident)
    if wrong.size:
        raise PlanError(f"{where}: evicts expert {wrong[0, 1]} of layer {wrong[0, 0]}, which is not resident")
    taken = _taken(view.resident & ~evictions | view.in_flight, capacity)
    if (taken > capacity).any():
        layer = int((taken > capacity).argmax())
        raise PlanError(
            f"{where}: residents and copies in flight of layer {layer} need {taken[layer]} slots, its capacity is {capacity[layer]}"
        )


def check_place(placed: NDArray[np.bool_], step: Step, view: View) -> None:
    """Refuse what `place` answered, unless it fits into the layer's pool beside the residents of other layers.

    Raises:
        PlanError: with request, forward and layer.
    """
    where = place_of(step)
    _check_array(where, "placed", placed, np.bool_, step.load.shape)
    others = part_of_pool(view.capacity, step.layer, view.resident).sum() - view.resident[step.layer].sum()
    capacity = view.capacity[pool_of(view.capacity, step.layer)]
    if placed.sum() + others > capacity:
        beside = f" beside {others} of other layers" if others else ""
        raise PlanError(f"{where}: places {placed.sum()} experts{beside}, the capacity is {capacity}")


def check_start(
    resident: NDArray[np.bool_], capacity: NDArray[np.int64], policy: Policy, shape: ModelShape, slots: int
) -> None:
    """Refuse what `init` answered, unless the capacities are those asked for and hold the residents.

    Raises:
        PolicyError: with the policy's name, and the layer where there is one.
    """
    pools = {"layer": shape.num_layers, "global": 1}
    if policy.pool not in pools:
        raise PolicyError(f"{policy.name}: pool {policy.pool!r}: allowed are {', '.join(pools)}")
    try:
        _check_array(policy.name, "residents", resident, np.bool_, (shape.num_layers, shape.num_experts))
        _check_array(policy.name, "capacity", capacity, np.int64, (pools[policy.pool],))
    except PlanError as error:
        raise PolicyError(f"{error}, at the start") from error
    if capacity.min() < 0 or (policy.sized and capacity.sum() != slots):
        raise PolicyError(
            f"{policy.name}: starts with capacity {capacity.tolist()}, must be at least 0 each and {slots} in all"
        )
    taken = _taken(resident, capacity)
    if (taken > capacity).any():
        layer = int((taken > capacity).argmax())
        raise PolicyError(
            f"{policy.name}: starts with {taken[layer]} residents in layer {layer}, its capacity is {capacity[layer]}"
        )


def _taken(slots: NDArray[np.bool_], capacity: NDArray[np.int64]) -> NDArray[np.int64]:
    return slots.reshape(capacity.size, -1).sum(axis=1)
