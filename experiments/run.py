"""One run: a trace, a policy, a cache size and a machine in; a summary, tables and a manifest out."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from experiments import metrics
from experiments.manifest import manifest
from experiments.profiles import changes_of, load_profile, load_shape
from experiments.results import ForwardTable
from policies.contract import Context, Policy, PolicyError
from policies.log import LAYER_COLUMNS, LAYER_LISTS, LogChunk
from policies.profile import Costs, HardwareProfile, estimates_of
from policies.registry import build_policy
from simulator.des import simulate as simulate_events
from tracer.schema import WEIGHT_BITS, ModelShape, Pass, TraceError
from tracer.store import TraceReader, find_trace

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


class FirstRequests:
    """The passes of a trace's first requests: the calibration split, disjoint from what is evaluated."""

    def __init__(self, passes: Iterable[Pass], num_requests: int) -> None:
        self._passes, self._num_requests = passes, num_requests

    def __iter__(self) -> Iterator[Pass]:
        seen: set[int] = set()
        for pass_ in self._passes:
            seen.update(pass_.requests.tolist())
            if len(seen) > self._num_requests:
                return
            yield pass_


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
        warmup_requests: first requests that are simulated, not counted, and serve as calibration split.
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
    calibration_name = f"first {warmup_requests} of {reader.num_requests} requests of the trace"
    built = build_policy(
        policy,
        dict(knobs or {}),
        Context(
            shape=traced,
            passes=reader,
            calibration=FirstRequests(reader, warmup_requests),
            calibration_name=calibration_name,
            estimates=estimates_of(costs),
            seed=seed,
        ),
    )
    table = ForwardTable(
        traced.num_layers, traced.num_experts, warmup_requests, costs.policy_ns, built.pool == "global"
    )
    staging = 2 * costs.transfer_chunk if staging_slots is None else staging_slots
    run_manifest = manifest(reader, profile, built, config or {}, seed, calibration_name)
    with _Output(output) as files:
        bar = tqdm(total=reader.num_passes, desc=policy, unit="forward", disable=not (progress and sys.stderr.isatty()))
        chunks = simulate_events(
            reader,
            built,
            traced,
            slots_per_layer * traced.num_layers,
            costs,
            estimates_of(costs),
            staging_slots=staging,
        )
        with bar:
            for chunk in chunks:
                table.add(chunk)
                files.add_layers(chunk)
                bar.update(len(chunk.forwards))
        result = Result(
            _summary(table, built, reader, profile, costs, slots_per_layer, staging, warmup_requests, charged),
            table.frame(),
            run_manifest,
        )
        files.finish(result, per_layer)
    return result


def _check_sizes(
    slots_per_layer: int, shape: ModelShape, warmup_requests: int, reader: TraceReader, expert_dtype: str | None
) -> None:
    if not 1 <= slots_per_layer <= shape.num_experts:
        raise PolicyError(
            f"cache.slots_per_layer is {slots_per_layer}, must be 1 to {shape.num_experts}, the experts of a layer of this trace"
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
    slots_per_layer: int,
    staging_slots: int,
    warmup_requests: int,
    charged: ModelShape,
) -> dict[str, Any]:
    forwards = table.frame()
    traced = reader.metadata.shape
    slots = (
        slots_per_layer
        if policy.sized
        else policy.init(policy.params, traced, slots_per_layer * traced.num_layers)[2].sum() // traced.num_layers
    )
    decode = metrics.decode(forwards)
    tokens = int(decode["num_accepted"].sum())
    stall_ms = metrics.exposed_stall_ms(forwards)
    return {
        "policy": policy.name,
        "slots_per_layer": int(slots),
        "hardware": profile.name,
        "trace": reader.path.stem,
        "source": reader.metadata.source,
        "tpot_ms": metrics.tpot_ms(forwards),
        "ttft_ms": metrics.ttft_ms(forwards),
        "utilization": metrics.utilization(forwards),
        "utilization_slot_weighted": metrics.utilization_slot_weighted(forwards),
        "hit_ratio": metrics.hit_ratio(forwards),
        "token_hit_ratio": metrics.token_hit_ratio(forwards),
        "effective_transfer_ratio": metrics.effective_transfer_ratio(forwards),
        "h2d_bytes": metrics.h2d_bytes(forwards, costs.expert_bytes),
        "exposed_stall_ms": stall_ms,
        "decision_hash": table.decision_hash,
        "warmup": warmup_requests,
        "variant": policy.variant,
        "pool": policy.pool,
        "misses": policy.misses,
        "exposed_stall_ms_per_token": stall_ms / tokens if tokens else None,
        "forward_ms_p50": metrics.forward_ms(forwards, 0.5),
        "forward_ms_p90": metrics.forward_ms(forwards, 0.9),
        "forward_ms_p99": metrics.forward_ms(forwards, 0.99),
        "tokens_per_forward": metrics.tokens_per_forward(forwards),
        "num_requests": metrics.counted(forwards)["requests"].explode().n_unique(),
        "num_decode_forwards": decode.height,
        "num_accepted": tokens,
        "policy_ms": metrics.policy_ms(forwards),
        "link_busy_ratio": metrics.link_busy_ratio(forwards),
        "cpu_busy_ratio": metrics.cpu_busy_ratio(forwards),
        "gpu_expert_bytes": (int(slots) * traced.num_layers + staging_slots) * costs.expert_bytes,
        "expert_bytes": costs.expert_bytes,
        "traced_hidden": traced.hidden,
        "training_minutes": reader.metadata.details.get("training", {}).get("minutes"),
        "charged_hidden": charged.hidden,
        "charged_expert_intermediate": charged.expert_intermediate,
        "hardware_changes": changes_of(profile),
        "provenance": profile.provenance,
        "provisional": profile.provisional,
        "warnings": list(policy.warnings),
    }


class _Output:
    """The files of a run: written under a temporary name beside their directory, moved into it when complete."""

    def __init__(self, directory: str | Path | None) -> None:
        self._final = None if directory is None else Path(directory)
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> _Output:
        if self._final is not None:
            self._final.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._final))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._final is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add_layers(self, chunk: LogChunk) -> None:
        """Append the layer executions of a chunk to decisions.parquet."""
        if self._final is None:
            return
        arrays: dict[str, pa.Array] = {name: pa.array(chunk.layers.scalars[name]) for name in LAYER_COLUMNS}
        for name in LAYER_LISTS:
            column = chunk.layers.lists[name]
            arrays[name] = pa.ListArray.from_arrays(pa.array(column.offsets, pa.int32()), pa.array(column.values))
        batch = pa.record_batch(arrays)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial / "decisions.parquet", batch.schema, compression="zstd")
        self._writer.write_batch(batch)

    def finish(self, result: Result, per_layer: bool) -> None:
        """Write the other files and move all of them to their place."""
        if self._final is None:
            return
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if per_layer:
            shutil.copyfile(self._partial / "decisions.parquet", self._partial / "result.parquet")
        else:
            result.forwards.write_parquet(self._partial / "result.parquet")
        for name, values in (("manifest.json", result.manifest), ("summary.json", result.summary)):
            (self._partial / name).write_text(json.dumps(values, indent=2) + "\n")
        # the summary moves last: a directory that holds one holds the rest
        for name in ("decisions.parquet", "result.parquet", "manifest.json", "summary.json"):
            (self._partial / name).replace(self._final / name)
