"""Results of replays: the files that a simulated run has, from a measured log."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.files import RunFiles, read_run
from experiments.kept import Kept
from experiments.lower_bound import LowerBound
from experiments.manifest import manifest as manifest_of
from experiments.replay_config import ENGINE, Conditions
from experiments.replay_machine import Workshop
from experiments.replay_run import Measured, run
from experiments.results import ForwardTable
from experiments.setting import Setting
from experiments.summary import summary_of
from policies.jit import source_hash
from replay.cpu_experts import instructions
from tracer.exchange import put_back


def write(
    setting: Setting,
    conditions: Conditions,
    output: Path,
    kept: Kept,
    workshop: Workshop,
    *,
    skip_done: bool = False,
) -> dict[str, Any] | None:
    """Run once and write the results; the directory is there whole or not at all.

    Args:
        setting: of the run.
        conditions: how the hardware is used.
        output: directory for the files of a run.
        kept: what runs have in common.
        workshop: that makes machines.
        skip_done: do nothing if the whole result of this very run lies in `output` already.

    Returns:
        The summary; None where the run was skipped.

    Raises:
        ConfigError, TraceError, PolicyError, ProfileError: the run cannot be made so, or `output` cannot take it.
    """
    config = setting.config()
    identity = hashlib.sha256(f"{setting.identity(config)} {source_hash('replay/**/*.py')}".encode()).hexdigest()
    if skip_done:
        put_back(output)
        found = read_run(output)
        if found is not None and found.manifest.get("identity") == identity:
            return None
    with RunFiles(output, setting.given, config) as files:
        measured = run(setting, conditions, kept, workshop)
        given, traced, policy = setting.given, setting.traced, measured.policy
        sizes = traced.num_layers, traced.num_experts, given.warmup_requests
        decide_ns = round(1000 * measured.replayed.decide_us)
        table = ForwardTable(*sizes, decide_ns, policy.pool == "global")
        bound = LowerBound(policy, *sizes, setting.costs, setting.staging_slots)
        for chunk in measured.replayed.chunks:
            for taker in (table, bound, files):
                taker.add(chunk)
        summary = summary_of(table, policy, setting, bound) | about(measured, conditions)
        summary["warnings"] += fallbacks(measured)
        found = manifest_of(setting, policy) | {"identity": identity, "conditions": asdict(conditions)}
        files.finish(summary, json.loads(json.dumps(found)), table.frame())
    return summary


def about(measured: Measured, conditions: Conditions) -> dict[str, Any]:
    """What a replay's summary says beyond a simulation's."""
    facts, replayed = measured.facts, measured.replayed
    return {
        "engine": ENGINE,
        "mode": conditions.mode,
        "device": facts.device,
        "h2d_bytes_factor": conditions.h2d_bytes_factor,
        "num_forwards": measured.num_forwards,
        "repeat": conditions.repeat,
        "weights": conditions.weights,
        "host_us_per_layer": replayed.host_us,
        "lead_us_per_layer": replayed.lead_us,
        "decide_us_per_layer": replayed.decide_us,
        "is_pinned": facts.is_pinned,
        "cpu_kernel": facts.cpu_kernel,
        "num_distinct_experts": facts.num_distinct_experts,
        "machine": facts.machine,
    }


def fallbacks(measured: Measured) -> list[str]:
    """What the run had to do in another way than it should, and is the slower for."""
    found = []
    if measured.facts.device != "cpu" and not measured.facts.is_pinned:
        found.append("experts lie in memory that could not be pinned, from where copies are slower")
    if (used := instructions()) != "AMX":
        found.append(f"experts on the CPU are computed with {used}")
    return found
