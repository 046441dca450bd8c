"""Simulated time in whole ns, and the order of what happens at one instant."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import simpy


class Stage(IntEnum):
    """What comes first among events of one instant; within a stage, what was scheduled first.

    An event may bring about another at the same instant, even of an earlier stage: that one is then next. The GPU
    stream and the CPU pool need no stage of their own to pick in, since no one else competes for their next job: a
    kernel starts with the event that made it possible. The link picks last, so that it sees all that is due.
    """

    LAND = 0  # copies land
    RAN = 1  # kernels end, CPU results are back: slots become free
    LAYER = 2  # layers end, begin (which drops prefetches), are read, and plans act; a forward's tail ends
    ISSUE = 3  # prefetches enter the queue, those of earlier plans first
    PICK = 4  # the link takes its next copy


class Moment(simpy.Event):
    """An event that is certain to happen at a stage of an instant, `delay_ns` from now.

    Raises:
        ValueError: the instant has passed.
    """

    def __init__(self, clock: Clock, stage: Stage, delay_ns: int) -> None:
        if delay_ns < 0:
            raise ValueError(f"{stage.name} at {clock.now_ns} ns: delay_ns is {delay_ns}, must be at least 0")
        super().__init__(clock)
        self._ok = True
        self._value = None
        clock.schedule(self, stage, delay_ns)  # type: ignore[arg-type]  # a Stage is a priority


class Clock(simpy.Environment):
    """A SimPy environment whose events all have a Stage."""

    @property
    def now_ns(self) -> int:
        """Time since the start of the run."""
        return self._now  # type: ignore[return-value]  # SimPy allows fractions, we never schedule any

    def at(self, stage: Stage, delay_ns: int = 0, then: Callable[[], None] | None = None) -> Moment:
        """Schedule a moment, and what is done in it."""
        moment = Moment(self, stage, delay_ns)
        if then is not None:
            moment.callbacks.append(lambda _: then())
        return moment

    def wait(self, moment: Moment) -> None:
        """Let time pass until the moment has come."""
        while not moment.processed:
            self.step()
