"""Batches from requests that were recorded one by one, as continuous batching would run them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from tracer.parts import join
from tracer.schema import Pass, TraceError, TraceMetadata


def merge(traces: Sequence[Iterable[Pass]], batch: int) -> Iterator[Pass]:
    """Run recorded requests side by side, at most `batch` of them at a time.

    Each pass holds the next forward of every running request; when a request has ended, the next one joins in the
    next pass with its first forward, mostly prefill. Requests join in the order of their trace, from several traces in
    turn, and are numbered in the order of joining; all else of a forward stays as it was recorded, which is right for
    models whose routing of a token does not depend on other requests, such as LLaDA2.0. A pass of several requests
    has no wall time. At most `batch` requests are in memory.

    Args:
        traces: passes of each, one request after the other.
        batch: requests that run at once, at least 1; 1 is the traces themselves, one after the other or in turn.

    Raises:
        TraceError: batch is out of range, there are fewer requests than that, or a trace is a batch already.
    """
    if batch < 1:
        raise TraceError(f"batch {batch}: must be at least 1")
    waiting = _in_turn([_requests_of(passes) for passes in traces])
    running: dict[int, deque[Pass]] = {}
    num_joined = num_passes = 0
    while True:
        while len(running) < batch and (request := next(waiting, None)) is not None:
            running[num_joined] = deque(request)
            num_joined += 1
        if not num_passes and num_joined < batch:
            raise TraceError(f"batch {batch}: must be at most {num_joined}, the number of requests to merge")
        if not running:
            return
        parts = [replace(forwards.popleft(), requests=np.array([request])) for request, forwards in running.items()]
        yield join(parts, num_passes, parts[0].wall_ns if len(parts) == 1 else -1)
        num_passes += 1
        running = {request: forwards for request, forwards in running.items() if forwards}


def merged_metadata(traces: Sequence[TraceMetadata], batch: int) -> TraceMetadata:
    """Metadata of a batch: what all traces agree on, and under `details.merged` what was merged.

    Raises:
        TraceError: the traces are not of one source, shape, gate_dtype and block length, or lack different things.
    """
    first = traces[0]
    for metadata in traces[1:]:
        for what, one, other in (
            ("source", first.source, metadata.source),
            ("gate_dtype", first.gate_dtype, metadata.gate_dtype),
            ("block_length", first.decode.get("block_length"), metadata.decode.get("block_length")),
            ("shape", first.shape, metadata.shape),
            ("what they lack", sorted(first.lacks), sorted(metadata.lacks)),
        ):
            if one != other:
                raise TraceError(f"traces to be merged differ in {what}: {one} and {other}")
    hashes = [content_hash for metadata in traces for content_hash in content_hashes(metadata)]
    merged = {"batch": batch, "content_hashes": hashes}
    seeds = {metadata.seed for metadata in traces}
    return replace(
        first,
        decode=_agreed([metadata.decode for metadata in traces]),
        seed=seeds.pop() if len(seeds) == 1 else None,
        details=_agreed([metadata.details for metadata in traces]) | {"merged": merged},
        content_hash="",
    )


def content_hashes(metadata: TraceMetadata) -> list[str]:
    """Hashes of the traces whose requests a trace holds: its own, or of what was merged."""
    return metadata.details.get("merged", {}).get("content_hashes", [metadata.content_hash])


def _agreed(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first, *rest = records
    return {key: value for key, value in first.items() if all(key in r and r[key] == value for r in rest)}


def _requests_of(passes: Iterable[Pass]) -> Iterator[list[Pass]]:
    """Passes of each request, refused where requests share a pass or take turns."""
    seen: set[int] = set()
    for request, forwards in groupby(passes, _only_request):
        if request in seen:
            raise TraceError(
                f"request {request} stands in several places; only requests recorded one by one are merged"
            )
        seen.add(request)
        yield list(forwards)


def _only_request(item: Pass) -> int:
    if len(item.requests) != 1:
        raise TraceError(
            f"pass {item.pass_id} has {len(item.requests)} requests; only requests recorded one by one are merged"
        )
    return int(item.requests[0])


def _in_turn(streams: Sequence[Iterator[list[Pass]]]) -> Iterator[list[Pass]]:
    """The next request of each stream in turn, of those that have one left."""
    left = deque(streams)
    while left:
        stream = left.popleft()
        request = next(stream, None)
        if request is not None:
            left.append(stream)
            yield request
