"""How long policies take to decide, asked from Python at every gate of a run as the drivers ask them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf
from tqdm import tqdm

from experiments.calibration import context_of
from experiments.profiles import load_profile, load_shape
from policies.check import check_plan
from policies.contract import Context, End, Plan, Policy, PolicyError, Step, View
from policies.profile import Costs, estimates_of
from policies.registry import POLICIES, build_policy
from simulator.des import simulate
from tracer.schema import ModelShape, Pass
from tracer.shipped import find_trace
from tracer.store import TraceReader

PROFILE, SHAPE = "rtx5090", "llada2.0-mini"  # when prefetches land, and so what policies find at their gates
WARM_FORWARDS = 8  # compile what is not compiled yet, and fill the caches
BUDGETS_US = {"oled": 15.0}  # of a mean decision
PREFETCH_BUDGET_US = 60.0


@dataclass
class Recorded:
    """Everything that a policy was asked in one run, so that it can be asked once more without the run around it."""

    policy: Policy
    slots: int  # of all layers together
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]  # function of the policy, arguments after its state
    engine_ns: list[int]  # what each decision took between the engine's own work


def record(policy: Policy, passes: Sequence[Pass], shape: ModelShape, slots: int, costs: Costs) -> Recorded:
    """Run a policy in the event engine, where residents and prefetches are what they would be.

    Args:
        policy: built for this shape.
        passes: of the run.
        shape: of the passes.
        slots: of all layers together.
        costs: what everything takes in the engine.
    """
    recorded = Recorded(policy, slots, [], [])

    def decide(params: Any, state: Any, step: Step, view: View) -> Plan:
        recorded.calls.append((policy.decide, (step, _kept(view))))
        start = perf_counter_ns()
        plan = policy.decide(params, state, step, view)
        recorded.engine_ns.append(perf_counter_ns() - start)
        return plan

    watched = replace(policy, decide=decide)
    if (ask_boundary := policy.boundary) is not None:

        def boundary(params: Any, state: Any, end: End, view: View) -> Any:
            recorded.calls.append((ask_boundary, (end, _kept(view))))
            return ask_boundary(params, state, end, view)

        watched = replace(watched, boundary=boundary)
    if (ask_place := policy.place) is not None:

        def place(params: Any, state: Any, step: Step) -> Any:
            recorded.calls.append((ask_place, (step,)))
            return ask_place(params, state, step)

        watched = replace(watched, place=place)
    for _ in simulate(passes, watched, shape, slots, costs, estimates_of(costs)):
        pass
    return recorded


def _kept(view: View) -> View:
    """The view as it is now: what a driver shows changes with its residents."""
    resident, in_flight, capacity = view.resident.copy(), view.in_flight.copy(), view.capacity.copy()
    for array in (resident, in_flight, capacity):
        array.flags.writeable = False
    return View(resident, in_flight, capacity, view.free_slots, view.estimates)


def ask_again(recorded: Recorded, shape: ModelShape) -> Iterator[tuple[int, int, Plan]]:
    """Ask a policy everything once more from its start: for each gate the ns of decision and check, and the plan."""
    policy = recorded.policy
    state = policy.init(policy.params, shape, recorded.slots)[0]
    for function, arguments in recorded.calls:
        start = perf_counter_ns()
        answer = function(policy.params, state, *arguments)
        decided = perf_counter_ns()
        if function is policy.decide:
            check_plan(answer, *arguments)
            yield decided - start, perf_counter_ns() - decided, answer


def summary(times_ns: NDArray[np.int64]) -> dict[str, float]:
    """Total, mean, median and 99th percentile of some gates' times, us."""
    median, p99 = np.percentile(times_ns, [50, 99])
    return {
        "total_us": float(times_ns.sum() / 1e3),
        "mean_us": float(times_ns.mean() / 1e3),
        "median_us": float(median / 1e3),
        "p99_us": float(p99 / 1e3),
    }


