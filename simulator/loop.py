"""What the compiled loops over the layers of a forward share: how a policy is called in them, and how they fail."""

from __future__ import annotations

from typing import Any, Never

import numpy as np
from numba import types
from numpy.typing import NDArray

from policies.check import FINE, check_boundary, check_place, check_plan, find_violation, place_of
from policies.contract import Plan, Policy, PolicyError
from policies.jit import jit
from policies.pool import pool_of
from policies.residents import Residents
from policies.steps import Forward, blank_forward, end_of, step_at
from simulator.pointers import NOTHING, Pointer, answer_of, entry_of, is_compiled, pointer_to
from tracer.schema import ModelShape

# dtype and dimensions of the arrays that a policy answers with
_PLAN = ((types.int64, 1), (types.int64, 1), (types.bool_, 1), (types.int64, 2), (types.float64, 2))
_MOVES = ((types.int64, 1), (types.bool_, 2))
_PLACED = ((types.bool_, 1),)

Pointers = tuple[Pointer, ...]  # to decide, boundary and place; a loop may be given further ones


def pointers_of(policy: Policy, residents: Residents, shape: ModelShape) -> Pointers | None:
    """A policy's functions for compiled loops; None where they must be called from Python.

    That is where one is not compiled, or answers with other types than the contract's, which Python's check explains.
    """
    if not all(is_compiled(f) for f in (policy.decide, policy.boundary, policy.place) if f is not None):
        return None
    forward, view = blank_forward(shape, policy.reads_signals), residents.view(0)
    step, mine = step_at(forward, 0), (policy.params, residents.state)
    decide = pointer_to(policy.decide, *mine, step, view)
    boundary = pointer_to(policy.boundary, *mine, end_of(forward), view)
    place = pointer_to(policy.place, *mine, step)
    plan = answer_of(decide)
    fits = isinstance(plan, types.NamedTuple) and plan.instance_class is Plan and _are_arrays(tuple(plan)[:5], _PLAN)
    if boundary is not NOTHING:
        fits &= isinstance(answer_of(boundary), types.BaseTuple) and _are_arrays(tuple(answer_of(boundary)), _MOVES)
    if place is not NOTHING:
        fits &= _are_arrays((answer_of(place),), _PLACED)
    return (decide, boundary, place) if fits else None


def _are_arrays(found: tuple[Any, ...], wanted: tuple[tuple[Any, int], ...]) -> bool:
    return len(found) == len(wanted) and all(
        isinstance(kind, types.Array) and (kind.dtype, kind.ndim) == one
        for kind, one in zip(found, wanted, strict=True)
    )


@jit
def is_sound(plan, step, view):
    """A plan keeps to the contract."""
    pool_size = view.resident.size // view.capacity.size
    if plan.retained.size != pool_size or plan.prefetches.shape[1] != 2:
        return False
    if plan.prefetch_priority.shape[0] != plan.prefetches.shape[0] or plan.prefetch_priority.shape[1] != 2:
        return False
    return find_violation(plan, step, view)[0] == FINE


@jit
def is_placeable(placed, layer, view):
    """Placed experts fit into the layer's pool beside the residents of other layers."""
    if placed.size != view.resident.shape[1]:
        return False
    at = pool_of(view.capacity, layer)
    last = layer + 1 if view.capacity.size > 1 else view.resident.shape[0]
    others = view.resident[at:last].sum() - view.resident[layer].sum()
    return placed.sum() + others <= view.capacity[at]


@jit
def is_movable(capacity, evictions, view):
    """What `boundary` answers moves slots between pools and keeps what stays within them."""
    if capacity.size != view.capacity.size or evictions.shape != view.resident.shape:
        return False
    if capacity.sum() != view.capacity.sum() or capacity.min() < 0:
        return False
    taken = np.zeros(capacity.size, np.int64)
    for layer in range(evictions.shape[0]):
        resident, in_flight, evicted = view.resident[layer], view.in_flight[layer], evictions[layer]
        is_wrong, num_taken = False, 0
        for expert in range(evicted.size):  # a branch would be guessed wrongly often
            is_wrong |= evicted[expert] & (not resident[expert])
            num_taken += (resident[expert] & (not evicted[expert])) | in_flight[expert]
        if is_wrong:
            return False
        taken[pool_of(capacity, layer)] += num_taken
    return (taken <= capacity).all()


class PolicyLoop:
    """One run's compiled loop over the layers of a forward, in which the policy is called.

    The loop is called with (kinds and addresses of the policy's functions, params, state, forward, held, arguments...).
    It sets `held.asked_at` before each call of the policy, and answers with (plan, placed, moves), all of them None
    but for one that it refuses. It then stops without having changed anything since the policy was shown its view, so
    that Python's check finds and says the same.

    Args:
        loop: compiled by `jit`.
        pointers: to the policy's functions.
        arguments: of the types of those of every call.
        lacks: why a plan that prefetches is refused though it keeps to the contract, where the loop does so.
    """

    def __init__(
        self,
        loop: Any,
        pointers: Pointers,
        policy: Policy,
        residents: Residents,
        shape: ModelShape,
        *arguments: Any,
        lacks: str = "its decisions need an engine with a clock",
    ) -> None:
        self._policy, self._residents, self._held, self._lacks = policy, residents, residents.held, lacks
        blank = blank_forward(shape, policy.reads_signals)
        self._enter = entry_of(loop, pointers, policy.params, residents.state, blank, self._held, *arguments)

    def run(self, forward: Forward, *arguments: Any) -> None:
        """Run the layers of a forward.

        Raises:
            PlanError: the policy answered with what breaks the contract.
            PolicyError: it cannot decide on this trace.
        """
        try:
            plan, placed, moves = self._enter(
                self._policy.params, self._residents.state, forward, self._held, *arguments
            )
        except PolicyError as error:
            layer = int(self._held.asked_at[0])
            if layer < 0:  # as drivers in Python have it
                raise
            at = step_at(forward, layer) if layer < len(forward.load) else end_of(forward)
            raise PolicyError(f"{place_of(at)}: {error}") from error
        if plan is not None or placed is not None or moves is not None:
            self._refuse(forward, plan, placed, moves)

    def _refuse(
        self,
        forward: Forward,
        plan: Plan | None,
        placed: NDArray[np.bool_] | None,
        moves: tuple[NDArray[np.int64], NDArray[np.bool_]] | None,
    ) -> Never:
        layer = int(self._held.asked_at[0])
        if moves is not None:
            check_boundary(*moves, end_of(forward), self._residents.view(0))
        step, view = step_at(forward, layer), self._residents.view(layer)
        if placed is not None:
            check_place(placed, step, view)
        if plan is not None:
            check_plan(plan, step, view)
        raise PolicyError(f"{self._policy.name} prefetches, so {self._lacks}")
