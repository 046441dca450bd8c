"""One run: a trace, a policy, a cache size and a machine in; a summary, tables and a manifest out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm

from experiments.arguments import checked
from experiments.decision_log import Comparison
from experiments.files import TIMELINE, RunFiles, read_run
from experiments.kept import Kept
from experiments.lower_bound import LowerBound
from experiments.manifest import manifest
from experiments.policy import OwnPolicy, name_of
from experiments.results import ForwardTable
from experiments.setting import Setting, setting_of
from experiments.summary import summary_of
from experiments.timeline import FORWARDS
from experiments.timeline_run import timeline_of
from policies.contract import Policy
from policies.log import LogChunk
from policies.profile import HardwareProfile, estimates_of
from simulator import compiled, des
from simulator.link import Copy
from simulator.timing import time
from tracer.exchange import put_back
from tracer.schema import ModelShape
from tracer.store import TraceReader

NOTHING_KEPT = Kept(budget_bytes=0)
_ENGINES = {"compiled": compiled.simulate, "des": des.simulate}


@dataclass(frozen=True, eq=False)
class Result:
    """What a run found.

    `summary` holds one value for each of `experiments.summary.COLUMNS` and more; `forwards` one row for each forward;
    `manifest` what is needed to make the same run again.
    """

    summary: dict[str, Any]
    forwards: pl.DataFrame
    manifest: dict[str, Any]


def simulate(
    trace: str | Path | TraceReader,
    policy: str | OwnPolicy = "oled",
    slots_per_layer: int | None = None,
    hardware: str | Path | HardwareProfile = "rtx5090",
    *,
    cache_gib: float | None = None,
    knobs: Mapping[str, Any] | None = None,
    shape: str | ModelShape = "trace",
    expert_dtype: str | None = None,
    warmup_requests: int = 1,
    calibration: str = "auto",
    staging_slots: int | None = None,
    engine: str = "compiled",
    seed: int = 0,
    output: str | Path | None = None,
    overwrite: bool = False,
    per_layer: bool = False,
    decisions: bool = True,
    timeline: bool = False,
    timeline_from_forward: int | None = None,
    timeline_forwards: int | None = FORWARDS,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    progress: bool = False,
) -> Result:
    """Run one policy over one trace in simulated time.

    Args:
        trace: name of a shipped trace, a path, or a reader.
        policy: a registered name; `custom` or `log` with the knob `path`; or a subclass of PlainPolicy, or an object.
        slots_per_layer: expert slots on the GPU for each MoE layer, 1 to the number of experts; `full` and `ondemand`
            ignore it. 40 where neither this nor `cache_gib` is given.
        hardware: name of a shipped profile, path of a YAML file, or a profile.
        cache_gib: the size of the cache as GiB of expert slots instead, of all layers together and without staging;
            what is left of it by whole experts and equal layers is not used.
        knobs: parameters of the policy that differ from its defaults.
        shape: `trace` charges the sizes of the traced model; a name or a shape charges those of another model for
            the same routing.
        expert_dtype: number format of the experts, if not the shape's: bfloat16, fp8, int4, ...
        warmup_requests: first requests that are simulated, not counted, and calibrate policies where nothing else does.
        calibration: `auto`, the shipped record of the traced model, else the warm-up requests; `warmup`, these; or the
            path of a record.
        staging_slots: GPU slots beyond the cache for experts in transit; None is twice the transfer chunk.
        engine: `compiled`, or `des`, the readable reference: the same results, event by event.
        seed: for policies that draw random numbers.
        output: directory for summary.json, result.parquet, decisions.parquet, manifest.json and timeline.pftrace, as
            far as they are asked for, all or none of them; it holds nothing else. A run there that was asked for the
            same is replaced.
        overwrite: replace a run of any configuration in `output`.
        per_layer: let result.parquet have one row for each layer execution.
        decisions: write decisions.parquet.
        timeline: write timeline.pftrace, which ui.perfetto.dev shows.
        timeline_from_forward: its first forward, an index in the run; None is the first decode forward that is counted.
        timeline_forwards: how many; None is all that follow.
        config: what was asked for, for the manifest; None makes it of these arguments.
        overrides: of it what stood on a command line.
        progress: show a bar on stderr when it is a terminal.

    Raises:
        TraceError, PolicyError, ProfileError: an argument is not what it must be; nothing is written.
        ConfigError: an argument is of another type, or `output` cannot take the results.
    """
    return run(locals(), NOTHING_KEPT)


DEFAULTS = {name: entry.default for name, entry in signature(simulate).parameters.items() if name != "trace"}


def run(arguments: Mapping[str, Any], kept: Kept) -> Result:
    """Run once, as `simulate` does.

    Args:
        arguments: all of `simulate`, by name.
        kept: what this run may share with others of its process.

    Raises:
        TraceError, PolicyError, ProfileError, ConfigError: as `simulate` does.
    """
    return _run(setting_for(arguments, kept), arguments["output"], kept)


def run_unless_done(arguments: Mapping[str, Any], kept: Kept) -> Result | None:
    """Run once, as `run` does, unless the whole result of this very run lies in `output` already: then None.

    A run of a class or an object of the user's is never taken for done: what it did then cannot be told.
    """
    setting, output = setting_for(arguments, kept), arguments["output"]
    if output is not None and isinstance(setting.policy, str):
        put_back(Path(output))
        found = read_run(Path(output))
        if found is not None and found.manifest.get("identity") == setting.identity(setting.config()):
            return None
    return _run(setting, output, kept)


def setting_for(arguments: Mapping[str, Any], kept: Kept) -> Setting:
    """What a run with these arguments is made of."""
    trace, policy, hardware, shape = (arguments[name] for name in ("trace", "policy", "hardware", "shape"))
    return setting_of(checked(arguments), trace, policy, hardware, shape, kept)


def _run(setting: Setting, output: str | Path | None, kept: Kept) -> Result:
    given, reader, traced, costs = setting.given, setting.reader, setting.traced, setting.costs
    policy = kept.policy(setting)
    slots = setting.slots(policy)
    table = ForwardTable(
        traced.num_layers, traced.num_experts, given.warmup_requests, costs.policy_ns, policy.pool == "global"
    )
    # only of a policy that takes the slots it is given is their number known before the run
    fewest_key = (reader, given.warmup_requests, slots, setting.staging_slots) if policy.sized else None
    bound = LowerBound(
        *(policy, traced.num_layers, traced.num_experts, given.warmup_requests, costs, setting.staging_slots),
        num_misses=kept.fewest_misses.get(fewest_key) if fewest_key else None,
    )
    compared = Comparison(policy)
    run_manifest = manifest(setting, policy)
    disable = None if given.progress else True  # None: where stderr is no terminal
    bar = tqdm(total=reader.num_passes, desc=name_of(setting.policy), unit="forward", disable=disable)
    with RunFiles(output, given, run_manifest["config"]) as files, bar:
        timeline = timeline_of(setting, policy, slots, files.open(TIMELINE)) if given.timeline else None
        chunks = _chunks(setting, policy, slots, kept, timeline.add_copy if timeline else None)
        takers = (table, bound, compared, files, *([timeline] if timeline else ()))
        for chunk in chunks:
            for taker in takers:
                taker.add(chunk)
            bar.update(len(chunk.forwards))
        if fewest_key:
            kept.fewest_misses.put(fewest_key, bound.num_misses, 1)
        summary = summary_of(table, policy, setting, bound)
        summary["warnings"] += compared.warnings
        if timeline:
            timeline.finish()
            summary["warnings"] += timeline.warnings
        files.finish(summary, run_manifest, table.frame())
    return Result(summary, table.frame(), run_manifest)


def _chunks(
    setting: Setting, policy: Policy, slots: int, kept: Kept, on_copy: Callable[[Copy], None] | None
) -> Iterator[LogChunk]:
    """The log of a run, of decisions that another run made where they are kept."""
    costs, traced = setting.costs, setting.traced
    if setting.given.engine == "compiled" and not policy.prefetches and on_copy is None:
        return time(kept.decisions(setting, policy, slots), costs, setting.staging_slots)
    passes = kept.passes(setting.reader, policy.reads_signals and setting.reader.has_signals)
    return _ENGINES[setting.given.engine](
        *(passes, policy, traced, slots, costs, estimates_of(costs)),
        staging_slots=setting.staging_slots,
        on_copy=on_copy,
    )
