"""Measures copies from the host to the GPU: by size, and while experts run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from policies.profile import ProfileError
from replay.fits import fit
from replay.repeats import Repeated

MIB = 2**20


class CopyRate(NamedTuple):
    """One copy as latency and bandwidth, fitted over sizes."""

    latency_ns: float
    bytes_per_s: float
    mean_error: float
    max_error: float
    times: dict[int, Repeated]  # of one copy, by its bytes


class HostPool:
    """Host memory to copy from and to compute with, more than caches hold; a walk through it never finds it cached.

    Args:
        num_bytes: of the pool.
        pinned: whether the GPU can read it directly.

    Raises:
        ProfileError: there is not so much memory, or not so much may be pinned.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        try:
            self.memory = torch.empty(num_bytes // 2, dtype=torch.bfloat16, pin_memory=pinned)
        except RuntimeError as error:
            what = "pinned" if pinned else "allocated"
            raise ProfileError(
                f"{num_bytes / MIB:.0f} MiB of host memory could not be {what}: {str(error).splitlines()[0]}; "
                "give less with --pool-mib, or raise the limit (ulimit -l)"
            ) from None
        block = (torch.randn(4 * MIB, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
        for part in self.memory.split(len(block)):
            part.copy_(block[: len(part)])
        self._next = 0

    def take(self, num_bytes: int) -> Tensor:
        """The next piece of so many bytes, from the start again at the end."""
        size = num_bytes // 2
        if self._next + size > len(self.memory):
            self._next = 0
        first, self._next = self._next, self._next + size
        return self.memory[first : first + size]


class Link:
    """The way from host memory to the device: copies in a queue, each followed by its own event, as in a run.

    On a device without CUDA a copy is one from memory to memory, done when it is issued.
    """

    def __init__(self, device: torch.device, slot_bytes: int, num_slots: int) -> None:
        self.is_cuda = device.type == "cuda"
        self.slot_bytes = slot_bytes
        needed = slot_bytes * num_slots
        if self.is_cuda and needed > (free := torch.cuda.mem_get_info(device)[0]):
            raise ProfileError(f"{device}: {needed / MIB:.0f} MiB are needed, {free / MIB:.0f} MiB are free")
        self._slots = torch.zeros(num_slots, slot_bytes // 2, dtype=torch.bfloat16, device=device)
        self._stream = torch.cuda.Stream(device) if self.is_cuda else None

    def copies_ns(self, sources: Sequence[Tensor], meanwhile: Callable[[], None] | None = None) -> list[float]:
        """Time of each of some copies, issued in a row; `meanwhile` is called when all are issued.

        The first copy is not counted: it is there to keep the link busy while the others are issued.
        """
        if self._stream is None:
            times = [perf_counter_ns()]
            for i, source in enumerate(sources):
                self._slots[i % len(self._slots), : len(source)].copy_(source)
                times.append(perf_counter_ns())
            if meanwhile is not None:
                meanwhile()
            return [float(after - before) for before, after in zip(times[1:], times[2:], strict=False)]
        events = [torch.cuda.Event(enable_timing=True) for _ in sources]
        with torch.cuda.stream(self._stream):
            for i, (source, event) in enumerate(zip(sources, events, strict=True)):
                self._slots[i % len(self._slots), : len(source)].copy_(source, non_blocking=True)
                event.record(self._stream)
        if meanwhile is not None:
            meanwhile()
        self._stream.synchronize()
        return [before.elapsed_time(after) * 1e6 for before, after in zip(events, events[1:], strict=False)]


def measure_copies(link: Link, pool: HostPool, sizes: Sequence[int], repeats: int, num_copies: int) -> CopyRate:
    """One copy's time by its size, and the latency and bandwidth through it.

    Repeats go on, up to four times as many, while other work on the machine hides that larger copies take longer.

    Raises:
        ProfileError: they do not.
    """
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(4 * repeats + 1):
        for size in sizes if repeat % 2 else reversed(sizes):
            sources = [pool.take(link.slot_bytes), *(pool.take(size) for _ in range(num_copies))]
            mean_ns = float(np.mean(link.copies_ns(sources)))
            if repeat:  # the first one warms up
                samples[size].append(mean_ns)
        if repeat == 0 or repeat % repeats:
            continue
        times = {size: Repeated.of(found) for size, found in samples.items()}
        found = fit([1, list(sizes)], [times[size].median_ns for size in sizes])
        latency_ns, byte_ns = found.coefficients
        if byte_ns > 0:
            return CopyRate(float(latency_ns), 1e9 / float(byte_ns), found.mean_error, found.max_error, times)
    found_us = ", ".join(
        f"{size / MIB:g} MiB in {np.median(of_size) / 1000:.0f} us" for size, of_size in samples.items()
    )
    raise ProfileError(f"larger copies take no longer, so no bandwidth can be told: {found_us}; is the machine busy?")
