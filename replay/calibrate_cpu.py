"""Measures the CPU by itself: how fast memory can be read, and with which kernel and workers experts run fastest."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch

from policies.profile import ProfileError
from replay.calibrate_link import HostPool
from replay.cpu_experts import KERNELS, Batch, CpuExperts
from replay.cpu_kernel import most_threads, sum_words, use_threads
from replay.repeats import Repeated, repeated_by_size


class CpuChoice(NamedTuple):
    """The kernel that runs experts fastest, and how fast, in bytes of weights a second, geometric mean over sizes."""

    kernel: str
    num_workers: int
    by_kernel: dict[str, float]
    by_workers: dict[int, float]  # of the chosen kernel

    @property
    def bytes_per_s(self) -> float:
        """Of the kernel and workers that were chosen."""
        return self.by_kernel[self.kernel]


def read_bytes_per_s(pool: HostPool, repeats: int) -> float:
    """Bytes a second that all cores together read from memory, the best of some repeats."""
    with ThreadPoolExecutor(1) as thread:  # the number of threads that it uses would stay with the calling one
        return thread.submit(_read, pool, repeats).result()


def _read(pool: HostPool, repeats: int) -> float:
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

    def grid(
        self, kernel: str, num_workers: int, sizes: Sequence[tuple[int, int]], repeats: int
    ) -> dict[tuple[int, int], Repeated]:
        """Times of batches by number of experts and load."""
        with CpuExperts(self.hidden, self.intermediate, num_workers=num_workers, kernel=kernel) as cpu:
            return repeated_by_size(lambda size: self.time_ns(cpu, *size), sizes, repeats)

    def rate(self, times: dict[tuple[int, int], Repeated]) -> float:
        """Bytes of weights a second, geometric mean over sizes."""
        rates = [num * self.expert_bytes * 1e9 / time.median_ns for (num, _), time in times.items()]
        return float(np.exp(np.mean(np.log(rates))))


def choose_kernel(
    batches: CpuBatches, num_workers: int, numbers: Sequence[int], loads: Sequence[int], repeats: int
) -> CpuChoice:
    """Try each kernel by number of experts and load, and the faster one with fewer workers too.

    Raises:
        ProfileError: no kernel takes this shape.
    """
    sizes = list(product(numbers, loads))
    few = [(numbers[len(numbers) // 2], load) for load in loads]
    rates = {}
    for kernel in KERNELS:
        try:
            rates[kernel] = batches.rate(batches.grid(kernel, num_workers, sizes, repeats))
        except ProfileError:
            if kernel == KERNELS[-1] and not rates:
                raise
    best = max(rates, key=rates.__getitem__)
    by_workers = {
        workers: batches.rate(batches.grid(best, workers, few, repeats))
        for workers in sorted({max(1, num_workers // 4), max(1, num_workers // 2), num_workers})
    }
    return CpuChoice(best, num_workers, rates, by_workers)
