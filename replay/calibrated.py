"""A hardware profile of what was measured, and notes to keep beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from policies.profile import NON_EXPERT_BYTES, HardwareProfile, Roofline, ShapeCosts, layer_weights
from replay.arena import MIB
from replay.calibrate import Measured, ShapeMeasured, in_us
from replay.calibrate_costs import LayerCosts
from replay.calibrate_layers import TRANSFER_CHUNK
from replay.calibrate_plans import Design
from replay.repeats import Repeated

_UNSEEN_FLOPS_PER_S = 1e15  # where more rows of an expert took the CPU no longer


def profile_of(
    measured: Measured, name: str, date: str, policy_ns: Mapping[str, float], policy_spread: float | None = None
) -> HardwareProfile:
    """The hardware profile of what was measured.

    Costs that a profile has once, for all shapes, are the mean over shapes; slowdowns below 1 are noise, and are 1.

    Args:
        measured: on the machine.
        name: of the profile.
        date: of the measurement.
        policy_ns: time of a decision by policy, with a `default` for the rest.
        policy_spread: of these times over repeats, as a share; None where there are none.
    """
    shapes = measured.shapes
    costs = [found.layers.costs for found in shapes]
    errors = {"h2d_mean": measured.demand.mean_error, "h2d_max": measured.demand.max_error}
    if policy_spread is not None:
        errors["policy_ns_spread"] = policy_spread
    for i, found in enumerate(shapes):
        cost = found.layers.costs
        for key, rate in (("n_ns", found.layers.layer), ("g_ns", cost.kernel), ("cpu", cost.cpu), ("layer", cost)):
            errors[f"shapes[{i}].{key}_mean"], errors[f"shapes[{i}].{key}_max"] = rate.mean_error, rate.max_error
        errors[f"shapes[{i}].tail_ns_spread"] = cost.tail.spread
    profile = HardwareProfile(
        name=name,
        provenance="measured",
        machine=measured.machine,
        date=date,
        h2d_latency_ns=round(measured.demand.latency_ns),
        h2d_bytes_per_s=_significant(measured.demand.bytes_per_s),
        h2d_pageable_bytes_per_s=_significant(measured.pageable.bytes_per_s),
        cpu_workers=shapes[0].cpu.num_workers,
        cpu_kernel=shapes[0].cpu.kernel,
        gate_sync_ns=round(fmean(cost.gate_sync_ns for cost in costs)),
        cpu_roundtrip_ns=round(fmean(cost.roundtrip_ns for cost in costs)),
        policy_ns={policy: round(time_ns) for policy, time_ns in policy_ns.items()},
        h2d_slowdown=round(max(1.0, fmean(cost.slowdowns.h2d for cost in costs)), 3),
        cpu_slowdown=round(max(1.0, fmean(cost.slowdowns.cpu for cost in costs)), 3),
        transfer_chunk=TRANSFER_CHUNK,
        shapes=tuple(_shape_costs(found) for found in shapes),
        assumed=("roofline.kernels_per_layer", "roofline.kernels_per_tail", *(() if policy_ns else ("policy_ns",))),
        fit_errors={key: round(error, 4) for key, error in errors.items()},
    )
    return replace(profile, roofline=_roofline(measured, profile.shapes))


def _shape_costs(found: ShapeMeasured) -> ShapeCosts:
    costs = found.layers.costs
    a_ns, b_ns, c_ns = (round(value, 2) for value in found.layers.layer.coefficients_ns)
    start_ns, expert_ns, row_ns = (round(value, 2) for value in costs.kernel.coefficients_ns)
    cpu_a_ns, cpu_b0_ns, cpu_b1_ns = (round(value) for value in costs.cpu.coefficients_ns)
    return ShapeCosts(
        hidden=found.shape.hidden,
        expert_intermediate=found.shape.expert_intermediate,
        expert_bytes=found.shape.expert_bytes("bfloat16"),
        n_ns=(a_ns, b_ns, c_ns),
        g_ns=(start_ns, expert_ns, row_ns),
        cpu_a_ns=cpu_a_ns,
        cpu_b0_ns=cpu_b0_ns,
        cpu_b1_ns=cpu_b1_ns,
        tail_ns=round(costs.tail.mean_ns),
    )


def _roofline(measured: Measured, costs: Sequence[ShapeCosts]) -> Roofline | None:
    """Rates for shapes that were not measured, from the largest one that was.

    What a layer takes beyond reading its weights is spread over its kernels. None where an expert more took no more time.
    """
    found, cost = max(zip(measured.shapes, costs, strict=True), key=lambda pair: pair[1].expert_bytes)
    expert_ns = found.layers.costs.hits.coefficients_ns[1]  # of the kernel alone; g_ns stands for chunks and hits both
    if not (expert_ns and cost.cpu_b0_ns):  # nothing follows from what is lost in noise
        return None
    gpu_bytes_per_s = cost.expert_bytes * 1e9 / expert_ns
    reading_ns = layer_weights(found.shape) * NON_EXPERT_BYTES * 1e9 / gpu_bytes_per_s
    # two operations for each weight of two bytes, at the shape where they show most
    arithmetic = [each.cpu_b1_ns / each.expert_bytes for each in costs if each.cpu_b1_ns]
    return Roofline(
        gpu_bytes_per_s=_significant(gpu_bytes_per_s),
        gpu_flops_per_s=_significant(measured.gpu_flops_per_s),
        cpu_bytes_per_s=_significant(cost.expert_bytes * 1e9 / cost.cpu_b0_ns),
        cpu_flops_per_s=_significant(1e9 / max(arithmetic)) if arithmetic else _UNSEEN_FLOPS_PER_S,
        kernel_ns=round(max(0.0, cost.n_ns[0] - reading_ns) / Roofline.kernels_per_layer),
        cpu_start_ns=cost.cpu_a_ns,
    )


def _significant(value: float) -> float:
    """Four digits, which is more than repeats agree on."""
    return float(f"{value:.4g}")


def notes_of(measured: Measured) -> list[str]:
    """What was measured, in lines to stand beside the profile."""
    lines = [
        f"Host memory is read at {measured.read_bytes_per_s / 1e9:.1f} GB/s by all cores. "
        f"Link while busy: {measured.link or 'no PCIe link'}.",
        "Plain copies, us by MiB (spread between quartiles):",
        *_table({f"{size / MIB:g}": time for size, time in measured.pinned.times.items()}),
        "Pageable:",
        *_table({f"{size / MIB:g}": time for size, time in measured.pageable.times.items()}),
        "Copies of plans in the executor, which h2d_latency_ns and h2d_bytes_per_s are of:",
        *_table({f"{size / MIB:g}": time for size, time in measured.demand.times.items()}),
        *(
            f"{size / MIB:g} MiB: {measured.pinned.copy_ns(size) / time.mean_ns:.1%} of the rate of plain copies."
            for size, time in measured.demand.times.items()
        ),
    ]
    for found in measured.shapes:
        lines += _shape_notes(found, measured.read_bytes_per_s)
    return lines


def _shape_notes(found: ShapeMeasured, read_bytes_per_s: float) -> list[str]:
    layers, cpu, costs = found.layers, found.cpu, found.layers.costs
    return [
        f"{found.shape.hidden}x{found.shape.expert_intermediate}, layer without routed experts, us by tokens+committed positions:",
        *_table({f"{tokens}+{kv}": time for (tokens, kv), time in layers.layer.times.items()}),
        "Grouped kernel in the executor with what the layer's end takes, us by experts:rows:",
        *_table({f"{num}:{rows}": time for (num, rows), time in costs.kernel.times.items()}),
        "Kernel over hits alone, with its launch:",
        *_table({f"{num}:{rows}": time for (num, rows), time in costs.hits.times.items()}),
        f"CPU experts ({cpu.kernel}, {cpu.num_workers} workers) in the executor, us by experts:rows:",
        *_table({f"{num}:{rows}": time for (num, rows), time in costs.cpu.times.items()}),
        "By themselves, GB/s of weights by kernel: "
        + ", ".join(f"{kernel} {rate / 1e9:.1f}" for kernel, rate in cpu.by_kernel.items())
        + "; by workers: "
        + ", ".join(f"{workers} {rate / 1e9:.1f}" for workers, rate in cpu.by_workers.items())
        + f"; the former {cpu.bytes_per_s / read_bytes_per_s:.0%} of what memory is read at.",
        f"From the layer's own part to the first copy {costs.gate_sync_ns / 1000:.1f} us without decision, of which "
        f"{costs.first_copy_ns / 1000:.1f} after the plan.",
        f"From the CPU's results to the layer's end {costs.roundtrip_ns / 1000:.1f} us, of which {costs.after_cpu_ns / 1000:.1f} "
        "are the next layer's later launch.",
        f"Tail {in_us(costs.tail)}. While both run copies take {costs.slowdowns.h2d:.2f} and CPU batches "
        f"{costs.slowdowns.cpu:.2f} times as long.",
        f"{len(costs.errors)} designs of layers by these costs: off by {costs.mean_error:.1%} on average, {costs.max_error:.1%} "
        "at most. Mean error:",
        "  " + ", ".join(f"{kind} {fmean(errors):+.1%}" for kind, errors in _by_kind(costs).items()),
        "Each, by tokens:hits:copies:CPU experts x rows of each:",
        *_lines(f"{_short(design)} {error:+.1%}" for design, error in sorted(costs.errors.items())),
    ]


def _short(design: Design) -> str:
    counts = f"{design.num_tokens}:{design.num_hits}:{design.num_transfers}"
    return f"{counts}:{design.num_on_cpu}x{design.cpu_load}" if design.num_on_cpu else counts


def _by_kind(costs: LayerCosts) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = {}
    for design, error in sorted(costs.errors.items()):
        errors.setdefault(design.kind, []).append(error)
    return errors


def _table(times: Mapping[str, Repeated]) -> list[str]:
    """Times with their spread."""
    return _lines(f"{name} {time.mean_ns / 1000:.1f} ({time.spread:.0%})" for name, time in times.items())


def _lines(cells: Iterable[str]) -> list[str]:
    """Cells in lines of at most 100 characters."""
    lines = [""]
    for cell in cells:
        if len(lines[-1]) + len(cell) > 98:
            lines.append("")
        lines[-1] += f"  {cell}"
    return lines
