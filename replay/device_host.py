"""A machine without a GPU as a device: the calling thread computes, another copies from memory to memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Queue
from threading import Event as Flag
from threading import Thread
from time import perf_counter_ns, sleep

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.core_calls import no_calls
from replay.core_commands import COPY, COPY_ON_DEVICE, LAUNCH, RECORD_COMPUTE, RECORD_COPIES, WAIT_COMPUTE
from replay.core_state import Core, Handles
from replay.device import Device, Work

_LEAST_EVENTS = 65_536


class _Event:
    """An event of a thread, with the time by the clock of the host."""

    def __init__(self) -> None:
        self.time_ns = -1
        self._flag = Flag()

    def record(self, stream: _Inline | _Queued) -> None:
        stream.put(self._stamp)

    def synchronize(self) -> None:
        self._flag.wait()

    def _stamp(self) -> None:
        self.time_ns = perf_counter_ns()
        self._flag.set()


class _Inline:
    """Work of the calling thread: done when it is put."""

    def put(self, work: Callable[[], object]) -> None:
        work()


class _Queued:
    """Work of a thread of its own, in order."""

    def __init__(self) -> None:
        self._queue: Queue[Callable[[], object] | None] = Queue()
        self._thread = Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def join(self) -> None:
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            self._queue.task_done()


class _Host:
    """A machine without a GPU: this thread computes, another copies from memory to memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.compute, self.copies = _Inline(), _Queued()
        self._works: list[Work] = []
        self._times_ns, self._come = np.zeros(_LEAST_EVENTS, np.int64), np.zeros(_LEAST_EVENTS, np.uint8)

    @property
    def num_events(self) -> int:
        return len(self._come)

    def handles(self) -> Handles:
        none = np.zeros(0, np.int64)
        return Handles(no_calls(), np.zeros(2, np.int64), none, none, self._come)

    def add(self, work: Work, *, is_warm: bool = False) -> int:
        self._works.append(work)
        return len(self._works) - 1

    def launch(self, work: int) -> None:
        self._works[work]()

    def reserve(self, count: int) -> None:
        more = count - self.num_events
        if more > 0:
            self.synchronize()
            self._come = np.concatenate([self._come, np.zeros(more, np.uint8)])
            self._times_ns = np.concatenate([self._times_ns, np.zeros(more, np.int64)])

    def forget(self) -> None:
        self.synchronize()
        self._come[:] = 0

    def carry_out(self, core: Core, commands: NDArray[np.int64], first: int, last: int) -> None:
        for row in commands[first:last].tolist():
            what, a, b, c = row
            if what == RECORD_COMPUTE:
                self._stamp(a)
            elif what == WAIT_COMPUTE:
                self.wait(core, a)
            elif what == LAUNCH:
                self._works[a]()
            elif what == COPY_ON_DEVICE:
                ctypes.memmove(a, b, c)
            elif what == COPY:
                self.copies.put(partial(ctypes.memmove, a, b, c))
            elif what == RECORD_COPIES:
                self.copies.put(partial(self._stamp, a))  # what copies wait for was done when it was put

    def wait(self, core: Core, event: int) -> None:
        while not self._come[event]:
            sleep(1e-5)

    def times_ns(self, count: int) -> NDArray[np.int64]:
        return self._times_ns[:count] - self._times_ns[0]

    def event(self) -> _Event:
        return _Event()

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies.put(partial(target.copy_, source))

    def ns_between(self, first: _Event, second: _Event) -> int:
        return second.time_ns - first.time_ns

    def synchronize(self) -> None:
        self.copies.join()

    def close(self) -> None:
        self.copies.close()

    def _stamp(self, event: int) -> None:
        self._times_ns[event] = perf_counter_ns()
        self._come[event] = 1


def open_host() -> Device:
    """This machine, without a GPU."""
    return _Host()
