"""Measures plain copies from the host to the GPU by size, as the executor issues them and with nothing beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from policies.profile import ProfileError
from replay.arena import MIB
from replay.device import Device
from replay.fits import fit
from replay.repeats import Repeated
from tracer.memory import free_bytes


class CopyRate(NamedTuple):
    """One copy as latency and bandwidth, fitted over sizes."""

    latency_ns: float
    bytes_per_s: float
    mean_error: float
    max_error: float
    times: dict[int, Repeated]  # of one copy, by its bytes

    def copy_ns(self, num_bytes: int) -> float:
        """Time of one copy."""
        return self.latency_ns + num_bytes * 1e9 / self.bytes_per_s


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


class PlainCopies:
    """Copies from host memory in a row, each followed by its own event, as in a run.

    Raises:
        ProfileError: the device has too little memory.
    """

    def __init__(self, device: Device, slot_bytes: int, num_slots: int) -> None:
        self._device, self.slot_bytes = device, slot_bytes
        where, needed = device.torch_device, slot_bytes * num_slots
        if needed > (free := free_bytes(where)):
            raise ProfileError(f"{where}: {needed / MIB:.0f} MiB are needed, {free / MIB:.0f} MiB are free")
        self.slots = torch.zeros(num_slots, slot_bytes // 2, dtype=torch.bfloat16, device=where)
        device.synchronize()

    def times_ns(self, sources: Sequence[Tensor]) -> list[float]:
        """Time of each copy in a row but the first, which keeps the link busy while the others are issued."""
        device = self._device
        events = [device.event() for _ in sources]
        with device.copying():
            for i, (source, event) in enumerate(zip(sources, events, strict=True)):
                device.copy(self.slots[i % len(self.slots), : len(source)], source)
                event.record(device.copies)
        events[-1].synchronize()
        return [float(device.ns_between(first, second)) for first, second in zip(events, events[1:], strict=False)]


def measure_copies(
    copies: PlainCopies, pool: HostPool, sizes: Sequence[int], repeats: int, num_copies: int
) -> CopyRate:
    """One copy's time by its size, and the latency and bandwidth through it.

    Repeats go on, up to four times as many, while other work on the machine hides that larger copies take longer.

    Raises:
        ProfileError: they do not.
    """
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(4 * repeats + 1):
        for size in sizes if repeat % 2 else reversed(sizes):
            sources = [pool.take(copies.slot_bytes), *(pool.take(size) for _ in range(num_copies))]
            mean_ns = float(np.mean(copies.times_ns(sources)))
            if repeat:  # the first one warms up
                samples[size].append(mean_ns)
        if repeat == 0 or repeat % repeats:
            continue
        times = {size: Repeated.of(found) for size, found in samples.items()}
        if rate := _rate_of(times, [time.median_ns for time in times.values()]):
            return rate
    found_us = ", ".join(
        f"{size / MIB:g} MiB in {np.median(of_size) / 1000:.0f} us" for size, of_size in samples.items()
    )
    raise ProfileError(f"larger copies take no longer, so no bandwidth can be told: {found_us}; is the machine busy?")


def demand_rate(times: dict[int, Repeated], plain: CopyRate) -> CopyRate:
    """Latency and bandwidth of copies in the executor's own pipeline, by their bytes.

    Where larger ones took no longer, which is noise of a busy machine, the bandwidth is that of plain copies.
    """
    if rate := _rate_of(times, [time.mean_ns for time in times.values()]):
        return rate
    rests = [time.mean_ns - size * 1e9 / plain.bytes_per_s for size, time in times.items()]
    rate = plain._replace(latency_ns=max(0.0, float(np.mean(rests))), times=times)
    errors = [abs(rate.copy_ns(size) / time.mean_ns - 1) for size, time in times.items()]
    return rate._replace(mean_error=float(np.mean(errors)), max_error=float(np.max(errors)))


def _rate_of(times: dict[int, Repeated], times_ns: Sequence[float]) -> CopyRate | None:
    """Latency and bandwidth through one time of each size; None where larger copies take no longer."""
    found = fit([1, list(times)], times_ns)
    latency_ns, byte_ns = found.coefficients.tolist()
    return CopyRate(latency_ns, 1e9 / byte_ns, found.mean_error, found.max_error, times) if byte_ns > 0 else None
