"""What the compiled loops over the layers of a forward share: how a policy is called in them, and how they fail."""

from __future__ import annotations

from typing import Any, NamedTuple, Never

import numpy as np
from numba import typeof, types
from numpy.typing import NDArray

from policies.check import FINE, check_boundary, check_place, check_plan, find_violation, place_of
from policies.contract import Plan, Policy, PolicyError
from policies.jit import jit, jit_inner
from policies.pool import pool_of
from policies.residents import Residents
from policies.steps import Forward, blank_forward, end_of, step_at
from simulator.pointers import (
    Bound,
    Pointer,
    answer_of,
    bind,
    entry_of,
    function_at,
    is_compiled,
    is_keepable,
    kept_at,
    kind_of,
)
from tracer.schema import ModelShape

# dtype and dimensions of the arrays that a policy answers with
_PLAN = ((types.int64, 1), (types.int64, 1), (types.bool_, 1), (types.int64, 2), (types.float64, 2))
_MOVES = ((types.int64, 1), (types.bool_, 2))
_PLACED = ((types.bool_, 1),)

_NO_MOVES = (np.empty(0, np.int64), np.empty((0, 0), np.bool_))
_NO_PLACED = np.empty(0, np.bool_)


class Functions(NamedTuple):
    """A policy's functions for compiled loops, which are compiled for all policies whose answers have the same types."""

    decide: Bound
    boundary: Bound
    place: Bound  # address 0 and nothing kept, as boundary, where the policy has none

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        """To them, in this order."""
        return tuple(bound.pointer for bound in self)

    @property
    def at(self) -> tuple[int, int, int]:
        """Address of what each is bound to, params and state; 0 where there is no function."""
        decide, boundary, place = (bound.kept.ctypes.data if bound.kept.size else 0 for bound in self)
        return decide, boundary, place


def functions_of(policy: Policy, residents: Residents, shape: ModelShape) -> Functions | None:
    """A policy's functions for compiled loops; None where they must be called from Python.

    That is where one is not compiled, or answers with other types than the contract's, which Python's check explains,
    or where they work on other things than numbers and arrays.
    """
    mine = (policy.params, residents.state)
    if not all(is_compiled(f) for f in (policy.decide, policy.boundary, policy.place) if f is not None):
        return None
    if not is_keepable(typeof(mine)):
        return None
    forward, view = blank_forward(shape, policy.reads_signals), residents.view(0)
    step, end = step_at(forward, 0), end_of(forward)
    decide = bind(_at_view, policy.decide, mine, step, view)
    boundary = _bound(_at_view, policy.boundary, mine, _NO_MOVES, end, view)
    place = _bound(_place, policy.place, mine, _NO_PLACED, step)
    plan, moves, placed = (answer_of(bound.pointer) for bound in (decide, boundary, place))
    fits = (
        isinstance(plan, types.NamedTuple)
        and plan.instance_class is Plan
        and isinstance(moves, types.BaseTuple)
        and all(_are_arrays(*each) for each in ((tuple(plan)[:5], _PLAN), (tuple(moves), _MOVES), ((placed,), _PLACED)))
    )
    return Functions(decide, boundary, place) if fits else None


def _bound(caller: Any, function: Any, mine: tuple[Any, ...], answer: Any, *arguments: Any) -> Bound:
    if function is not None:
        return bind(caller, function, mine, *arguments)
    kinds = (types.none, types.none, types.int64, *(typeof(argument) for argument in arguments))
    return Bound(Pointer(kind_of(typeof(answer), *kinds), 0), np.empty(0, np.int64))


@jit_inner
def _at_view(kind, kept, at, asked, view):
    address, params, state = kept_at(kept, at)
    return function_at(kind, address)(params, state, asked, view)


@jit_inner
def _place(kind, kept, at, step):
    address, params, state = kept_at(kept, at)
    return function_at(kind, address)(params, state, step)


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
    left = 0
    for pool in range(capacity.size):  # array methods would take a second to compile
        if capacity[pool] < 0:
            return False
        left += view.capacity[pool] - capacity[pool]
    if left != 0:
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
    has_room = True
    for pool in range(capacity.size):
        has_room &= taken[pool] <= capacity[pool]
    return has_room


@jit
def replace(resident, others):
    """Write who is resident from now on, [N] bool; returns by how many they are more than before."""
    more = 0
    for expert in range(resident.size):  # to assign the array would take seconds to compile
        more += others[expert]
        more -= resident[expert]
        resident[expert] = others[expert]
    return more


class PolicyLoop:
    """One run's compiled loop over the layers of a forward, in which the policy is called.

    The loop is called with (kinds and addresses of the policy's functions and of further ones, `Functions.at`, forward,
    held, arguments...). It sets `held.asked_at` before each call of the policy, and answers with (plan, placed, moves),
    all of them None but for one that it refuses. It then stops without having changed anything since the policy was
    shown its view, so that Python's check finds and says the same.

    Args:
        loop: compiled by `jit`.
        functions: the policy's.
        arguments: of the types of those of every call.
        others: pointers to further functions that the loop calls.
        lacks: why a plan that prefetches is refused though it keeps to the contract, where the loop does so.
    """

    def __init__(
        self,
        loop: Any,
        functions: Functions,
        policy: Policy,
        residents: Residents,
        shape: ModelShape,
        *arguments: Any,
        others: tuple[Pointer, ...] = (),
        lacks: str = "its decisions need an engine with a clock",
    ) -> None:
        self._policy, self._residents, self._held, self._lacks = policy, residents, residents.held, lacks
        self._functions, self._at = functions, functions.at
        blank = blank_forward(shape, policy.reads_signals)
        self._enter = entry_of(loop, (*functions.pointers, *others), self._at, blank, self._held, *arguments)

    def run(self, forward: Forward, *arguments: Any) -> None:
        """Run the layers of a forward.

        Raises:
            PlanError: the policy answered with what breaks the contract.
            PolicyError: it cannot decide on this trace.
        """
        try:
            plan, placed, moves = self._enter(self._at, forward, self._held, *arguments)
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
