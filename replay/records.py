"""What a run noted while it went on, turned into the log of layer executions and forwards when it has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.contract import Step
from policies.log import (
    PREFETCH_COUNTS,
    LogChunk,
    decided_columns,
    forward_builder,
    forward_row,
    layer_builder,
    pass_columns,
)
from replay.core_state import COPY_BEGIN, COPY_END, NUM_COPIES, Arrays
from tracer.schema import Pass

_CHUNK_FORWARDS = 256  # of one stretch of the log


@dataclass(slots=True)
class LayerRecord:
    """One layer execution: what was decided, events by their numbers, and times of the host."""

    step: Step
    hits: NDArray[np.int64]
    transfers: NDArray[np.int64]  # a promoted one first
    on_cpu: NDArray[np.int64]
    retained: NDArray[np.int64]
    prefetches: NDArray[np.int64]
    capacity: int
    num_resident: int
    plan: int
    hits_end: int  # -1: no hits
    end: int
    first_copy: int
    promoted_copy: int  # -1: none
    cpu_ns: int  # from the plan until the CPU's results were back, by the host's clock
    decide_ns: int
    lead_ns: int  # part of host_ns from the gate's ids to the launch of the hits, during which the GPU is idle
    host_ns: int = 0  # of the issuing thread for all launches, without decision and waits


@dataclass(slots=True)
class ForwardRecord:
    """One forward pass and its layers; it ends where the next one begins, or the run ends."""

    pass_: Pass
    number: int
    begin: int
    layers: list[LayerRecord] = field(default_factory=list)


def log_of(
    times_ns: NDArray[np.int64], forwards: Sequence[ForwardRecord], end: int, arrays: Arrays
) -> Iterator[LogChunk]:
    """The log of a run that has ended.

    Args:
        times_ns: of events, by their numbers.
        forwards: in order.
        end: event of the run's end.
        arrays: of the run.
    """
    times_ns = times_ns - times_ns[forwards[0].begin]
    copies = arrays.copies[: arrays.at[NUM_COPIES]]
    spans = times_ns[copies[:, [COPY_BEGIN, COPY_END]]]
    begins = [event for forward in forwards for event in (forward.begin, *(layer.end for layer in forward.layers[:-1]))]
    starts = times_ns[begins]
    link_busy = _link_busy(starts, times_ns[end], spans)
    ends = [*(forward.begin for forward in forwards[1:]), end]
    layers, rows, index = layer_builder(), forward_builder(), 0
    for forward, forward_end in zip(forwards, ends, strict=True):
        pass_ = forward.pass_
        about = pass_columns(forward.number, pass_)
        for record in forward.layers:
            times = {
                "start_ns": starts[index],
                "link_busy_ns": link_busy[index],
                **dict(zip(PREFETCH_COUNTS, arrays.counts[1 + index].tolist(), strict=True)),
            }
            layers.append(about | _row(record, times_ns, spans) | times)
            index += 1
        rows.append(forward_row(forward.number, pass_, int(times_ns[forward.begin]), int(times_ns[forward_end])))
        if len(rows) == _CHUNK_FORWARDS:
            yield LogChunk(layers.build(), rows.build())
    if len(rows):
        yield LogChunk(layers.build(), rows.build())


def _row(record: LayerRecord, times_ns: NDArray[np.int64], spans: NDArray[np.int64]) -> dict[str, Any]:
    """Columns of one layer execution that its record says."""
    load, plan_ns = record.step.load, int(times_ns[record.plan])
    promoted = [] if record.promoted_copy < 0 else [record.promoted_copy]
    copies = [*promoted, *range(record.first_copy, record.first_copy + len(record.transfers) - len(promoted))]
    decided = decided_columns(load, record.hits, record.transfers, record.on_cpu, record.retained, record.prefetches)
    return decided | {
        "layer": record.step.layer,
        "capacity": record.capacity,
        "num_resident": record.num_resident,
        "num_promoted": len(promoted),
        "plan_ns": plan_ns,
        "hits_end_ns": plan_ns if record.hits_end < 0 else int(times_ns[record.hits_end]),
        "cpu_end_ns": plan_ns + record.cpu_ns,
        "end_ns": int(times_ns[record.end]),
        "transfer_start_ns": spans[copies, 0],
        "transfer_end_ns": spans[copies, 1],
    }


def _link_busy(starts: NDArray[np.int64], end_ns: np.int64, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Durations of the copies that landed during each layer execution; those that land after the run's end are of none."""
    busy = np.zeros(len(starts), np.int64)
    landed = spans[spans[:, 1] < end_ns]
    places = np.searchsorted(starts, landed[:, 1], side="right") - 1
    np.add.at(busy, places, landed[:, 1] - landed[:, 0])
    return busy
