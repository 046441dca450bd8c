"""How many layer executions a second the engines simulate with full timing, and that both find the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from time import perf_counter_ns
from typing import Any

from tqdm import tqdm

from experiments.calibration import context_of
from experiments.profiles import load_profile, load_shape
from policies.contract import Policy, PolicyError
from policies.log import LogChunk
from policies.profile import Costs, estimates_of
from policies.registry import POLICIES, build_policy
from policies.steps import ReadPasses
from simulator import compiled, des
from tracer.schema import ModelShape
from tracer.shipped import find_trace
from tracer.store import TraceReader

PROFILE, SHAPE = "rtx5090", "llada2.0-mini"
ENGINES = {"compiled": compiled.simulate, "des": des.simulate}


def measure_engines(
    trace: str, slots_per_layer: int, policies: Sequence[str] | None, num_forwards: int, num_repeats: int
) -> dict[str, Any]:
    """Time whole runs of each policy in both engines over passes that were read before.

    The compiled engine runs all forwards `num_repeats` times, before and after the event engine in turn, and counts
    with its fastest run; the event engine runs once over as many.

    Args:
        trace: shipped name or path.
        slots_per_layer: as for a run.
        policies: names; None measures all registered ones.
        num_forwards: of the trace, from its start.
        num_repeats: runs in the compiled engine, after one that compiles what is not compiled yet.

    Raises:
        TraceError, PolicyError: an argument is not what it must be, or the engines differ.
    """
    reader = TraceReader(find_trace(trace))
    shape = reader.metadata.shape
    passes = ReadPasses(islice(reader.passes(signals=reader.has_signals), num_forwards), shape, reader.has_signals)
    charged = load_shape(SHAPE)
    profile = load_profile(PROFILE)
    context, _ = context_of(reader, warmup_requests=1)
    rows: dict[str, Any] = {}
    refused: dict[str, str] = {}
    bar = tqdm(policies or POLICIES, desc="engines", unit="policy", disable=None)
    for name in bar:
        try:
            policy = build_policy(name, {}, context)
        except PolicyError as error:
            if policies is not None:
                raise
            refused[name] = str(error)
            continue
        costs = profile.costs(charged, charged.expert_bytes(), name)
        rows[name] = _measured(passes, policy, shape, slots_per_layer * shape.num_layers, costs, num_repeats)
    return {
        "trace": {"name": trace, "num_layers": shape.num_layers, "num_experts": shape.num_experts},
        "num_forwards": len(passes),
        "num_repeats": num_repeats,
        "slots_per_layer": slots_per_layer,
        "policies": rows,
        "refused": refused,
    }


def _measured(
    passes: ReadPasses, policy: Policy, shape: ModelShape, slots: int, costs: Costs, num_repeats: int
) -> dict[str, Any]:
    def run(engine: str) -> tuple[float, list[LogChunk]]:
        start = perf_counter_ns()
        chunks = list(ENGINES[engine](passes, policy, shape, slots, costs, estimates_of(costs)))
        return (perf_counter_ns() - start) / 1e9, chunks

    run("compiled")
    before = [run("compiled")[0] for _ in range(num_repeats // 2)]
    des_s, expected = run("des")
    after, found = zip(*(run("compiled") for _ in range(num_repeats - num_repeats // 2)), strict=True)
    ends = [[int(chunk.layers.scalars["end_ns"][-1]) for chunk in chunks] for chunks in (expected, found[-1])]
    if ends[0] != ends[1]:
        raise PolicyError(f"{policy.name}: the engines differ: stretches end at {ends[1]} ns, in des at {ends[0]} ns")
    num_steps = sum(len(chunk.layers) for chunk in expected)
    compiled_s = min(*before, *after) if before else min(after)
    accesses = sum(int(chunk.layers.scalars["num_activated"].sum()) for chunk in expected)
    return {
        "num_steps": num_steps,
        "num_accesses": accesses,
        "compiled_steps_per_s": num_steps / compiled_s,
        "compiled_accesses_per_s": accesses / compiled_s,
        "des_steps_per_s": num_steps / des_s,
        "ratio": des_s / compiled_s,
    }


def engines_as_text(report: Mapping[str, Any]) -> str:
    """What was measured as Markdown, 80 columns wide."""
    machine = report["machine"]
    return "\n".join(
        [
            f"# Layer executions a second with full timing, `{report['trace']['name']}`",
            "",
            f"- processor: {machine['processor']}, {machine['num_cpus']} cores, one used",
            f"- busy: load average {machine['load_average']} at the end",
            f"- runs: {report['num_forwards']} forwards, {report['slots_per_layer']} slots a layer, the trace read before;",
            f"  compiled the fastest of {report['num_repeats']}, des once",
            "",
            "| policy           | compiled | us a step | accesses | des, steps | ratio |",
            "|                  |  steps/s |           |      M/s |         /s |       |",
            "|:-----------------|---------:|----------:|---------:|-----------:|------:|",
            *(_line(name, row) for name, row in report["policies"].items()),
            *(f"\nNot measured: {why}" for why in report["refused"].values()),
        ]
    )


def _line(name: str, row: Mapping[str, float]) -> str:
    steps = row["compiled_steps_per_s"]
    return (
        f"| {name:<16} | {steps:8.0f} | {1e6 / steps:9.1f} | {row['compiled_accesses_per_s'] / 1e6:8.2f} | "
        f"{row['des_steps_per_s']:10.0f} | {row['ratio']:5.0f} |"
    )
