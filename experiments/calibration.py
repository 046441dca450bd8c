"""What policies may learn beforehand: from requests of the trace that are not evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from policies.contract import Context
from policies.steps import count_load
from tracer.schema import Calibration, ModelShape, Pass
from tracer.store import TraceReader


class FirstRequests:
    """The passes of a trace's first requests: the calibration split, disjoint from what is evaluated."""

    def __init__(self, passes: Iterable[Pass], num_requests: int) -> None:
        self._passes, self._num_requests = passes, num_requests

    def __iter__(self) -> Iterator[Pass]:
        seen: set[int] = set()
        for pass_ in self._passes:
            seen.update(pass_.requests.tolist())
            if len(seen) > self._num_requests:
                return
            yield pass_


def context_of(reader: TraceReader, warmup_requests: int, seed: int) -> tuple[Context, str]:
    """What a policy may be built from, and what its calibration is from, for the manifest."""
    shape = reader.metadata.shape
    name = f"first {warmup_requests} of {reader.num_requests} requests of the trace"

    def calibrate() -> Calibration:
        passes = reader.passes(signals=reader.has_signals)
        return record(FirstRequests(passes, warmup_requests), shape, name)

    context = Context(
        shape,
        passes=reader,
        calibrate=calibrate if warmup_requests else None,
        calibration_passes=FirstRequests(reader, warmup_requests),
        has_signals=reader.has_signals,
        seed=seed,
    )
    return context, name


def record(passes: Iterable[Pass], shape: ModelShape, name: str) -> Calibration:
    """The record of these passes."""
    size = (shape.num_layers, shape.num_experts)
    load, prefill_load = np.zeros(size, np.int64), np.zeros(size, np.int64)
    requests, num_activated = set(), 0
    for pass_ in passes:
        requests.update(pass_.requests.tolist())
        counts = count_load(pass_.expert_ids, shape.num_experts)
        if pass_.is_prefill:
            prefill_load += counts
        else:
            load += counts
            num_activated += int(np.count_nonzero(counts))
    none = np.zeros((0, shape.num_layers, 0))
    return Calibration(
        name=name,
        num_requests=len(requests),
        num_activated=num_activated,
        load=load,
        prefill_load=prefill_load,
        importance=load.astype(np.float64),
        request_loads=np.zeros((0, *size), np.int64),
        map_ids=none.astype(np.int64),
        map_scores=none,
        map_sketches=np.zeros((0, 16)),
        token_ids=np.zeros(0, np.int64),
        token_experts=none.astype(np.int64),
        token_shares=none,
    )
