"""A device on which everything takes a time that is known beforehand, and such times as they are measured."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from replay.repeats import Repeated


class FakeStream:
    """Work in order; only its time passes."""

    def __init__(self) -> None:
        self.now_ns = 0

    def busy(self, time_ns: float) -> None:
        self.now_ns += round(time_ns)


class FakeEvent:
    def __init__(self) -> None:
        self.time_ns = -1

    def record(self, stream: FakeStream) -> None:
        self.time_ns = stream.now_ns

    def synchronize(self) -> None:
        assert self.time_ns >= 0


class FakeDevice:
    """Copies take latency and bytes; what computes says itself how long it takes, by `compute.busy`."""

    def __init__(self, copy_latency_ns: float = 0, copy_bytes_per_s: float = 1e30, where: str = "cpu") -> None:
        self.torch_device = torch.device(where)
        self.compute, self.copies = FakeStream(), FakeStream()
        self._latency_ns, self._bytes_per_s = copy_latency_ns, copy_bytes_per_s

    def event(self) -> FakeEvent:
        return FakeEvent()

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self.copies.busy(self._latency_ns + source.numel() * source.element_size() * 1e9 / self._bytes_per_s)

    def ns_between(self, first: FakeEvent, second: FakeEvent) -> int:
        return second.time_ns - first.time_ns

    def synchronize(self) -> None:
        pass


def at(time_ns: float, spread: float = 0.0) -> Repeated:
    """A time whose median and mean are known."""
    return Repeated(time_ns, spread, time_ns)
