"""A run as a Perfetto trace: GPU stream, link, CPU pool, prefetches and cache occupancy over a window of forwards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

from experiments.timeline_packets import TraceWriter
from experiments.timeline_requests import Part, RequestTracks
from experiments.timeline_slices import (
    Execution,
    Slice,
    copy_slice,
    cpu_slices,
    demand_slices,
    executions,
    gpu_slices,
    layer_slice,
)
from experiments.timeline_slots import Prefetch, SlotCounter
from policies.log import LogChunk, Table
from policies.profile import Costs
from tracer.schema import ForwardKind

FORWARDS = 20  # of a window, unless told otherwise


class Copy(Protocol):
    """A copy to the GPU, as engines hand it over when it has landed."""

    layer: int
    expert: int
    is_prefetch: bool
    start_ns: int
    end_ns: int


class Window(NamedTuple):
    """Successive forwards of a run.

    Args:
        first: index of the first one in the run; None is the first decode forward that is counted.
        length: how many; None is all that follow.
    """

    first: int | None = None
    length: int | None = FORWARDS


class Timeline:
    """Writes what went on in a window of a run, while it runs.

    Every track holds slices that follow one another; on those of forwards and requests they also enclose others. Two
    timelines may share a writer, to be seen below each other. Memory is that of two chunks of the log.

    Args:
        writer: of the trace.
        name: of the group of tracks.
        costs: that the run was charged; the times of kernels follow from them.
        num_experts: of a layer.
        is_global: the cache is one pool for all layers.
        warmup_requests: first requests that are not counted.
    """

    def __init__(
        self,
        writer: TraceWriter,
        name: str,
        *,
        costs: Costs,
        num_experts: int,
        is_global: bool,
        window: Window,
        warmup_requests: int = 0,
    ) -> None:
        self.num_forwards = 0  # written
        self._writer, self._costs = writer, costs
        self._first, self._length = window
        self._warmup_requests, self._seen = warmup_requests, dict[int, None]()
        self._slots = SlotCounter(num_experts, is_global, costs)
        self._prefetches: list[Prefetch] = []  # landed, in order, and not yet written
        self._waiting: LogChunk | None = None
        self._end_ns = 0  # of what was written
        root = writer.track(name)
        self._requests = RequestTracks(writer, root, rank=0)
        self._forwards = writer.track("forwards", root, 1)
        self._gpu = writer.track("GPU stream", root, 2)
        self._demand = writer.track("H2D engine: demand", root, 3)
        self._prefetch = writer.track("H2D engine: prefetches", root, 4)
        self._cpu = writer.track("CPU pool", root, 5)
        self._taken = writer.counter("slots taken", root, 6, "slots")
        self._missed = writer.counter("missed experts", root, 7, "experts")

    def add_copy(self, copy: Copy) -> None:
        """A copy has landed; those of transfers are in the log, unless they began as prefetches."""
        if copy.is_prefetch:
            self._prefetches.append(Prefetch(copy.layer, copy.expert, copy.start_ns, copy.end_ns))

    def add(self, chunk: LogChunk) -> None:
        """The next stretch of whole forwards, which waits for the one after it: by then its prefetches have landed."""
        if self._first is None:
            self._first = self._first_counted(chunk.forwards)
        waiting, self._waiting = self._waiting, chunk
        if waiting is not None:
            self._write_chunk(waiting)

    def finish(self) -> None:
        """The run has ended."""
        if self._waiting is not None:
            self._write_chunk(self._waiting)
        self._requests.finish(self._end_ns)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader of the finished timeline should know."""
        return () if self.num_forwards else ("the timeline is empty: no decode forward is counted",)

    def _first_counted(self, forwards: Table) -> int | None:
        """Index of the first decode forward that no request of the warm-up shares."""
        numbers, kinds = (forwards.scalars[name].tolist() for name in ("forward", "kind"))
        for row, (number, kind) in enumerate(zip(numbers, kinds, strict=True)):
            requests = forwards.lists["requests"][row].tolist()
            self._seen |= dict.fromkeys(requests)
            warmup = list(self._seen)[: self._warmup_requests]
            if kind != ForwardKind.PREFILL and not set(requests).intersection(warmup):
                return number
        return None

    def _write_chunk(self, chunk: LogChunk) -> None:
        """Write the forwards within the window; the one before it says what the cache holds at its begin."""
        numbers, ends_ns = (chunk.forwards.scalars[name] for name in ("forward", "end_ns"))
        first = math.inf if self._first is None else self._first
        stop = math.inf if self._length is None else first + self._length
        if first - 1 <= numbers[-1] and numbers[0] < stop:
            layers = groupby(executions(chunk.layers), attrgetter("forward"))
            for row, (number, of_forward) in enumerate(layers):
                if first - 1 <= number < stop:
                    self._write_forward(chunk.forwards, row, list(of_forward), is_within=number >= first)
        self._prefetches = [one for one in self._prefetches if one.end_ns > ends_ns[-1]]

    def _write_forward(self, forwards: Table, row: int, layers: Sequence[Execution], is_within: bool) -> None:
        start_ns, end_ns = (int(forwards.scalars[name][row]) for name in ("start_ns", "end_ns"))
        started = [one for one in self._prefetches if one.start_ns < end_ns]
        self._prefetches = self._prefetches[len(started) :]
        taken = self._slots.read(layers, end_ns, started)
        self._put(self._prefetch, (copy_slice(*one) for one in started if is_within or one.end_ns > end_ns))
        if not is_within:
            deque(taken, maxlen=0)
            return
        for time_ns, num_taken in taken:
            self._writer.count(self._taken, time_ns, num_taken)
        columns = (forwards.lists[name][row].tolist() for name in ("requests", "blocks", "iterations", "accepted"))
        parts = list(map(Part, *columns))
        self._requests.add(parts, start_ns, end_ns)
        kind, first = ForwardKind(forwards.scalars["kind"][row]), layers[0]
        of_forward = {
            "forward": first.forward,
            "pass": int(forwards.scalars["pass_id"][row]),
            "tokens": first.num_tokens,
            "kv_len": first.kv_len,
            "accepted": sum(part.num_accepted for part in parts),
        }
        self._writer.begin(self._forwards, start_ns, kind.name.lower(), of_forward)
        for layer in layers:
            self._write_layer(layer)
        self._put(self._gpu, [Slice(layers[-1].end_ns, end_ns, "tail", {})])
        self._writer.end(self._forwards, end_ns)
        self.num_forwards += 1
        self._end_ns = end_ns

    def _write_layer(self, row: Execution) -> None:
        self._put(self._forwards, [layer_slice(row)])
        self._put(self._gpu, gpu_slices(row, self._costs))
        self._put(self._demand, demand_slices(row))
        self._put(self._cpu, cpu_slices(row, self._costs))
        self._writer.count(self._missed, row.start_ns, row.num_missed)

    def _put(self, track: int, slices: Iterable[Slice]) -> None:
        """Write slices; what took no time is left out."""
        for start_ns, end_ns, name, arguments in slices:
            if end_ns > start_ns:
                self._writer.begin(track, start_ns, name, arguments)
                self._writer.end(track, end_ns)
