"""What layers of each design took, read from the logs of their runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from policies.log import LogChunk, Table
from replay.calibrate_plans import Design
from replay.repeats import Repeated


class Execution(NamedTuple):
    """Parts of one layer execution, ns; None where there is no such part."""

    num_tokens: int
    kv_len: int
    before: int  # from its start to its plan
    hits: int  # from its plan until the kernel over the hits has run
    total: int
    first_copy: int | None  # from its plan to the start of the first copy
    copies: int | None  # from there to the end of the last one
    copy: float | None  # mean of the copies that ended while the CPU was busy, of all where it was not
    after_copies: int | None  # from the end of the last copy to the end of the layer
    cpu: int | None  # from its plan until the CPU's results were there

    @property
    def ends_by_cpu(self) -> bool:
        """The CPU's results came last."""
        if self.cpu is None:
            return False
        copies = 0 if self.copies is None or self.first_copy is None else self.first_copy + self.copies
        return self.cpu > max(self.hits, copies)


class ForwardTimes(NamedTuple):
    """One forward: its layers, and what it took after the last one, ns."""

    layers: list[Execution]
    after_layers: int


class Observed(NamedTuple):
    """What the executions of one design took, ns, each part as of `Execution`."""

    before: Repeated
    hits: Repeated
    total: Repeated
    first_copy: Repeated | None
    copies: Repeated | None
    copy: Repeated | None
    after_copies: Repeated | None
    cpu: Repeated | None
    ends_by_cpu: bool  # more often than not


def read_log(chunks: Iterable[LogChunk]) -> Iterator[ForwardTimes]:
    """Each forward of a run."""
    for chunk in chunks:
        layers, ends = chunk.layers, chunk.forwards.scalars["end_ns"].tolist()
        per_forward = len(layers) // len(ends)
        for number, end_ns in enumerate(ends):
            rows = range(number * per_forward, (number + 1) * per_forward)
            found = [_execution(layers, row) for row in rows]
            yield ForwardTimes(found, end_ns - int(layers.scalars["end_ns"][rows[-1]]))


def observe(runs: Iterable[Sequence[LogChunk]], designs: Sequence[Design]) -> tuple[dict[Design, Observed], Repeated]:
    """What each design took over some runs of all of them, and the time of a forward beside its layers.

    The host does not get ahead of the GPU between forwards: what the plan of a first layer comes later for it than
    those of the others is of the forward's time. It is told where the host is ahead, by forwards with copies alone,
    and not by the first one of a run.
    """
    samples: dict[Design, list[Execution]] = defaultdict(list)
    tails = []
    for chunks in runs:
        for number, (design, forward) in enumerate(zip(designs, read_log(chunks), strict=True)):
            first, *others = forward.layers
            samples[design] += others
            if number > 0 and design.num_transfers and not design.num_on_cpu:
                late = first.before - np.mean([layer.before for layer in others])
                tails.append(forward.after_layers + float(late))
    return {design: _observed(found) for design, found in samples.items()}, Repeated.of(tails)


def _execution(layers: Table, row: int) -> Execution:
    times = layers.scalars
    start, plan, hits_end, end = (int(times[name][row]) for name in ("start_ns", "plan_ns", "hits_end_ns", "end_ns"))
    starts, ends = (layers.lists[name][row] for name in ("transfer_start_ns", "transfer_end_ns"))
    cpu = int(times["cpu_end_ns"][row]) - plan if len(layers.lists["on_cpu"][row]) else None
    first_copy = copies = after_copies = copy = None
    if len(starts):
        first_copy, copies = int(starts[0]) - plan, int(ends[-1] - starts[0])
        after_copies = end - int(ends[-1])
        counted = ends - plan <= cpu if cpu is not None else np.ones(len(ends), np.bool_)
        copy = float((ends - starts)[counted].mean()) if counted.any() else None
    return Execution(
        int(times["num_tokens"][row]),
        int(times["kv_len"][row]),
        plan - start,
        hits_end - plan,
        end - start,
        first_copy,
        copies,
        copy,
        after_copies,
        cpu,
    )


def _observed(found: Sequence[Execution]) -> Observed:
    parts: dict[str, Any] = {}
    for name in Observed._fields[:-1]:
        values = [value for execution in found if (value := getattr(execution, name)) is not None]
        parts[name] = Repeated.of(values) if values else None
    return Observed(**parts, ends_by_cpu=2 * sum(execution.ends_by_cpu for execution in found) > len(found))
