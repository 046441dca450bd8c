"""Results of replays: the files that a simulated run has, from a measured log."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.files import RunFiles, read_run
from experiments.kept import Kept
from experiments.manifest import manifest as manifest_of
from experiments.measured_files import write_measured
from experiments.replay_config import Conditions
from experiments.replay_machine import Facts, Workshop
from experiments.replay_run import Measured, run
from experiments.setting import Setting
from policies.contract import Policy
from policies.jit import source_hash
from policies.profile import HardwareProfile
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
        policy, replayed = measured.policy, measured.replayed
        manifest = manifest_of(setting, policy) | {"identity": identity, "conditions": asdict(conditions)}
        return write_measured(
            *(files, setting, policy, replayed.chunks, replayed.decide_us),
            *(about(measured, conditions), manifest, fallbacks(measured.facts, policy, setting.profile)),
        )


def about(measured: Measured, conditions: Conditions) -> dict[str, Any]:
    """What a replay's summary says beyond a simulation's."""
    facts, replayed = measured.facts, measured.replayed
    return {
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


def fallbacks(facts: Facts, policy: Policy, profile: HardwareProfile) -> list[str]:
    """What the run had to do in another way than it should, and is the slower for."""
    found = []
    if facts.device != "cpu" and not facts.is_pinned:
        found.append("experts lie in memory that could not be pinned, from where copies are slower")
    if policy.misses == "h2d":  # nothing runs on the CPU
        return found
    if (used := instructions()) != "AMX":
        found.append(f"experts on the CPU are computed with {used}")
    if facts.cpu_workers < profile.cpu_workers:
        workers = f"{facts.cpu_workers} of the profile's {profile.cpu_workers} workers"
        found.append(f"experts on the CPU have {workers}, all that this machine can spare")
    return found
