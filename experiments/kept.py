"""What the runs of one process have in common, kept from one to the next: the trace as read, policies, decisions."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from experiments.calibration import context_of
from experiments.policy import built
from experiments.setting import Setting
from policies.contract import Context, Estimates, Policy
from policies.profile import estimates_of
from policies.registry import POLICIES
from policies.steps import ReadPasses
from simulator.drive import Decisions, drive
from tracer.schema import Pass
from tracer.shipped import find_trace
from tracer.store import TraceReader

Value = TypeVar("Value")

BUDGET_BYTES = 2**28  # of a process, for passes, and as much again for decisions
NUM_POLICIES = 2  # these can hold tables over the whole trace
NUM_FEWEST = 1000


class Shelf(Generic[Value]):
    """The values that were used last, as far as there is room for them."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: dict[Hashable, tuple[Value, int]] = {}  # the one used last at the end

    def get(self, key: Hashable) -> Value | None:
        """The value of this key, if it is there still."""
        if key not in self._held:
            return None
        self._held[key] = self._held.pop(key)
        return self._held[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Keep a value, in the place of those that were not used for longest; one that never fits is not kept."""
        self._held.pop(key, None)
        if not self.has_room(size):
            return
        while self._held and sum(held for _, held in self._held.values()) + size > self._room:
            del self._held[next(iter(self._held))]
        self._held[key] = value, size

    def has_room(self, size: int) -> bool:
        """Whether a value of this size can be kept."""
        return size <= self._room


class Kept:
    """What runs have in common. With no room nothing is kept, and every run reads and decides for itself.

    Decisions are those of our own policies without prefetches, which depend on the trace, the policy and its knobs,
    the slots, what it was calibrated from, and the seed; on the machine only as far as the policy reads estimates.
    """

    def __init__(self, budget_bytes: int) -> None:
        has_room = budget_bytes > 0
        self._readers: dict[Path, tuple[Hashable, TraceReader]] | None = {} if has_room else None
        self._contexts: Shelf[tuple[Context, str]] = Shelf(NUM_POLICIES * has_room)
        self._policies: Shelf[Policy] = Shelf(NUM_POLICIES * has_room)
        self._passes: Shelf[ReadPasses] = Shelf(budget_bytes)
        self._decisions: Shelf[list[Decisions]] = Shelf(budget_bytes)
        self.fewest_misses: Shelf[int] = Shelf(NUM_FEWEST * has_room)  # of a trace, warm-up and slots
        self._too_large: set[Hashable] = set()  # traces
        self.num_drives = 0  # runs that decided for themselves, of policies that decide without a clock

    def reader(self, trace: str | Path | TraceReader) -> TraceReader:
        """The reader of a trace, the same one as long as its files do not change."""
        if isinstance(trace, TraceReader):
            return trace
        path = find_trace(str(trace))
        if self._readers is None:
            return TraceReader(path)
        files = tuple((file.name, *_signature(file)) for file in sorted(path.iterdir()))
        if path not in self._readers or self._readers[path][0] != files:
            self._readers[path] = files, TraceReader(path)
        return self._readers[path][1]

    def context(self, reader: TraceReader, warmup_requests: int, calibration: str, seed: int) -> tuple[Context, str]:
        """What `context_of` gives for a run, with what was made of it before."""
        record = _signature(Path(calibration)) if Path(calibration).is_file() else None
        key = reader, warmup_requests, calibration, seed, record
        found = self._contexts.get(key)
        if found is None:
            found = context_of(reader, warmup_requests, calibration, seed)
            self._contexts.put(key, found, 1)
        return found

    def policy(self, setting: Setting) -> Policy:
        """The policy of a run, ready for it."""
        key = _policy_key(setting)
        found = None if key is None else self._policies.get(key)
        if found is None:
            context = setting.context
            if setting.policy in POLICIES:
                context = replace(context, passes=_Again(self, setting.reader))
            found = built(setting.policy, setting.given.knobs, context)
            if key is not None:
                self._policies.put(key, found, 1)
        return found

    def passes(self, reader: TraceReader, signals: bool) -> Iterable[Pass] | ReadPasses:
        """The passes of a trace, as they were read before if they fit."""
        key = reader, signals
        if not self._passes.has_room(1) or key in self._too_large:
            return reader.passes(signals=signals)
        found = self._passes.get(key) or self._passes.get((reader, True))
        if found is None:
            counted = _Counted(reader.passes(signals=signals), self._passes)
            try:
                found = ReadPasses(counted, reader.metadata.shape, signals)
            except _TooLargeError:
                self._too_large.add(key)
                return reader.passes(signals=signals)
            self._passes.put(key, found, counted.num_bytes)
        return found

    def decisions(self, setting: Setting, policy: Policy, slots: int) -> Iterable[Decisions]:
        """What a policy without prefetches decides in a run."""
        estimates = estimates_of(setting.costs)
        policy_key = _policy_key(setting)
        key = policy_key, slots, estimates if policy.reads_estimates else None
        found = None if policy_key is None else self._decisions.get(key)
        if found is not None:
            return found
        made = self._drive(setting, policy, slots, estimates)
        return made if policy_key is None else self._keeping(key, made)

    def _drive(self, setting: Setting, policy: Policy, slots: int, estimates: Estimates) -> Iterator[Decisions]:
        self.num_drives += 1
        passes = self.passes(setting.reader, policy.reads_signals and setting.reader.has_signals)
        yield from drive(passes, policy, setting.traced, slots, estimates)

    def _keeping(self, key: Hashable, made: Iterable[Decisions]) -> Iterator[Decisions]:
        """Hand decisions on, and keep them when all are made."""
        kept: list[Decisions] = []
        size = 0
        for stretch in made:
            size += _num_bytes(stretch)
            if self._decisions.has_room(size):
                kept.append(stretch)
            else:
                kept.clear()
            yield stretch
        self._decisions.put(key, kept, size)


class _Again:
    """The passes of a trace, for a policy that is built from them."""

    def __init__(self, kept: Kept, reader: TraceReader) -> None:
        self._kept, self._reader = kept, reader

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._kept.passes(self._reader, False))


class _TooLargeError(Exception):
    """Passes do not fit on a shelf."""


class _Counted:
    """Passes that add up their bytes, and stop where they do not fit on a shelf."""

    def __init__(self, passes: Iterable[Pass], shelf: Shelf[Any]) -> None:
        self._passes, self._shelf = passes, shelf
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Pass]:
        for pass_ in self._passes:
            self.num_bytes += 2 * _num_bytes(pass_)  # as it was read, and as policies see it
            if not self._shelf.has_room(self.num_bytes):
                raise _TooLargeError
            yield pass_


@cache
def of_this_process() -> Kept:
    """What the cells of grids that run in this process share."""
    return Kept(BUDGET_BYTES)


def _policy_key(setting: Setting) -> Hashable | None:
    """What tells our own policies apart, ready for a run; None for the user's, which may be anything."""
    given = setting.given
    if not isinstance(setting.policy, str) or setting.policy not in POLICIES:
        return None
    knobs = json.dumps(given.knobs or {}, sort_keys=True)
    return setting.reader, setting.policy, knobs, given.warmup_requests, setting.calibration, given.seed


def _signature(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _num_bytes(value: Any) -> int:
    """Bytes of the arrays in a record and those within it."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    if is_dataclass(value):
        return sum(_num_bytes(getattr(value, entry.name)) for entry in fields(value))
    return 0
