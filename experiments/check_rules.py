"""What any policy must keep to, tried on one trace: the first rule that it breaks, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.check_traces import Case, other_future
from policies.check import place_of
from policies.contract import Estimates, Plan, PlanError, Policy, PolicyError, Step, View
from policies.log import DECIDED, Table
from policies.profile import Costs
from simulator.des import simulate
from tracer.schema import Pass

RULES = {
    "runs": "the policy's own code ends without an error",
    "contract": "every miss is served once; who stays was there, and fits",
    "declared": "misses and prefetches are as the policy says",
    "views": "nothing that a policy is shown is written to",
    "state": "every run decides the same, also two side by side",
    "causality": "nothing is known of what comes after a gate",
}
MOST_LEFT_OUT = 40  # forwards of a trace that is tried without each of them
NUM_FUTURES = 4  # of each gate, where it is looked for the smallest trace
MOST_CUTS = 5  # gates of a trace after which the future is changed

# copies take about as long as layers, so that prefetches are in time, late and dropped
COSTS = Costs(
    n_a_ns=100.0,
    n_b_ns=0.0,
    n_c_ns=0.0,
    g_a_ns=20.0,
    g_b_ns=2.0,
    g_c_ns=0.0,
    h2d_latency_ns=80.0,
    h2d_bytes_per_s=1e9,
    expert_bytes=0,
    cpu_a_ns=0.0,
    cpu_b0_ns=50.0,
    cpu_b1_ns=5.0,
    cpu_roundtrip_ns=0,
    tail_ns=40,
    gate_sync_ns=0,
    policy_ns=3,
    h2d_slowdown=1.0,
    cpu_slowdown=1.0,
    transfer_chunk=4,
)
ESTIMATES = Estimates(h2d_ns=80, cpu_b0_ns=50, cpu_b1_ns=5)
_DECIDED = ("capacity", *DECIDED)

Build = Callable[[Case], Policy]


@dataclass(frozen=True)
class Violation:
    """A rule that was broken; the text says where, what was found and what is allowed."""

    rule: str
    text: str
    case: Case
    forward: int = -1  # at which it shows, where that is known


class _BrokenView(Exception):  # noqa: N818  # never leaves this module
    """A policy wrote to what it was shown."""


class Row(NamedTuple):
    """One layer execution as it was decided."""

    place: str
    forward: int
    layer: int
    decided: dict[str, Any]


@dataclass
class Tally:
    """How much was tried, and how long the policy took to decide."""

    num_cases: int = 0
    num_gates: int = 0
    decide_ns: list[int] = field(default_factory=list)
    num_prefetches: int = 0
    num_refused: int = 0
    refusal: str = ""
    is_clairvoyant: bool = False
    prefetches: bool = False

    def watched(self, policy: Policy) -> Policy:
        """The policy, which is timed, and refused when it writes to what it is shown."""

        def decide(params: Any, state: Any, step: Step, view: View) -> Plan:
            shown = [array for array in (*step, *view, *(step.signals or ())) if isinstance(array, np.ndarray)]
            before = [array.copy() for array in shown]
            start_ns = perf_counter_ns()
            try:
                plan = policy.decide(params, state, step, view)
            finally:  # an error may only follow from it
                _require_same(step, shown, before)
            self.decide_ns.append(perf_counter_ns() - start_ns)
            return plan

        return replace(policy, decide=decide)


def _require_same(step: Step, shown: Sequence[NDArray[Any]], before: Sequence[NDArray[Any]]) -> None:
    for array, copy in zip(shown, before, strict=True):
        if not np.array_equal(array, copy, equal_nan=array.dtype.kind == "f"):
            where = place_of(step)
            raise _BrokenView(f"{where}: decide changed an array that it was shown, {array.dtype} of {array.shape}")


def check(build: Build, case: Case, tally: Tally, cuts: Iterable[tuple[int, int]] | None = None) -> Violation | None:
    """The first rule that a policy breaks on this trace.

    Args:
        build: makes the policy for a trace.
        case: trace and cache size.
        tally: counts what was tried.
        cuts: gates after which the future is changed; None takes some of the trace.
    """
    try:
        policy = build(case)
    except PolicyError as error:
        return Violation("runs", str(error), case)
    if refusal := _refusal(policy, case):
        tally.num_refused, tally.refusal = tally.num_refused + 1, refusal
        return None
    tally.num_cases += 1
    tally.is_clairvoyant, tally.prefetches = policy.clairvoyant, policy.prefetches
    rows: list[Row] = []
    try:
        for row in _run(tally.watched(policy), case):
            rows.append(row)  # an error later on leaves them
            if found := _declared(policy, row, case):
                return found
    except (PlanError, PolicyError) as error:
        return _error(error, case, rows)
    except _BrokenView as error:
        return Violation("views", str(error), case, _reached(rows, case))
    tally.num_gates += len(rows)
    tally.num_prefetches += sum(len(row.decided["prefetch_experts"]) for row in rows)
    try:
        found = _state(build, policy, case, rows)
    except (PlanError, PolicyError) as error:
        found = Violation("state", f"a first run ends well, and another not: {error}", case)
    return found or _causality(build, policy, case, rows, cuts)


def _refusal(policy: Policy, case: Case) -> str:
    """Why the policy does not want this cache size or shape, if it says so by a PolicyError of its own."""
    try:
        policy.init(policy.params, case.shape, case.slots)
    except PolicyError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return str(error) if isinstance(cause, PolicyError) else ""
    except PlanError:
        return ""
    return ""


def _run(policy: Policy, case: Case) -> Iterator[Row]:
    for chunk in simulate(case.passes, policy, case.shape, case.slots, COSTS, ESTIMATES, chunk_forwards=1):
        yield from _rows(chunk.layers)


def _rows(table: Table) -> Iterator[Row]:
    scalars, lists = table.scalars, table.lists
    for row in range(len(table)):
        request, forward, layer = (int(scalars[name][row]) for name in ("request", "forward", "layer"))
        decided = {name: (scalars[name] if name in scalars else lists[name])[row].tolist() for name in _DECIDED}
        yield Row(f"request {request}, forward {forward}, layer {layer}", forward, layer, decided)


def _error(error: PlanError | PolicyError, case: Case, rows: Sequence[Row]) -> Violation:
    rule = "contract" if isinstance(error, PlanError) else "runs"
    return Violation(rule, str(error), case, _reached(rows, case))


def _reached(rows: Sequence[Row], case: Case) -> int:
    """Forward that was under way when a run ended; its rows are handed on with it."""
    return min(rows[-1].forward + 1 if rows else 0, len(case.passes) - 1)


def _declared(policy: Policy, row: Row, case: Case) -> Violation | None:
    decided = row.decided
    if policy.misses == "h2d" and decided["on_cpu"]:
        text = f'experts {decided["on_cpu"]} are served on the CPU; with misses = "h2d" all are copied'
    elif not policy.prefetches and decided["prefetch_experts"]:
        text = f"experts {decided['prefetch_experts']} are prefetched; a policy that does so says prefetches = True"
    else:
        return None
    return Violation("declared", f"{row.place}: {text}", case, row.forward)


def _state(build: Build, policy: Policy, case: Case, rows: Sequence[Row]) -> Violation | None:
    hint = "state is kept outside of the object, in its class or module, or numbers are drawn that context.seed does not decide"
    again = list(_run(policy, case))
    if found := _difference("state", case, rows, again, f"a second run of the same object decides differently: {hint}"):
        return found
    both = list(zip(_run(policy, case), _run(policy, case), strict=True))
    for number in (0, 1):
        beside = [pair[number] for pair in both]
        if found := _difference("state", case, rows, beside, f"two runs side by side disturb each other: {hint}"):
            return found
    return _difference("state", case, rows, list(_run(build(case), case)), f"built anew it decides differently: {hint}")


def _causality(
    build: Build, policy: Policy, case: Case, rows: Sequence[Row], cuts: Iterable[tuple[int, int]] | None
) -> Violation | None:
    if policy.clairvoyant:
        return None
    num_layers = case.shape.num_layers
    if cuts is None:
        rng = np.random.default_rng(len(rows))
        chosen = np.sort(rng.permutation(len(rows))[:MOST_CUTS])
        cuts = [divmod(int(row), num_layers) for row in chosen]
    for number, (forward, layer) in enumerate(cuts):
        rng = np.random.default_rng([number, forward, layer])
        passes = other_future(rng, case.passes, case.shape.num_experts, forward, layer)
        other: list[Row] = []
        num_known = forward * num_layers + layer + 1
        changed = replace(case, passes=passes)
        try:
            for row in _run(build(changed), changed):
                other.append(row)
                if len(other) == num_known:
                    break
        except (PlanError, PolicyError) as error:
            return _error(error, changed, other)
        why = f"with another future after forward {forward}, layer {layer}, it decides differently; only what says clairvoyant = True may"
        if found := _difference("causality", case, rows[:num_known], other, why):
            return found
    return None


def _difference(rule: str, case: Case, rows: Sequence[Row], other: Sequence[Row], why: str) -> Violation | None:
    for one, two in zip(rows, other, strict=True):
        for name in _DECIDED:
            if one.decided[name] != two.decided[name]:
                text = f"{one.place}: {why}; {name} is {one.decided[name]}, then {two.decided[name]}"
                return Violation(rule, text, case, one.forward)
    return None


def smallest(build: Build, violation: Violation) -> Violation:
    """The same rule, broken on a trace of which no pass can be left out; of a long trace, all that follows is."""
    found = violation

    def holds_without(passes: Sequence[Pass]) -> bool:
        nonlocal found
        fewer = replace(found.case, passes=passes)
        num_layers = fewer.shape.num_layers
        gates = [divmod(row, num_layers) for row in range(len(passes) * num_layers)]
        seen = check(build, fewer, Tally(), gates * NUM_FUTURES)
        if seen is None or seen.rule != violation.rule:
            return False
        found = seen
        return True

    passes = found.case.passes
    if 0 <= found.forward < len(passes) - 1:
        holds_without(passes[: found.forward + 1])
    index = len(found.case.passes) - 1
    while index >= 0 and 1 < len(found.case.passes) <= MOST_LEFT_OUT:
        passes = found.case.passes
        holds_without([*passes[:index], *passes[index + 1 :]])
        index = min(index, len(found.case.passes)) - 1
    return found
