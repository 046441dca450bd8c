"""What a run noted while it went on, turned into the log of layer executions and forwards when it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policies.log import LogChunk, forward_builder, layer_builder
from replay.device import Device, Event
from replay.link import Copy
from tracer.schema import Pass


@dataclass(slots=True)
class LayerRecord:
    """One layer execution: columns of the log that are known at once, and the events of the others."""

    row: dict[str, Any]
    plan: Event
    end: Event
    transfers: list[Copy] = field(default_factory=list)
    hits_end: Event | None = None  # None: no hits
    cpu_ns: int = 0  # from the plan until the CPU's results were back, by the host's clock
    host_ns: int = 0  # of the issuing thread for all launches, without decision and waits
    lead_ns: int = 0  # part of it from the gate's ids to the launch of the hits, during which the GPU has nothing to do
    decide_ns: int = 0


@dataclass(slots=True)
class ForwardRecord:
    """One forward pass and its layers; it ends where the next one begins."""

    pass_: Pass
    number: int
    end: Event
    layers: list[LayerRecord] = field(default_factory=list)


class Times:
    """When events came, ns since the start of a run: each is measured from one nearby, so that no digit is lost."""

    def __init__(self, device: Device, start: Event) -> None:
        self._device, self._near, self._near_ns = device, start, 0

    def move(self, event: Event) -> int:
        """Time of an event, from which those that follow are measured."""
        self._near_ns = self.at(event)
        self._near = event
        return self._near_ns

    def at(self, event: Event) -> int:
        """Time of an event."""
        return self._near_ns + self._device.ns_between(self._near, event)


def log_of(
    device: Device, start: Event, forwards: list[ForwardRecord], copies: list[Copy], chunk_forwards: int = 256
) -> Iterator[LogChunk]:
    """The log of a run that has ended.

    Args:
        device: of its events, all of which have come.
        start: of the first forward.
        forwards: in order.
        copies: all that were put on the link, in order.
        chunk_forwards: forwards in one stretch of the log.
    """
    spans = _copy_spans(device, start, copies)
    starts, link_busy = _link_busy(device, start, forwards, spans, copies)
    layers, rows = layer_builder(), forward_builder()
    times, index = Times(device, start), 0
    begins_ns = 0
    for forward in forwards:
        first_ns = begins_ns
        for record in forward.layers:
            plan_ns = times.at(record.plan)
            layers.append(
                record.row
                | {
                    "start_ns": starts[index],
                    "plan_ns": plan_ns,
                    "hits_end_ns": plan_ns if record.hits_end is None else times.at(record.hits_end),
                    "cpu_end_ns": plan_ns + record.cpu_ns,
                    "link_busy_ns": link_busy[index],
                    "transfer_start_ns": [spans[id(copy)][0] for copy in record.transfers],
                    "transfer_end_ns": [spans[id(copy)][1] for copy in record.transfers],
                    "end_ns": times.move(record.end),
                }
            )
            index += 1
        begins_ns = times.move(forward.end)
        pass_ = forward.pass_
        rows.append(
            {
                "forward": forward.number,
                "pass_id": pass_.pass_id,
                "kind": int(pass_.kind),
                "start_ns": first_ns,
                "end_ns": begins_ns,
                "requests": pass_.requests,
                "blocks": pass_.blocks,
                "iterations": pass_.iterations,
                "accepted": pass_.num_accepted,
            }
        )
        if len(rows) == chunk_forwards:
            yield LogChunk(layers.build(), rows.build())
    if len(rows):
        yield LogChunk(layers.build(), rows.build())


def _copy_spans(device: Device, start: Event, copies: list[Copy]) -> dict[int, tuple[int, int]]:
    """Start and end of each copy, by its identity."""
    times, spans = Times(device, start), {}
    for copy in copies:
        begin = spans[id(copy.begin)][1] if isinstance(copy.begin, Copy) else times.at(copy.begin)
        spans[id(copy)] = begin, times.move(copy.end)
    return spans


def _link_busy(
    device: Device, start: Event, forwards: list[ForwardRecord], spans: dict[int, tuple[int, int]], copies: list[Copy]
) -> tuple[list[int], list[int]]:
    """Start of each layer execution, and the durations of the copies that landed before the next one began."""
    times, starts, now_ns = Times(device, start), [], 0
    for forward in forwards:
        for record in forward.layers:
            starts.append(now_ns)
            now_ns = times.move(record.end)
        now_ns = times.move(forward.end)
    busy = np.zeros(len(starts), np.int64)
    ends = np.array([spans[id(copy)][1] for copy in copies], np.int64)
    lengths = np.array([spans[id(copy)][1] - spans[id(copy)][0] for copy in copies], np.int64)
    landed = ends < now_ns  # what lands when the run has ended is of no layer
    places = np.searchsorted(np.array(starts), ends[landed], side="right") - 1
    np.add.at(busy, places, lengths[landed])
    return starts, busy.tolist()
