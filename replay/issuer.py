"""Has a run's commands carried out by its device and waits for it, with prefetches issued meanwhile."""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from policies.contract import Plan
from replay.core_commands import has_come
from replay.core_link import poll
from replay.core_queue import issue
from replay.core_state import NUM_COMMANDS, NUM_EVENTS, Arrays, Told, core_of, most_events, with_room
from replay.device import Device


class Issuer:
    """The thread that issues everything, as far as it concerns the device.

    Args:
        device: all of whose work is done.
        arrays: of the run.
        told: what kernels are told of a layer.
        prefetches: some plan may name prefetches.
    """

    def __init__(self, device: Device, arrays: Arrays, told: Told, prefetches: bool) -> None:
        self._device, self._told, self._prefetches = device, told, prefetches
        self._most_events = most_events(arrays.is_hit.size)  # of a layer
        self._due: list[tuple[int, NDArray[np.int64], NDArray[np.float64]]] = []  # prefetches, at a time of the host
        device.reserve(self._most_events)
        device.forget()
        self._use(arrays)

    @property
    def num_events(self) -> int:
        """Events so far."""
        return int(self.arrays.at[NUM_EVENTS])

    def send(self, first: int = 0) -> None:
        """Have the commands that were written down carried out, from one of them on."""
        self.send_some(first, int(self.arrays.at[NUM_COMMANDS]))
        self.arrays.at[NUM_COMMANDS] = 0

    def send_some(self, first: int, last: int) -> None:
        """Have some of them carried out, which stay written down."""
        self._device.carry_out(self.core, self.arrays.commands, first, last)

    def wait(self, event: int) -> None:
        """Wait for an event."""
        if self._prefetches:
            self.poll()
            while self._due and not has_come(self.core, event):
                self.poll()
        self._device.wait(self.core, event)

    def poll(self) -> None:
        """Do what has become due."""
        while self._due and self._due[0][0] <= perf_counter_ns():
            _, prefetches, priority = self._due.pop(0)
            if (arrays := issue(self.arrays, prefetches, priority)) is not self.arrays:
                self._use(arrays)
        poll(self.core)
        if self.arrays.at[NUM_COMMANDS]:
            self.send()

    def queue(self, plan: Plan, acts_ns: int) -> None:
        """Queue the prefetches of a plan, when its delay is over; a policy may reuse its arrays before that."""
        due_ns = acts_ns + plan.prefetch_delay_ns
        self._due.append((due_ns, plan.prefetches.copy(), plan.prefetch_priority.copy()))
        self.poll()

    def make_room(self) -> None:
        """Have room for another layer's events and copies."""
        needed = self.num_events + self._most_events
        if needed > self._device.num_events:
            self.reserve(self.num_events * 5 // 4)
        if (arrays := with_room(self.arrays)) is not self.arrays:
            self._use(arrays)

    def reserve(self, num_events: int) -> None:
        """Have so many events, and those of another layer."""
        self._device.reserve(num_events + self._most_events)
        self._use(self.arrays)

    def _use(self, arrays: Arrays) -> None:
        self.arrays, self.core = arrays, core_of(arrays, self._device.handles(), self._told)
