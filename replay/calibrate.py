"""Measures what a machine costs, for a hardware profile: plain copies, and layers as the executor runs them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from replay.arena import MIB, Arena
from replay.calibrate_cpu import CpuBatches, CpuChoice, choose_kernel, read_bytes_per_s
from replay.calibrate_gpu import flops_per_s
from replay.calibrate_layers import Layers, choose_designs, measure_layers, residents_of
from replay.calibrate_link import CopyRate, HostPool, PlainCopies, demand_rate, measure_copies
from replay.calibrate_settings import Settings
from replay.cpu_experts import check_workers, instructions
from replay.device import Device
from replay.devices import open_device
from replay.fits import Rate
from replay.layer import config_of
from replay.link_state import LinkState, busy_link, check_link, check_unchanged
from replay.repeats import Repeated
from tracer.schema import ModelShape


class ShapeMeasured(NamedTuple):
    """What was measured at one shape."""

    shape: ModelShape
    cpu: CpuChoice
    layers: Layers


class Measured(NamedTuple):
    """Everything that was measured on one machine."""

    machine: str
    link: LinkState | None
    read_bytes_per_s: float
    pinned: CopyRate
    pageable: CopyRate
    demand: CopyRate  # copies in the executor's pipeline, at all shapes
    gpu_flops_per_s: float
    shapes: tuple[ShapeMeasured, ...]


def calibrate(
    shapes: Sequence[ModelShape],
    device_name: str,
    settings: Settings,
    say: Callable[[str], None],
    *,
    allow_slow_link: bool = False,
) -> Measured:
    """Measure a machine at some shapes.

    Args:
        shapes: of bfloat16 models, for which everything but plain copies is measured.
        device_name: of a CUDA device, or `cpu`, where memory is copied to memory.
        settings: what is measured, and how often.
        say: told what comes next and what was found, a line each.
        allow_slow_link: measure over a link that runs below what card and slot allow.

    Raises:
        ProfileError: memory is short on host or device, the link changed meanwhile or has trained down, or a shape
            is not known in full, or has too few experts.
    """
    check_workers(settings.num_workers)
    for shape in shapes:
        config_of(shape)
        choose_designs(settings, shape, residents_of(settings, shape), 1.0)
    with closing(open_device(device_name)) as device:
        return _calibrate(shapes, device, device_name, settings, say, allow_slow_link)


def _calibrate(
    shapes: Sequence[ModelShape],
    device: Device,
    device_name: str,
    settings: Settings,
    say: Callable[[str], None],
    allow_slow_link: bool,
) -> Measured:
    is_cuda = device.torch_device.type == "cuda"
    largest = max(settings.copy_bytes)
    pool_bytes = max(settings.pool_bytes, 4 * largest, *(16 * shape.expert_bytes("bfloat16") for shape in shapes))
    say(f"host memory: {pool_bytes / MIB:.0f} MiB{', pinned' if is_cuda else ''}")
    pool = HostPool(pool_bytes, pinned=is_cuda)
    reading = read_bytes_per_s(pool, settings.repeats)
    say(f"reading host memory with all cores: {reading / 1e9:.1f} GB/s; CPU: {instructions()}")
    copies = PlainCopies(device, largest, 8)
    before = busy_link(device, copies.slots[0], pool.take(largest))
    if not allow_slow_link:
        check_link(before, "--slow-link")  # before minutes are spent on it
    pinned = measure_copies(copies, pool, settings.copy_bytes, settings.repeats, settings.count)
    say(f"copies: {_rate_text(pinned)}")
    pageable_pool = HostPool(8 * largest, pinned=False)
    few = max(2, settings.count // 4)
    pageable = measure_copies(copies, pageable_pool, settings.copy_bytes, settings.repeats, few)
    say(f"pageable: {_rate_text(pageable)}")
    flops = flops_per_s(device, settings.repeats, settings.count)
    found = tuple(_at_shape(shape, device_name, pool, pinned, settings, say) for shape in shapes)
    after = busy_link(device, copies.slots[0], pool.take(largest))
    check_unchanged(before, after)
    demand = {size: time for each in found for size, time in each.layers.copies.items()}
    return Measured(
        machine=machine_of(device.torch_device, after),
        link=after,
        read_bytes_per_s=reading,
        pinned=pinned,
        pageable=pageable,
        demand=demand_rate(demand, pinned),
        gpu_flops_per_s=flops,
        shapes=found,
    )


def _at_shape(
    shape: ModelShape,
    device_name: str,
    pool: HostPool,
    pinned: CopyRate,
    settings: Settings,
    say: Callable[[str], None],
) -> ShapeMeasured:
    name = f"{shape.hidden}x{shape.expert_intermediate}"
    batches = CpuBatches(shape.hidden, shape.expert_intermediate, pool)
    numbers, loads = settings.cpu_experts[-3:], settings.cpu_loads[:2]
    cpu = choose_kernel(batches, settings.num_workers, numbers, loads, settings.repeats)
    rates = ", ".join(f"{kernel} {rate / 1e9:.1f} GB/s" for kernel, rate in cpu.by_kernel.items())
    say(f"{name} experts on the CPU by themselves: {rates}")
    expert_bytes = shape.expert_bytes("bfloat16")
    copies_per_expert = expert_bytes * 1e9 / cpu.bytes_per_s / pinned.copy_ns(expert_bytes)
    arena = small_arena(shape, settings.num_layers, shape.num_experts, settings.pool_bytes, device_name)
    layers = measure_layers(shape, device_name, arena, cpu, copies_per_expert, settings, say)
    costs = layers.costs
    say(f"{name} layer without routed experts: {sum_of(layers.layer, 'tokens', 'positions')}")
    say(f"{name} grouped kernel: {sum_of(costs.kernel, 'experts', 'rows')}")
    say(f"{name} CPU batch: {sum_of(costs.cpu, 'experts', 'rows')}")
    say(
        f"{name} copy {in_us(costs.copy)}, gate {costs.gate_sync_ns / 1000:.1f} us, CPU and back {costs.roundtrip_ns / 1000:.1f} us, "
        f"tail {in_us(costs.tail)}; while both run copies take {costs.slowdowns.h2d:.2f}, CPU batches "
        f"{costs.slowdowns.cpu:.2f} times as long"
    )
    say(
        f"{name} {len(costs.errors)} designs of layers by these costs: off by {costs.mean_error:.1%} on average, "
        f"{costs.max_error:.1%} at most"
    )
    return ShapeMeasured(shape, cpu, layers)


def small_arena(shape: ModelShape, num_layers: int, num_experts: int, pool_bytes: int, device_name: str) -> Arena:
    """Experts of this shape that share some memory, more than caches hold, with room for copies of twice their size."""
    expert_bytes = shape.expert_bytes("bfloat16")
    num_distinct = min(num_layers * num_experts, max(4, pool_bytes // expert_bytes - 1))
    is_cuda = torch.device(device_name).type == "cuda"
    arena = Arena(num_layers, num_experts, expert_bytes // 2, num_distinct=num_distinct, padding=1, pinned=is_cuda)
    arena.fill()
    return arena


def machine_of(device: torch.device, link: LinkState | None) -> str:
    """GPU, link, CPU, memory and versions, in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    gpu = "no GPU, memory copied to memory"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        gpu = f"{found.name} {found.total_memory / 2**30:.0f} GiB, {link or 'link not known'}"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{gpu}; {names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB "
        f"({instructions()}); torch {torch.__version__}"
    )


def sum_of(rate: Rate, first: str, second: str) -> str:
    """A cost as a sum, in words."""
    a_ns, b_ns, c_ns = rate.coefficients_ns
    return f"{a_ns:.0f} + {b_ns:.1f} {first} + {c_ns:.2f} {second} ns, {errors_of(rate)}"


def _rate_text(rate: CopyRate) -> str:
    return f"{rate.latency_ns:.0f} ns + bytes at {rate.bytes_per_s / 1e9:.1f} GB/s, {errors_of(rate)}"


def errors_of(rate: Rate | CopyRate) -> str:
    """How far a fit is off what it was fitted to, in words."""
    return f"off by {rate.mean_error:.1%} on average, {rate.max_error:.1%} at most"


def in_us(time: Repeated) -> str:
    """Mean and spread, in words."""
    return f"{time.mean_ns / 1000:.1f} us ({time.spread:.0%})"
