"""Measures what a machine costs, for a hardware profile: copies, a layer's parts on the GPU, and experts on the CPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from replay.calibrate_cpu import (
    CpuBatches,
    CpuRate,
    Slowdowns,
    measure_cpu,
    measure_slowdowns,
    read_bytes_per_s,
)
from replay.calibrate_gpu import (
    Clock,
    GpuRate,
    Parts,
    measure_gate_sync,
    measure_kernel,
    measure_layer,
    measure_roundtrip,
    measure_tail,
)
from replay.calibrate_link import MIB, CopyRate, HostPool, Link, measure_copies
from replay.cpu_experts import check_workers, default_workers, instructions
from replay.link_state import LinkState, check_link, read_link
from replay.repeats import Repeated, repeated
from tracer.schema import ModelShape


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often."""

    repeats: int = 7
    cpu_repeats: int = 11  # of batches on the CPU, which other work on the machine disturbs more
    count: int = 20  # runs or copies in a row, of which the mean is one repeat
    pool_bytes: int = 4096 * MIB
    copy_bytes: tuple[int, ...] = tuple(int(mib * MIB) for mib in (0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48))
    tokens: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    kv_lens: tuple[int, ...] = (0, 128, 512, 1024, 2048)
    kernel_experts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    kernel_loads: tuple[int, ...] = (1, 2, 4, 8)
    cpu_experts: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    cpu_loads: tuple[int, ...] = (1, 2, 4, 8, 16)
    block: int = 16  # tokens of a forward, where only one number is measured
    num_workers: int = field(default_factory=default_workers)