def measure_decisions(
    trace: str, slots_per_layer: int, policies: Sequence[str] | None, num_forwards: int, num_repeats: int
) -> dict[str, Any]:
    """Time the decisions of policies over the first forwards of a trace.

    Each policy runs once in the event engine, and then answers the same questions in a row, as often as there are
    repeats. Every repeat has all policies, every other one in the reverse order, so that what else the machine does
    meets all of them. The answers are the same each time, so a gate counts with the least that it took: the time
    without interruption by others. `repeats` has what each repeat took as a whole, `engine` the one run there.

    Args:
        trace: shipped name or path.
        slots_per_layer: as for a run.
        policies: names, each with knobs behind it if any; None measures all registered ones.
        num_forwards: of the trace, more than WARM_FORWARDS.
        num_repeats: runs of each policy.

    Raises:
        TraceError, PolicyError: an argument is not what it must be, or no policy can be built on this trace.
    """
    reader = TraceReader(find_trace(trace))
    shape = reader.metadata.shape
    passes = list(islice(reader.passes(signals=reader.has_signals), num_forwards))
    if len(passes) <= WARM_FORWARDS:
        raise PolicyError(f"{len(passes)} forwards: must be more than {WARM_FORWARDS}, which are not counted")
    context, calibration = context_of(reader, warmup_requests=1)
    built, refused = _build(list(POLICIES) if policies is None else policies, context)
    if not built:
        raise PolicyError("; ".join(refused.values()))
    charged = load_shape(SHAPE)
    costs = {
        name: load_profile(PROFILE).costs(charged, charged.expert_bytes(), policy.name)
        for name, policy in built.items()
    }
    slots = slots_per_layer * shape.num_layers
    warm = WARM_FORWARDS * shape.num_layers  # gates that are not counted
    bar = tqdm(total=(1 + num_repeats) * len(built), unit="run", disable=None, leave=False)
    with bar:
        runs: dict[str, Recorded] = {}
        for name, policy in built.items():
            runs[name] = record(policy, passes, shape, slots, costs[name])
            bar.update()
        repeats: dict[str, list[Any]] = {name: [] for name in built}
        for repeat in range(num_repeats):
            for name in list(built)[:: 1 if repeat % 2 == 0 else -1]:
                times = np.array([(decide, check) for decide, check, _ in ask_again(runs[name], shape)])
                repeats[name].append(times[warm:].T)
                bar.update()
    return {
        "trace": {
            "name": reader.path.stem,
            "content_hash": reader.metadata.content_hash,
            "num_layers": shape.num_layers,
            "num_experts": shape.num_experts,
            "mean_tokens": float(np.mean([pass_.num_tokens.sum() for pass_ in passes])),
        },
        "slots_per_layer": slots_per_layer,
        "calibration": calibration,
        "engine": {"hardware": PROFILE, "shape": SHAPE},
        "num_forwards": len(passes),
        "num_warm_forwards": WARM_FORWARDS,
        "num_repeats": num_repeats,
        "policies": {name: _row(built[name], repeats[name], runs[name].engine_ns[warm:]) for name in built},
        "refused": refused,
    }


def _build(policies: Sequence[str], context: Context) -> tuple[dict[str, Policy], dict[str, str]]:
    """Those that can be built on this trace, and why the others cannot."""
    built: dict[str, Policy] = {}
    refused: dict[str, str] = {}
    for text in policies:
        name, *knobs = text.split(" ")
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(knobs))
        try:
            built[" ".join([name, *knobs])] = build_policy(name, values, replace(context, policy=name))
        except PolicyError as error:
            refused[text] = str(error)
    return built, refused


def _row(policy: Policy, repeats: Sequence[NDArray[np.int64]], engine_ns: Sequence[int]) -> dict[str, Any]:
    decide, check = np.stack(repeats, axis=1)  # [repeats, gates]
    return {
        "prefetches": policy.prefetches,
        "num_gates": decide.shape[1],
        "decide": summary(decide.min(axis=0)),
        "check": summary(check.min(axis=0)),
        "engine": summary(np.array(engine_ns)),
        "repeats": [
            {"decide": summary(own), "check": summary(checks)} for own, checks in zip(decide, check, strict=True)
        ],
        "budget_us": PREFETCH_BUDGET_US if policy.prefetches else BUDGETS_US.get(policy.name),
    }


def decisions_as_text(report: Mapping[str, Any]) -> str:
    """What was measured as Markdown, 80 columns wide."""
    machine, trace = report["machine"], report["trace"]
    counted = report["num_forwards"] - report["num_warm_forwards"]
    return "\n".join(
        [
            f"# Time of a decision, us, by `{trace['name']}`",
            "",
            *_facts(
                {
                    "processor": f"{machine['processor']}, {machine['num_cpus']} cores, one used",
                    "busy": f"load average {machine['load_average']} at the end",
                    "versions": ", ".join(f"{name} {number}" for name, number in machine["versions"].items()),
                    "routing": f"{trace['num_layers']} layers of {trace['num_experts']} experts, "
                    f"{trace['mean_tokens']:.1f} tokens a forward",
                    "cache": f"{report['slots_per_layer']} slots a layer",
                    "counted": f"{counted} forwards, each gate with the least of {report['num_repeats']} repeats",
                }
            ),
            "",
            f"| {'policy':<25} |  mean | median |   P99 | engine | check | budget |",
            f"|:{'-' * 26}|------:|-------:|------:|-------:|------:|-------:|",
            *(_line(name, row) for name, row in report["policies"].items()),
            "",
            "`engine` is the median between the work of the event engine, which leaves less",
            "in the processor's caches; `check`, that of the plan by drivers, comes on top.",
            *(f"\nNot measured: {why}" for why in report["refused"].values()),
        ]
    )


def _facts(facts: Mapping[str, str]) -> Iterator[str]:
    for name, text in facts.items():
        yield f"- {name}: {text}"


def _line(name: str, row: Mapping[str, Any]) -> str:
    """One policy; a mean above its budget is marked."""
    decide, budget = row["decide"], row["budget_us"]
    held_to = "" if budget is None else f"{budget:.0f}{' !' if decide['mean_us'] > budget else ''}"
    return (
        f"| {name:<25} | {decide['mean_us']:5.1f} | {decide['median_us']:6.1f} | {decide['p99_us']:5.1f} | "
        f"{row['engine']['median_us']:6.1f} | {row['check']['mean_us']:5.1f} | {held_to:>6} |"
    )
