"""A GPU as a device: streams and memory by PyTorch, graphs and events by the driver, which compiled code calls."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.core_calls import driver, driver_calls
from replay.core_commands import carry_out, times_of
from replay.core_link import wait_on_gpu
from replay.core_state import Core, Handles
from replay.device import Device, Work, without_collection


class _Cuda:
    """A GPU: streams and memory by PyTorch, graphs and events by the driver, which compiled code calls."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(self.torch_device)
        self.compute, self.copies = torch.cuda.Stream(self.torch_device), torch.cuda.Stream(self.torch_device)
        torch.cuda.set_stream(self.compute)
        self._streams = np.array([self.compute.cuda_stream, self.copies.cuda_stream])
        self._driver, self._calls = driver(), driver_calls()
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one after the other, so they share their memory
        self._kept: list[tuple[torch.cuda.CUDAGraph, Work]] = []  # a graph does not keep the tensors that it reads
        self._graphs = np.zeros(64, np.int64)
        self._events = np.zeros(0, np.int64)

    @property
    def num_events(self) -> int:
        return len(self._events)

    def handles(self) -> Handles:
        return Handles(self._calls, self._streams, self._events, self._graphs, np.zeros(0, np.uint8))

    def add(self, work: Work, *, is_warm: bool = False) -> int:
        for _ in range(0 if is_warm else 2):  # what is compiled or chosen at first use is not captured
            work()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.compute.synchronize()
        with without_collection():  # an older graph that is found to be garbage meanwhile would spoil it
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        number = len(self._kept)
        self._kept.append((graph, work))
        if number == len(self._graphs):
            self._graphs = np.concatenate([self._graphs, np.zeros_like(self._graphs)])
        made = ctypes.c_void_p()
        raw = ctypes.c_void_p(graph.raw_cuda_graph())
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(made), raw, ctypes.c_ulonglong(0))
        self._call("cuGraphUpload", made, ctypes.c_void_p(int(self._streams[0])))
        self._graphs[number] = made.value  # pyright: ignore[reportCallIssue, reportArgumentType]  # the driver has set it
        return number

    def launch(self, work: int) -> None:
        self._call("cuGraphLaunch", ctypes.c_void_p(int(self._graphs[work])), ctypes.c_void_p(int(self._streams[0])))

    def reserve(self, count: int) -> None:
        made, handles = ctypes.c_void_p(), []
        for _ in range(count - self.num_events):
            self._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(0))
            handles.append(made.value)
        if handles:
            self._events = np.concatenate([self._events, np.array(handles, np.int64)])

    def forget(self) -> None:
        self.synchronize()

    def carry_out(self, core: Core, commands: NDArray[np.int64], first: int, last: int) -> None:
        _check(carry_out(core, first, last))

    def wait(self, core: Core, event: int) -> None:
        _check(wait_on_gpu(core, event))

    def times_ns(self, count: int) -> NDArray[np.int64]:
        times_ns = np.zeros(count, np.int64)
        _check(times_of(self._calls, self._events, count, times_ns))
        return times_ns

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.copies)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def ns_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> int:
        return round(first.elapsed_time(second) * 1e6)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream(self.torch_device))
        for handle in self._graphs[: len(self._kept)].tolist():
            self._call("cuGraphExecDestroy", ctypes.c_void_p(handle))
        for handle in self._events.tolist():
            self._call("cuEventDestroy_v2", ctypes.c_void_p(handle))
        self._kept.clear()
        self._events = self._events[:0]

    def _call(self, name: str, *arguments: Any) -> None:
        _check(getattr(self._driver, name)(*arguments))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA driver error {error}")


def open_cuda(device: torch.device) -> Device:
    """The GPU of this name."""
    return _Cuda(device)
