"""Measures experts on the CPU: how fast memory can be read, batches by size, and what copies and batches cost each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch

from policies.profile import ProfileError
from replay.calibrate_link import HostPool, Link
from replay.cpu_experts import KERNELS, Batch, CpuExperts
from replay.cpu_kernel import most_threads, sum_words, use_threads
from replay.fits import Fit, fit
from replay.repeats import Repeated, repeated_by_size


class CpuRate(NamedTuple):
    """A batch of experts on the CPU as a + sum over experts of (b0 + b1 * load)."""

    kernel: str
    num_workers: int
    a_ns: float
    b0_ns: float
    b1_ns: float
    mean_error: float
    max_error: float
    times: dict[tuple[int, int], Repeated]  # by number of experts and rows of each
    by_kernel: dict[str, float]  # bytes of weights a second, geometric mean over all sizes
    by_workers: dict[int, float]  # the same of the chosen kernel, at some numbers of workers


class Slowdowns(NamedTuple):
    """How much longer copies and CPU batches take while both run."""

    h2d: float
    cpu: float


def read_bytes_per_s(pool: HostPool, repeats: int) -> float:
    """Bytes a second that all cores together read from memory, the best of some repeats."""
    words = pool.memory.view(torch.int64).numpy()
    threads = most_threads()
    use_threads(threads)
    parts = 8 * threads
    sum_words(words[:parts], parts)  # compiled
    times = []
    for _ in range(repeats):
        start = perf_counter_ns()
        sum_words(words, parts)
        times.append(perf_counter_ns() - start)
    return words.nbytes * 1e9 / min(times)


class CpuBatches:
    """Batches of one shape with weights that no cache holds."""

    def __init__(self, hidden: int, intermediate: int, pool: HostPool) -> None:
        self.hidden, self.intermediate = hidden, intermediate
        self.expert_bytes = 6 * hidden * intermediate
        self.pool = pool

    def batch(self, num_experts: int, load: int) -> Batch:
        """So many experts with so many rows each."""
        num_rows = num_experts * load
        return Batch(
            [self.pool.take(self.expert_bytes) for _ in range(num_experts)],
            np.arange(1, num_experts + 1) * load,
            np.arange(num_rows) % load,
            torch.randn(load, self.hidden).to(torch.bfloat16),
            torch.empty(num_rows, self.hidden, dtype=torch.bfloat16),
        )

    def time_ns(self, cpu: CpuExperts, num_experts: int, load: int) -> int:
        """From the start of a batch until its results are there, as the thread that waits sees it."""
        batch = self.batch(num_experts, load)
        start = perf_counter_ns()
        cpu.start(batch)
        cpu.wait()
        return perf_counter_ns() - start

    def grid(self, cpu: CpuExperts, sizes: Sequence[tuple[int, int]], repeats: int) -> dict[tuple[int, int], Repeated]:
        """Times of batches by number of experts and load."""
        return repeated_by_size(lambda size: self.time_ns(cpu, *size), sizes, repeats)

    def rate(self, times: dict[tuple[int, int], Repeated]) -> float:
        """Bytes of weights a second, geometric mean over sizes."""
        rates = [num * self.expert_bytes * 1e9 / time.median_ns for (num, _), time in times.items()]
        return float(np.exp(np.mean(np.log(rates))))


def measure_cpu(
    batches: CpuBatches, num_workers: int, numbers: Sequence[int], loads: Sequence[int], repeats: int
) -> CpuRate:
    """Batches by number of experts and load, with the kernel that is faster over all of them.

    Raises:
        ProfileError: no kernel takes this shape.
    """
    sizes = list(product(numbers, loads))
    few = [(numbers[len(numbers) // 2], load) for load in (loads[0], loads[len(loads) // 2])]
    found = {}
    for kernel in KERNELS:
        try:
            with _experts(batches, num_workers, kernel) as cpu:
                found[kernel] = batches.grid(cpu, sizes, repeats)
        except ProfileError:
            if kernel == KERNELS[-1]:
                raise
    rates = {kernel: batches.rate(times) for kernel, times in found.items()}
    best = max(rates, key=rates.__getitem__)
    by_workers = {}
    for workers in sorted({max(1, num_workers // 4), max(1, num_workers // 2), num_workers}):
        with _experts(batches, workers, best) as cpu:
            by_workers[workers] = batches.rate(batches.grid(cpu, few, repeats))
    result = fit_batches(found[best])
    a_ns, b0_ns, b1_ns = (float(value) for value in result.coefficients)
    return CpuRate(
        best, num_workers, a_ns, b0_ns, b1_ns, result.mean_error, result.max_error, found[best], rates, by_workers
    )


def fit_batches(times: dict[tuple[int, int], Repeated]) -> Fit:
    """a, b0 and b1 through the times of batches by number of experts and load."""
    experts = np.array([num for num, _ in times])
    rows = np.array([num * load for num, load in times])
    return fit([1, experts, rows], [time.median_ns for time in times.values()])


def measure_slowdowns(
    batches: CpuBatches,
    link: Link,
    rate: CpuRate,
    copy_ns: float,
    *,
    num_experts: int,
    load: int,
    repeats: int,
) -> Slowdowns:
    """What copies and batches cost each other, a core being left for the thread that issues copies.

    Copies are compared with `copy_ns` while a batch runs all the time, and batches with themselves alone while copies
    run all the time.
    """
    alone, beside, slowed = [], [], []
    with _experts(batches, rate.num_workers, rate.kernel) as cpu:
        for _ in range(repeats + 1):
            alone.append(batches.time_ns(cpu, num_experts, load))
            count = max(4, int(0.7 * alone[-1] / copy_ns))  # most of them begin and end within the batch
            cpu.start(batches.batch(num_experts, load))
            slowed += link.copies_ns([batches.pool.take(batches.expert_bytes) for _ in range(count)])
            cpu.wait()
            sources = [batches.pool.take(batches.expert_bytes) for _ in range(2 * count)]
            batch, ended = batches.batch(num_experts, load), []
            start = perf_counter_ns()
            cpu.start(batch)
            link.copies_ns(sources, meanwhile=lambda ended=ended: ended.append(cpu.wait().end_ns))
            beside.append(ended[0] - start)
    return Slowdowns(float(np.median(slowed) / copy_ns), float(np.median(beside[1:]) / np.median(alone[1:])))


def _experts(batches: CpuBatches, num_workers: int, kernel: str) -> CpuExperts:
    return CpuExperts(batches.hidden, batches.intermediate, num_workers=num_workers, kernel=kernel)
