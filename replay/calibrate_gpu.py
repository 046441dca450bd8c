"""Measures what the GPU does in a layer: the part without routed experts, the grouped expert kernel, and the gate's ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np
import torch

from replay.fits import fit
from replay.repeats import Repeated, repeated, repeated_by_size

Work = Callable[[], None]  # put on the GPU's current stream, or done at once where there is none


class Parts(Protocol):
    """The parts of a forward as the executor runs them, at one shape, each ready to be run again and again."""

    def layer(self, num_tokens: int, kv_len: int) -> Work:
        """Attention to kv_len committed positions and the tokens themselves, gate and shared expert."""
        ...

    def kernel(self, num_experts: int, num_rows: int) -> Work:
        """The grouped kernel over experts that share so many rows, other experts at every run."""
        ...

    def tail(self, num_tokens: int) -> Work:
        """What runs once a forward: embedding, dense layers, head and the choice of tokens."""
        ...

    def read_gate(self, num_tokens: int) -> Work:
        """Bring a layer's ids, and what the CPU computes with, to the host, and wait for them."""
        ...

    def return_rows(self, num_rows: int) -> Work:
        """Take rows that the CPU computed to the GPU and put them in their places."""
        ...


class GpuRate(NamedTuple):
    """A cost as a sum of a constant and two rates, and how well that fits."""

    coefficients_ns: tuple[float, float, float]
    mean_error: float
    max_error: float
    times: dict[tuple[int, int], Repeated]


class Clock:
    """Times work on a device: by its own clock while it is never idle, by the host's where a wait belongs to the work."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def device_ns(self, run: Work, count: int) -> float:
        """Mean time of one of `count` runs in a row."""
        if not self._is_cuda:
            return self.host_ns(run, count)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()  # the device is busy when the clock starts
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e6 / count

    def host_ns(self, run: Work, count: int) -> float:
        """Mean time of a run until it is done, as the host sees it."""
        total = 0
        for _ in range(count):
            self._wait()
            start = perf_counter_ns()
            run()
            self._wait()
            total += perf_counter_ns() - start
        return total / count

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def measure_layer(
    clock: Clock, parts: Parts, tokens: Sequence[int], kv_lens: Sequence[int], repeats: int, count: int
) -> GpuRate:
    """The part of a layer without routed experts: a + b * tokens + c * committed positions."""
    sizes = list(product(tokens, kv_lens))
    return _rate(clock, {size: parts.layer(*size) for size in sizes}, sizes, repeats, count)


def measure_kernel(
    clock: Clock, parts: Parts, numbers: Sequence[int], loads: Sequence[int], repeats: int, count: int
) -> GpuRate:
    """The grouped kernel: a + b * experts + c * rows."""
    sizes = [(num, num * load) for num, load in product(numbers, loads)]
    return _rate(clock, {size: parts.kernel(*size) for size in sizes}, sizes, repeats, count)


def _rate(
    clock: Clock, runs: dict[tuple[int, int], Work], sizes: list[tuple[int, int]], repeats: int, count: int
) -> GpuRate:
    times = repeated_by_size(lambda size: clock.device_ns(runs[size], count), sizes, repeats)
    first, second = (np.array(column) for column in zip(*sizes, strict=True))
    found = fit([1, first, second], [times[size].median_ns for size in sizes])
    a_ns, b_ns, c_ns = (float(value) for value in found.coefficients)
    return GpuRate((a_ns, b_ns, c_ns), found.mean_error, found.max_error, times)


def measure_tail(clock: Clock, parts: Parts, num_tokens: int, repeats: int, count: int) -> Repeated:
    """What a forward takes beside its MoE layers."""
    run = parts.tail(num_tokens)
    return repeated(lambda: clock.device_ns(run, count), repeats)


def measure_gate_sync(clock: Clock, parts: Parts, num_tokens: int, kv_len: int, repeats: int, count: int) -> Repeated:
    """How much later than the end of a layer's first part the host has its ids, and the GPU its next work.

    Measured as what reading the ids adds to the time of that part, once it runs by itself: the way to the host, the
    wait, and the launch of what follows.
    """
    layer, read = parts.layer(num_tokens, kv_len), parts.read_gate(num_tokens)

    def both() -> None:
        layer()
        read()

    def added_ns() -> float:
        alone = clock.device_ns(layer, count)
        return max(1.0, clock.host_ns(both, count) - alone)

    return repeated(added_ns, repeats)


def measure_roundtrip(clock: Clock, parts: Parts, num_rows: int, repeats: int, count: int) -> Repeated:
    """From the end of a CPU batch until its rows are in their places on the GPU."""
    run = parts.return_rows(num_rows)
    return repeated(lambda: clock.host_ns(run, count), repeats)
