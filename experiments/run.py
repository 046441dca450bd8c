"""One run: a trace, a policy, a cache size and a machine in; a summary, tables and a manifest out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm

from experiments import metrics
from experiments.calibration import context_of
from experiments.files import RunFiles
from experiments.manifest import manifest
from experiments.profiles import changes_of, load_profile, load_shape
from experiments.results import ForwardTable
from policies.contract import Policy, PolicyError
from policies.profile import Costs, HardwareProfile, estimates_of
from policies.registry import build_policy
from simulator.des import simulate as simulate_events
from tracer.schema import WEIGHT_BITS, ModelShape, TraceError
from tracer.shipped import find_trace
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


def simulate(
    trace: str | Path | TraceReader,
    policy: str = "oled",
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
    per_layer: bool = False,
    config: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Result:
    """Run one policy over one trace in simulated time.

    Args:
        trace: name of a shipped trace, a path, or a reader.
        policy: a registered name.
        slots_per_layer: expert slots on the GPU for each MoE layer, 1 to the number of experts.
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
        output: directory for summary.json, result.parquet, decisions.parquet and manifest.json, all or none of them.
        per_layer: let result.parquet have one row for each layer execution.
        config: settings to keep in the manifest.
        progress: show a bar on stderr when it is a terminal.

    Raises:
        TraceError, PolicyError, ProfileError: an argument is not what it must be; nothing is written.
    """
    reader = trace if isinstance(trace, TraceReader) else TraceReader(find_trace(str(trace)))
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
    traced = reader.metadata.shape
    charged = traced if shape == "trace" else load_shape(shape) if isinstance(shape, str) else shape
    _check_sizes(slots_per_layer, traced, warmup_requests, reader, expert_dtype)
    expert_bytes = charged.expert_bytes(expert_dtype)
    costs = profile.costs(charged, expert_bytes, policy)
    context, calibration_name = context_of(reader, warmup_requests, calibration, seed)
    built = build_policy(policy, dict(knobs or {}), context)
    staging = 2 * costs.transfer_chunk if staging_slots is None else staging_slots
    slots = slots_per_layer * traced.num_layers
    passes = reader.passes(signals=built.reads_signals and reader.has_signals)
    chunks = simulate_events(passes, built, traced, slots, costs, estimates_of(costs), staging_slots=staging)
    table = ForwardTable(
        traced.num_layers, traced.num_experts, warmup_requests, costs.policy_ns, built.pool == "global"
    )
    run_manifest = manifest(reader, profile, built, config or {}, seed, calibration_name)
    bar = tqdm(total=reader.num_passes, desc=policy, unit="forward", disable=not (progress and sys.stderr.isatty()))
    with RunFiles(output) as files, bar:
        for chunk in chunks:
            table.add(chunk)
            files.add(chunk)
            bar.update(len(chunk.forwards))
        summary = _summary(table, built, reader, profile, costs, charged, warmup_requests, staging)
        result = Result(summary, table.frame(), run_manifest)
        files.finish(result.summary, result.manifest, result.forwards, per_layer)
    return result


def _check_sizes(
    slots_per_layer: int, shape: ModelShape, warmup_requests: int, reader: TraceReader, expert_dtype: str | None
) -> None:
    if not 1 <= slots_per_layer <= shape.num_experts:
        raise PolicyError(
            f"slots_per_layer is {slots_per_layer}, must be 1 to {shape.num_experts}, the experts of a layer of this trace"
        )
    if not 0 <= warmup_requests < reader.num_requests:
        raise TraceError(
            f"warmup_requests is {warmup_requests}, must be 0 to {reader.num_requests - 1}: the trace holds {reader.num_requests} requests"
        )
    if expert_dtype is not None and expert_dtype not in WEIGHT_BITS:
        raise TraceError(f"expert_dtype is {expert_dtype!r}, allowed are {', '.join(WEIGHT_BITS)}")


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
        "slots_per_layer": num_slots // metadata.shape.num_layers,
        "trace": reader.path.stem,
        "source": metadata.source,
        "traced_hidden": metadata.shape.hidden,
        "training_minutes": metadata.details.get("training", {}).get("minutes"),
        "warmup": warmup_requests,
        "hardware": profile.name,
        "hardware_changes": changes_of(profile),
        "provenance": profile.provenance,
        "provisional": profile.provisional,
        "charged_hidden": charged.hidden,
        "charged_expert_intermediate": charged.expert_intermediate,
        "expert_bytes": costs.expert_bytes,
        "gpu_expert_bytes": (num_slots + staging_slots) * costs.expert_bytes,
        "decision_hash": table.decision_hash,
        "warnings": list(policy.warnings),
        **metrics.measure(forwards, costs.expert_bytes),
    }
    return {name: values[name] for name in COLUMNS} | values
