"""One run: a trace, a policy, a cache size and a machine in; a summary, tables and a manifest out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm

from experiments import metrics
from experiments.acted import idle_mechanisms
from experiments.calibration import context_of, warnings_of
from experiments.decision_log import Comparison
from experiments.errors import ConfigError
from experiments.files import RunFiles
from experiments.manifest import manifest
from experiments.policy import OwnPolicy, is_own, name_of
from experiments.policy import built as built_policy
from experiments.profiles import changes_of, find_profile, find_shape, profile_hash
from experiments.results import ForwardTable
from policies.contract import Policy, PolicyError
from policies.profile import Costs, HardwareProfile, ProfileError, estimates_of
from simulator.des import simulate as simulate_events
from tracer.files import metadata_hash
from tracer.records import make_record
from tracer.schema import WEIGHT_BITS, ModelShape, TraceError
from tracer.shipped import find_trace
from tracer.statistics import training_minutes
from tracer.store import TraceReader

# The columns of tables, in order; `summary.json` holds more.
COLUMNS = (
    "policy",
    "slots_per_layer",
    "hardware",
    "trace",
    "source",
    "tpot_ms",
    "ttft_ms",
    "utilization",
    "utilization_slot_weighted",
    "hit_ratio",
    "token_hit_ratio",
    "effective_transfer_ratio",
    "h2d_bytes",
    "exposed_stall_ms",
    "decision_hash",
    "warmup",
    "variant",
    "pool",
    "misses",
)


@dataclass(frozen=True, eq=False)
class Result:
    """What a run found.

    `summary` holds one value for each of COLUMNS and more; `forwards` one row for each forward; `manifest` what is
    needed to make the same run again.
    """

    summary: dict[str, Any]
    forwards: pl.DataFrame
    manifest: dict[str, Any]


@dataclass(frozen=True)
class _Plain:
    """The arguments of `simulate` that are plain values, by which they are checked."""

    slots_per_layer: int
    knobs: dict[str, Any] | None
    expert_dtype: str | None
    warmup_requests: int
    calibration: str
    staging_slots: int | None
    seed: int
    overwrite: bool
    per_layer: bool
    config: dict[str, Any] | None
    overrides: tuple[str, ...]
    progress: bool


def simulate(
    trace: str | Path | TraceReader,
    policy: str | OwnPolicy = "oled",
    slots_per_layer: int = 40,
    hardware: str | Path | HardwareProfile = "rtx5090",
    *,
    knobs: Mapping[str, Any] | None = None,
    shape: str | ModelShape = "trace",
    expert_dtype: str | None = None,
    warmup_requests: int = 1,
    calibration: str = "auto",
    staging_slots: int | None = None,
    seed: int = 0,
    output: str | Path | None = None,
    overwrite: bool = False,
    per_layer: bool = False,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    progress: bool = False,
) -> Result:
    """Run one policy over one trace in simulated time.

    Args:
        trace: name of a shipped trace, a path, or a reader.
        policy: a registered name; `custom` or `log` with the knob `path`; or a subclass of PlainPolicy, or an object.
        slots_per_layer: expert slots on the GPU for each MoE layer, 1 to the number of experts; `full` and `ondemand`
            ignore it.
        hardware: name of a shipped profile, path of a YAML file, or a profile.
        knobs: parameters of the policy that differ from its defaults.
        shape: `trace` charges the sizes of the traced model; a name or a shape charges those of another model for
            the same routing.
        expert_dtype: number format of the experts, if not the shape's: bfloat16, fp8, int4, ...
        warmup_requests: first requests that are simulated, not counted, and calibrate policies where nothing else does.
        calibration: `auto`, the shipped record of the traced model, else the warm-up requests; `warmup`, these; or the
            path of a record.
        staging_slots: GPU slots beyond the cache for experts in transit; None is twice the transfer chunk.
        seed: for policies that draw random numbers.
        output: directory for summary.json, result.parquet, decisions.parquet and manifest.json, all or none of them;
            it holds nothing else. A run there that was asked for the same is replaced.
        overwrite: replace a run of any configuration in `output`.
        per_layer: let result.parquet have one row for each layer execution.
        config: what was asked for, for the manifest; None makes it of these arguments.
        overrides: of it what stood on a command line.
        progress: show a bar on stderr when it is a terminal.

    Raises:
        TraceError, PolicyError, ProfileError: an argument is not what it must be; nothing is written.
        ConfigError: an argument is of another type, or `output` cannot take the results.
    """
    arguments = locals()
    given = make_record(_Plain, {name: arguments[name] for name in _Plain.__annotations__}, "simulate", ConfigError)
    for name, value, kinds in (("trace", trace, (str, Path, TraceReader)), ("output", output, (str, Path, type(None)))):
        if not isinstance(value, kinds) or "\0" in str(value):
            raise ConfigError(f"simulate: {name} is {value!r}, must be a path")
    if not isinstance(policy, str) and not is_own(policy):
        raise ConfigError(
            f"simulate: policy is {policy!r}, must be text, or a subclass of PlainPolicy or an object of one"
        )
    name = name_of(policy)
    reader = trace if isinstance(trace, TraceReader) else TraceReader(find_trace(str(trace)))
    profile = find_profile(hardware)
    traced = reader.metadata.shape
    charged = find_shape(shape, traced)
    _check_numbers(given, reader)
    expert_bytes = charged.expert_bytes(given.expert_dtype)
    costs = profile.costs(charged, expert_bytes, name)
    context, calibration_name = context_of(reader, given.warmup_requests, given.calibration, given.seed)
    built = built_policy(policy, given.knobs, context)
    if built.sized and not 1 <= given.slots_per_layer <= traced.num_experts:
        raise PolicyError(
            f"slots_per_layer is {given.slots_per_layer}, must be 1 to {traced.num_experts}, the experts of a layer of this trace"
        )
    staging = 2 * costs.transfer_chunk if given.staging_slots is None else given.staging_slots
    if staging > (most := max(2 * costs.transfer_chunk, traced.num_layers * traced.num_experts)):
        raise ProfileError(f"staging_slots is {staging}, must be at most {most}, all experts of this trace")
    slots = given.slots_per_layer * traced.num_layers
    passes = reader.passes(signals=built.reads_signals and reader.has_signals)
    chunks = simulate_events(passes, built, traced, slots, costs, estimates_of(costs), staging_slots=staging)
    compared = Comparison(built)
    table = ForwardTable(
        traced.num_layers, traced.num_experts, given.warmup_requests, costs.policy_ns, built.pool == "global"
    )
    knobs_given: dict[str, Any] = given.knobs or {}
    if not isinstance(policy, str):
        knobs_given = {"knobs": knobs_given, "variant": built.variant}
    config = given.config
    if config is None:
        config = {
            "trace": str(reader.path),
            "policy": {"name": name, **knobs_given},
            "hardware": asdict(profile),
            "shape": shape if isinstance(shape, str) else asdict(shape),
            "cache": {"slots_per_layer": given.slots_per_layer},
            "expert_dtype": given.expert_dtype,
            "warmup_requests": given.warmup_requests,
            "calibration": given.calibration,
            "staging_slots": given.staging_slots,
            "seed": given.seed,
            "output": {"per_layer": given.per_layer},
        }
    run_manifest = manifest(reader, profile, built, config, given.overrides, given.seed, calibration_name)
    bar = tqdm(total=reader.num_passes, desc=name, unit="forward", disable=not (given.progress and sys.stderr.isatty()))
    with RunFiles(output, run_manifest["config"], given.overwrite) as files, bar:
        for chunk in chunks:
            table.add(chunk)
            compared.add(chunk)
            files.add(chunk)
            bar.update(len(chunk.forwards))
        summary = _summary(table, built, reader, profile, costs, charged, given.warmup_requests, staging)
        summary |= {"calibration": calibration_name, "calibration_chosen": given.calibration != "auto"}
        summary["warnings"] += [*warnings_of(context, reader, given.calibration), *compared.warnings]
        result = Result(summary, table.frame(), run_manifest)
        files.finish(result.summary, result.manifest, result.forwards, given.per_layer)
    return result


def _check_numbers(given: _Plain, reader: TraceReader) -> None:
    if not 0 <= given.warmup_requests < reader.num_requests:
        requests = "1 request" if reader.num_requests == 1 else f"{reader.num_requests} requests"
        allowed = "0" if reader.num_requests == 1 else f"0 to {reader.num_requests - 1}"
        raise TraceError(
            f"warmup_requests is {given.warmup_requests}, must be {allowed}: the trace holds {requests}, one must count"
        )
    if given.expert_dtype is not None and given.expert_dtype not in WEIGHT_BITS:
        raise TraceError(f"expert_dtype is {given.expert_dtype!r}, allowed are {', '.join(WEIGHT_BITS)}")
    if given.seed < 0:
        raise ConfigError(f"seed is {given.seed}, must be 0 or more")


def _summary(
    table: ForwardTable,
    policy: Policy,
    reader: TraceReader,
    profile: HardwareProfile,
    costs: Costs,
    charged: ModelShape,
    warmup_requests: int,
    staging_slots: int,
) -> dict[str, Any]:
    """One value for each of COLUMNS, in their order, and then the rest."""
    forwards, metadata = table.frame(), reader.metadata
    num_slots = round(forwards["num_slots"][0])  # of all layers; the sum never changes
    values = {
        "policy": policy.name,
        "variant": policy.variant,
        "pool": policy.pool,
        "misses": policy.misses,
        "sized": policy.sized,
        "clairvoyant": policy.clairvoyant,
        "slots_per_layer": num_slots // metadata.shape.num_layers,
        "trace": reader.path.stem,
        "trace_hash": metadata_hash(metadata),
        "source": metadata.source,
        "traced_hidden": metadata.shape.hidden,
        "training_minutes": training_minutes(metadata),
        "warmup": warmup_requests,
        "hardware": profile.name,
        "hardware_changes": changes_of(profile),
        "profile_hash": profile_hash(profile),
        "provenance": profile.provenance_at(charged, costs.expert_bytes),
        "provisional": profile.provisional,
        "charged_hidden": charged.hidden,
        "charged_expert_intermediate": charged.expert_intermediate,
        "expert_bytes": costs.expert_bytes,
        "gpu_expert_bytes": (num_slots + staging_slots) * costs.expert_bytes,
        "decision_hash": table.decision_hash,
        "warnings": [*policy.warnings, *idle_mechanisms(policy, forwards)],
        **metrics.measure(forwards, costs.expert_bytes),
    }
    return {name: values[name] for name in COLUMNS} | values
