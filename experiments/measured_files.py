"""The files of a run from a measured log: those that a simulated run has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.arguments import REPLAY
from experiments.files import RunFiles
from experiments.lower_bound import LowerBound
from experiments.results import ForwardTable
from experiments.setting import Setting
from experiments.summary import summary_of
from policies.contract import Policy
from policies.log import LogChunk


def write_measured(
    files: RunFiles,
    setting: Setting,
    policy: Policy,
    chunks: Iterable[LogChunk],
    decide_us: float,
    about: Mapping[str, Any],
    manifest: Mapping[str, Any],
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Write all files of a replay; returns its summary.

    Args:
        files: open.
        setting: of the run.
        policy: that it ran.
        chunks: of its log.
        decide_us: what a decision took.
        about: what the summary says beyond a simulation's.
        manifest: of the run.
        warnings: beyond those of every run.
    """
    given, traced = setting.given, setting.traced
    sizes = traced.num_layers, traced.num_experts, given.warmup_requests
    table = ForwardTable(*sizes, round(1000 * decide_us), policy.pool == "global")
    bound = LowerBound(policy, *sizes, setting.costs, setting.staging_slots)
    for chunk in chunks:
        for taker in (table, bound, files):
            taker.add(chunk)
    summary = summary_of(table, policy, setting, bound) | {"engine": REPLAY, **about}
    summary["warnings"] += warnings
    files.finish(summary, manifest, table.frame())
    return summary
