"""Two streams of a device, one that computes and one that copies, and events between them; without CUDA, threads."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread
from time import perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor

Work = Callable[[], None]


class Stream(Protocol):
    """Work that a device does in order."""

    def wait_event(self, event: Event) -> None:
        """Let what is put on the stream later wait for an event."""
        ...


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Mark the end of what is on the stream so far; at most once."""
        ...

    def query(self) -> bool:
        """It has come."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class Device(Protocol):
    """What the executor asks of a device."""

    torch_device: torch.device
    compute: Stream
    copies: Stream

    def event(self) -> Event:
        """An event that was not recorded yet."""
        ...

    def reserve(self, count: int) -> None:
        """Have so many events ready."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Within it, copies can be put on their stream, and nothing else on any."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy from host memory on the stream of copies."""
        ...

    def captured(self, work: Work) -> Work:
        """The same work, which always uses the same memory, launched in one call."""
        ...

    def ns_between(self, first: Event, second: Event) -> int:
        """Time from one event to another; both must have come."""
        ...

    def synchronize(self) -> None:
        """Wait for both streams."""
        ...

    def close(self) -> None:
        """End what runs beside this thread."""
        ...


@contextmanager
def without_collection() -> Iterator[None]:
    """Within it Python looks for no garbage, which takes longer the more there is to look at."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def open_device(name: str) -> Device:
    """The device of this name: `cpu`, `cuda` or `cuda:N`."""
    device = torch.device(name)
    return _Cuda(device) if device.type == "cuda" else _Host()


class _Cuda:
    """A GPU: torch's own streams and events, and CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(self.torch_device)
        self.copies = torch.cuda.Stream(self.torch_device)
        self.compute = torch.cuda.Stream(self.torch_device)
        torch.cuda.set_stream(self.compute)
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one after the other, so they share their memory
        self._ready: list[torch.cuda.Event] = []

    def event(self) -> torch.cuda.Event:
        return self._ready.pop() if self._ready else torch.cuda.Event(enable_timing=True)

    def reserve(self, count: int) -> None:
        while len(self._ready) < count:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self.compute)  # the driver makes it now
            self._ready.append(event)

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.copies)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def captured(self, work: Work) -> Work:
        for _ in range(2):  # what is compiled or chosen at first use is not captured
            work()
        self.compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        with without_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self.compute):
            work()  # an older graph that is found to be garbage meanwhile would spoil it
        kept = graph, work  # a graph does not keep the tensors that it reads
        return lambda: kept[0].replay()

    def ns_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> int:
        return round(first.elapsed_time(second) * 1e6)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream(self.torch_device))


class _HostEvent:
    """An event of a thread, with the time by the clock of the host."""

    def __init__(self) -> None:
        self.time_ns = -1
        self._flag = Flag()

    def record(self, stream: _Inline | _Thread) -> None:
        stream.put(self._stamp)

    def query(self) -> bool:
        return self._flag.is_set()

    def synchronize(self) -> None:
        self._flag.wait()

    def _stamp(self) -> None:
        self.time_ns = perf_counter_ns()
        self._flag.set()


class _Inline:
    """Work of the calling thread: done when it is put."""

    def put(self, work: Work) -> None:
        work()

    def wait_event(self, event: _HostEvent) -> None:
        event.synchronize()


class _Thread:
    """Work of a thread of its own, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def put(self, work: Work | None) -> None:
        self._queue.put(work)

    def wait_event(self, event: _HostEvent) -> None:
        self._queue.put(event.synchronize)

    def join(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()


class _Host:
    """A machine without a GPU: this thread computes, another copies from memory to memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.compute, self.copies = _Inline(), _Thread()

    def event(self) -> _HostEvent:
        return _HostEvent()

    def reserve(self, count: int) -> None:
        pass

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies.put(lambda: _copied(target, source))

    def captured(self, work: Work) -> Work:
        return work

    def ns_between(self, first: _HostEvent, second: _HostEvent) -> int:
        return second.time_ns - first.time_ns

    def synchronize(self) -> None:
        event = self.event()
        event.record(self.copies)
        event.synchronize()

    def close(self) -> None:
        self.copies.join()


def _copied(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