QUICK = Settings(
    repeats=2,
    cpu_repeats=2,
    count=2,
    pool_bytes=64 * MIB,
    copy_bytes=(MIB // 4, 2 * MIB, 16 * MIB),
    tokens=(4, 8),
    kv_lens=(0, 64),
    kernel_experts=(1, 2, 4),
    kernel_loads=(1, 2),
    cpu_experts=(1, 2, 4),
    cpu_loads=(1, 2),
    block=4,
    num_workers=1,
)


class ShapeMeasured(NamedTuple):
    """What was measured at one shape."""

    shape: ModelShape
    layer: GpuRate
    kernel: GpuRate
    tail: Repeated
    gate_sync: Repeated
    roundtrip: Repeated
    cpu: CpuRate
    slowdowns: Slowdowns


class Measured(NamedTuple):
    """Everything that was measured on one machine."""

    machine: str
    link: LinkState | None
    read_bytes_per_s: float
    pinned: CopyRate
    pageable: CopyRate
    gpu_flops_per_s: float
    shapes: tuple[ShapeMeasured, ...]


def calibrate(
    shapes: Sequence[ModelShape],
    device: torch.device,
    parts_of: Callable[[ModelShape, torch.device], Parts],
    settings: Settings,
    say: Callable[[str], None],
    *,
    allow_slow_link: bool = False,
) -> Measured:
    """Measure a machine at some shapes.

    Args:
        shapes: of bfloat16 models, for which everything but copies is measured.
        device: a CUDA device, or `cpu`, where memory is copied to memory.
        parts_of: the parts of a forward on a device.
        settings: what is measured, and how often.
        say: told what comes next and what was found, a line each.
        allow_slow_link: measure over a link that runs below what card and slot allow.

    Raises:
        ProfileError: memory is short on host or device, the link changed meanwhile or has trained down, or a shape
            is not known in full.
    """
    is_cuda = device.type == "cuda"
    check_workers(settings.num_workers)
    largest = max(settings.copy_bytes)
    pool_bytes = max(settings.pool_bytes, 4 * largest, *(16 * shape.expert_bytes("bfloat16") for shape in shapes))
    say(f"host memory: {pool_bytes / MIB:.0f} MiB{', pinned' if is_cuda else ''}")
    pool = HostPool(pool_bytes, pinned=is_cuda)
    reading = read_bytes_per_s(pool, settings.repeats)
    say(f"reading host memory with all cores: {reading / 1e9:.1f} GB/s; CPU: {instructions()}")
    link = Link(device, max(largest, *(shape.expert_bytes("bfloat16") for shape in shapes)), 8)
    before = _busy_link(link, pool, device)
    pinned = measure_copies(link, pool, settings.copy_bytes, settings.repeats, settings.count)
    say(f"copies: {pinned.latency_ns:.0f} ns + bytes at {pinned.bytes_per_s / 1e9:.1f} GB/s, {errors_of(pinned)}")
    pageable = measure_copies(
        link, HostPool(8 * largest, pinned=False), settings.copy_bytes, settings.repeats, max(2, settings.count // 4)
    )
    say(
        f"pageable: {pageable.latency_ns:.0f} ns + bytes at {pageable.bytes_per_s / 1e9:.1f} GB/s, {errors_of(pageable)}"
    )
    found = tuple(_at_shape(shape, device, parts_of, pool, link, pinned, settings, say) for shape in shapes)
    after = _busy_link(link, pool, device)
    if is_cuda:
        check_link(before, after, allow_slow=allow_slow_link)
    return Measured(
        machine=machine_of(device, after),
        link=after,
        read_bytes_per_s=reading,
        pinned=pinned,
        pageable=pageable,
        gpu_flops_per_s=_flops_per_s(device, settings),
        shapes=found,
    )


def _at_shape(
    shape: ModelShape,
    device: torch.device,
    parts_of: Callable[[ModelShape, torch.device], Parts],
    pool: HostPool,
    link: Link,
    pinned: CopyRate,
    settings: Settings,
    say: Callable[[str], None],
) -> ShapeMeasured:
    repeats, count = settings.repeats, settings.count
    name = f"{shape.hidden}x{shape.expert_intermediate}"
    parts, clock = parts_of(shape, device), Clock(device)
    with torch.inference_mode():
        layer = measure_layer(clock, parts, settings.tokens, settings.kv_lens, repeats, count)
        say(f"{name} layer without routed experts: {_sum_of(layer, 'tokens', 'positions')}")
        kernel = measure_kernel(clock, parts, settings.kernel_experts, settings.kernel_loads, repeats, count)
        say(f"{name} grouped kernel: {_sum_of(kernel, 'experts', 'rows')}")
        tail = measure_tail(clock, parts, settings.block, repeats, count)
        gate_sync = measure_gate_sync(clock, parts, settings.block, settings.kv_lens[0], repeats, count)
        roundtrip = measure_roundtrip(clock, parts, settings.block, repeats, count)
    del parts
    say(f"{name} tail {in_us(tail)}, reading ids {in_us(gate_sync)}, rows back {in_us(roundtrip)}")
    batches = CpuBatches(shape.hidden, shape.expert_intermediate, pool)
    cpu = measure_cpu(batches, settings.num_workers, settings.cpu_experts, settings.cpu_loads, settings.cpu_repeats)
    say(
        f"{name} CPU batch: {cpu.a_ns:.0f} + {cpu.b0_ns:.0f} experts + {cpu.b1_ns:.0f} rows ns, {errors_of(cpu)}; kernel "
        + ", ".join(f"{kernel} {rate / 1e9:.1f} GB/s" for kernel, rate in cpu.by_kernel.items())
    )
    copy_ns = pinned.latency_ns + batches.expert_bytes * 1e9 / pinned.bytes_per_s
    slowdowns = measure_slowdowns(
        batches, link, cpu, copy_ns, num_experts=max(settings.cpu_experts), load=2, repeats=settings.cpu_repeats
    )
    say(f"{name} while both run: copies take {slowdowns.h2d:.2f}, CPU batches {slowdowns.cpu:.2f} times as long")
    return ShapeMeasured(shape, layer, kernel, tail, gate_sync, roundtrip, cpu, slowdowns)


def _busy_link(link: Link, pool: HostPool, device: torch.device) -> LinkState | None:
    if device.type != "cuda":
        return None
    state: list[LinkState | None] = []
    sources = [pool.take(link.slot_bytes) for _ in range(200)]
    link.copies_ns(sources, meanwhile=lambda: state.append(read_link(device)))
    return state[0]


def _flops_per_s(device: torch.device, settings: Settings) -> float:
    """Rate of a large matrix product in bfloat16."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    clock = Clock(device)

    def run() -> None:
        torch.mm(left, right)

    return 2e9 * size**3 / repeated(lambda: clock.device_ns(run, settings.count), settings.repeats).median_ns


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


def _sum_of(rate: GpuRate, first: str, second: str) -> str:
    a_ns, b_ns, c_ns = rate.coefficients_ns
    return f"{a_ns:.0f} + {b_ns:.1f} {first} + {c_ns:.2f} {second} ns, {errors_of(rate)}"


def errors_of(rate: GpuRate | CopyRate | CpuRate) -> str:
    """How far a fit is off what it was fitted to, in words."""
    return f"off by {rate.mean_error:.1%} on average, {rate.max_error:.1%} at most"


def in_us(time: Repeated) -> str:
    """Median and spread, in words."""
    return f"{time.median_ns / 1000:.1f} us ({time.spread:.0%})"
