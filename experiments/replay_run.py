"""The running part of `oled-replay`: a setting and its conditions in, a measured log out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from experiments.fidelity_grid import slowed
from experiments.kept import Kept
from experiments.policy import name_of
from experiments.replay_config import Conditions
from experiments.replay_machine import Facts, Workshop, progress_bar
from experiments.setting import Setting
from policies.contract import Estimates, Policy
from policies.log import DECIDED, LogChunk, Ragged
from policies.playback import Decisions, playback
from policies.profile import Costs, ProfileError, estimates_of
from replay.executor import check_policy
from replay.run import Replayed, replay
from tracer.files import metadata_hash
from tracer.schema import Pass, TraceError


@dataclass(frozen=True)
class Measured:
    """What a run measured, and on what."""

    policy: Policy  # that was asked for, whoever decided
    replayed: Replayed
    facts: Facts
    num_forwards: int


def run(setting: Setting, conditions: Conditions, kept: Kept, workshop: Workshop) -> Measured:
    """Run once.

    Args:
        setting: of the run.
        conditions: how the hardware is used.
        kept: what runs have in common.
        workshop: that makes machines.

    Raises:
        ConfigError, TraceError, PolicyError, ProfileError: the run cannot be made so.
    """
    _check_format(setting)
    _check_gates(setting)
    policy, traced = kept.policy(setting), setting.traced
    check_policy(policy)  # before a machine is made
    has_signals = policy.reads_signals and setting.reader.has_signals
    passes = list(islice(setting.reader.passes(signals=has_signals), conditions.forwards))
    _check_counted(passes, setting, conditions)
    believed = slowed(setting.profile, conditions.h2d_bytes_factor)
    costs = believed.costs(setting.charged, setting.costs.expert_bytes, name_of(setting.policy))
    estimates, slots = estimates_of(costs), setting.slots(policy)
    decider = policy
    if conditions.mode == "open":
        decider = _playing_back(policy, passes, setting, slots, costs, estimates)
    _, _, capacity = decider.init(decider.params, traced, slots)
    machine, facts = workshop.machine(
        *(passes, metadata_hash(setting.reader.metadata), traced, setting.charged),
        *(int(capacity.sum()) + setting.staging_slots, setting.profile, conditions),
        has_bars=setting.given.progress,
    )
    with progress_bar(policy.name, len(passes), "forward", setting.given.progress) as bar:
        replayed = replay(machine, passes, decider, traced, slots, estimates, setting.staging_slots, bar.update)
    return Measured(policy, replayed, facts, len(passes))


def _check_format(setting: Setting) -> None:
    """Refuse experts of other number formats than the executor computes with."""
    given, charged = setting.given.expert_dtype, setting.charged.weight_dtype
    if (given or charged) != "bfloat16":
        key = "expert_dtype" if given else "the shape's weight_dtype"
        raise ProfileError(
            f"{key} is {given or charged}: replays copy and compute bfloat16 alone; expert_dtype=bfloat16"
        )


def _check_gates(setting: Setting) -> None:
    """Refuse a trace without gates, by which the executor weighs what experts give."""
    if "gates" in setting.reader.metadata.lacks:
        raise TraceError(
            f"{setting.reader.path}: gates are null in this trace, and a replay computes with them; it can be simulated"
        )


def _check_counted(passes: Sequence[Pass], setting: Setting, conditions: Conditions) -> None:
    requests = {request for one in passes for request in one.requests.tolist()}
    warmup = setting.given.warmup_requests
    if len(requests) <= warmup:
        raise TraceError(
            f"forwards is {conditions.forwards}, and these are of {len(requests)} requests, all of them warm-up "
            f"(warmup_requests={warmup}): must be more, or warmup_requests fewer"
        )


def _playing_back(
    policy: Policy,
    passes: Sequence[Pass],
    setting: Setting,
    slots: int,
    costs: Costs,
    estimates: Estimates,
) -> Policy:
    """The decisions that the simulator makes in this very run, as a policy."""
    if setting.policy == "log":
        return policy  # it says already what is to be executed
    from simulator.compiled import simulate  # it needs SimPy, which a machine that only runs may lack

    chunks = list(
        simulate(passes, policy, setting.traced, slots, costs, estimates, staging_slots=setting.staging_slots)
    )
    return playback(_decisions_of(chunks, setting.traced.num_layers, setting.traced.num_experts, policy.pool), True, 0)


def _decisions_of(chunks: Sequence[LogChunk], num_layers: int, num_experts: int, pool: str) -> Decisions:
    """The decisions in a log."""
    tables = [chunk.layers for chunk in chunks]
    lists = {name: _joined([table.lists[name] for table in tables]) for name in DECIDED}
    capacity = np.concatenate([table.scalars["capacity"] for table in tables]).astype(np.int64)
    has_prefetches = lists["prefetch_experts"].values.size > 0
    return Decisions(num_layers, num_experts, pool, capacity, lists, has_prefetches)


def _joined(parts: Sequence[Ragged]) -> Ragged:
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths() for part in parts]))])
    return Ragged(offsets.astype(np.int64), np.concatenate([part.values for part in parts]).astype(np.int64))
