"""Asks a policy for its plan while the GPU waits: the same questions and checks as `Residents.decide`, sooner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.dispatcher import Dispatcher

from policies.check import FINE, check_plan, find_violation, place_of
from policies.contract import Plan, Policy, PolicyError, Step, View
from policies.residents import Residents


class Asking:
    """Asks one policy, and checks what it answers.

    numba finds out at every call which compiled code fits the arguments, which takes longer than most decisions.
    Here the arguments are of the same types each time, so a compiled policy's code is kept from the first answer on.

    Args:
        policy: built.
        residents: of its run.
    """

    def __init__(self, policy: Policy, residents: Residents) -> None:
        self._policy, self._residents = policy, residents
        shown = residents.view(0)
        self._shown, self._estimates = shown[:3], shown.estimates
        self._ask: Callable[..., Plan] | None = None
        self._violation: Callable[..., tuple[int, int]] | None = None

    def decide(self, step: Step, free_slots: int) -> Plan:
        """The policy's plan, checked.

        Args:
            step: the gate.
            free_slots: of the layer's pool.

        Raises:
            PlanError, PolicyError: as `Residents.decide`.
        """
        if self._ask is None or self._violation is None:
            plan = self._residents.decide(step)
            self._ask = _only_code(self._policy.decide)
            self._violation = _code_for(find_violation, plan, step, self._residents.view(step.layer))
            return plan
        view = View(*self._shown, free_slots, self._estimates)
        try:
            plan = self._ask(self._policy.params, self._residents.state, step, view)
        except PolicyError as error:
            raise PolicyError(f"{place_of(step)}: {error}") from error
        if self._violation(plan, step, view)[0] != FINE:
            check_plan(plan, step, view)
        return plan


def _only_code(function: Any) -> Callable[..., Any] | None:
    """Entry of the one piece of compiled code that a function has; None if it has another number, or is Python."""
    if not isinstance(function, Dispatcher) or len(function.overloads) != 1:
        return None
    return next(iter(function.overloads.values())).entry_point


def _code_for(function: Any, *arguments: Any) -> Callable[..., Any] | None:
    """Entry of a function's compiled code for the types of these arguments."""
    key = tuple(function.typeof_pyval(argument) for argument in arguments)
    found = function.overloads.get(key)
    return None if found is None else found.entry_point
