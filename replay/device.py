"""Two streams of a device, one that computes and one that copies, and events between them; without CUDA, threads."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.core_state import Core, Handles

Work = Callable[[], None]
Stream = Any  # work that a device does in order, into which only its events look


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Mark the end of what is on the stream so far; at most once."""
        ...

    def synchronize(self) -> None:
        """Wait until it has come."""
        ...


class Device(Protocol):
    """What the executor and calibration ask of a device.

    A run names work and events by numbers, in commands that are carried out many at a time. Calibration puts single
    things on the streams.
    """

    torch_device: torch.device
    compute: Stream
    copies: Stream

    # By numbers

    @property
    def num_events(self) -> int:
        """Events that have numbers."""
        ...

    def add(self, work: Work, *, is_warm: bool = False) -> int:
        """Number of some work, which always uses the same memory and is launched in one call.

        Args:
            work: to be done.
            is_warm: its like was added before, so that all is compiled and chosen.
        """
        ...

    def launch(self, work: int) -> None:
        """Put work on the stream that computes."""
        ...

    def reserve(self, count: int) -> None:
        """Have so many events with numbers; handles may be others afterwards."""
        ...

    def handles(self) -> Handles:
        """What compiled code needs of it, until work or events are added."""
        ...

    def forget(self) -> None:
        """Let no event have come; all that was put on the streams has been done."""
        ...

    def carry_out(self, core: Core, commands: NDArray[np.int64], first: int, last: int) -> None:
        """Put some of a run's commands on the streams."""
        ...

    def wait(self, core: Core, event: int) -> None:
        """Wait for an event, and poll meanwhile where the run needs it."""
        ...

    def times_ns(self, count: int) -> NDArray[np.int64]:
        """When the first events came, ns since the very first; all must have come."""
        ...

    # One by one

    def event(self) -> Event:
        """An event that was not recorded yet."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Within it, copies can be put on their stream, and nothing else on any."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Put a copy from host memory on the stream of copies."""
        ...

    def ns_between(self, first: Any, second: Any) -> int:
        """Time from one of its events to another; both must have come."""
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
