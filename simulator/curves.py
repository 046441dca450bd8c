"""Hits at every cache size at once, exact, for policies that copy every miss and give all layers as many slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.contract import PolicyError
from policies.ideal_min import Future, read_future
from policies.priority import CONFIDENCE, GATE, LOAD
from policies.steps import Forward, Steps
from simulator.sizes import by_touch, empty_sizes
from simulator.stacks import by_next_use, by_recency, by_signal, empty_stack, one_by_one
from tracer.schema import ForwardKind, ModelShape, Pass, TraceError, choices

_ALONE = {"layer_adapt": False, "coop": False}
# Each curve, and the policy and knobs whose hits it has at each size; none counts single accesses.
CURVES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "lru": ("lru", {}),
    "lru_misses_first": ("lru", {"lru_order": "misses_first"}),
    "lru_id": ("lru", {"lru_order": "id"}),
    "seq": None,
    "load": ("oled", {**_ALONE, "priority_signal": "load"}),
    "gate": ("oled", {**_ALONE, "priority_signal": "gate"}),
    "confidence": ("oled", {**_ALONE, "priority_signal": "confidence"}),
    "ideal_min": ("ideal_min", {"misses": "h2d"}),
}
NEED_GATES = ("gate", "confidence")
_SIGNALS = {"load": LOAD, "gate": GATE, "confidence": CONFIDENCE}


@dataclass(frozen=True, eq=False)
class Curve:
    """Counts of one policy in the counted forwards."""

    hits: NDArray[np.int64]  # [L, E] with C slots in each layer in column C - 1
    activated: NDArray[np.int64]  # [L]
    num_forwards: int


class _Stacked:
    """Runs one curve of a policy whose smaller caches hold part of what its larger ones hold."""

    def __init__(self, shape: ModelShape, advance: Callable[..., None], *arguments: Any) -> None:
        self._stack, self._advance, self._arguments = empty_stack(shape), advance, arguments

    def add(self, forward: Forward, counted: bool) -> None:
        self._advance(self._stack, *self._arguments, forward, counted)

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hits, [L, E], and activated experts, [L]."""
        found = self._stack.found
        return found[:, :-1].cumsum(axis=1), found.sum(axis=1)


class _SideBySide:
    """Runs one curve of LRU in an order that looks at residents."""

    def __init__(self, shape: ModelShape, hits_first: bool) -> None:
        self._sizes, self._hits_first = empty_sizes(shape), hits_first

    def add(self, forward: Forward, counted: bool) -> None:
        by_touch(self._sizes, self._hits_first, forward, counted)

    def counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Hits, [L, E], and activated experts, [L]."""
        return self._sizes.hits.T.copy(), self._sizes.activated


def curves(
    passes: Iterable[Pass], shape: ModelShape, names: Collection[str] = tuple(CURVES), warmup_requests: int = 1
) -> dict[str, Curve]:
    """Hits of policies at every cache size from 1 slot in each layer to all experts, in one pass over a trace.

    Caches start empty. Decode forwards count, of requests that are not warm-up, as for the metrics of a run: a forward
    that requests share counts if none of them is. Where a smaller cache holds part of what a larger one holds, a hit
    is counted once, at the smallest size that has it; LRU in the orders that look at residents is run at every size.

    Args:
        passes: of the run, in order; `ideal_min` reads them beforehand once more.
        shape: of the passes.
        names: of CURVES.
        warmup_requests: first requests that run and do not count.

    Raises:
        PolicyError: there is no such curve, or `confidence` is asked of a trace that does not know confidences.
        TraceError: a pass is not of this shape, or passes that `ideal_min` needs twice can be read once.
    """
    for name in names:
        if name not in CURVES:
            raise PolicyError(f"curve {name!r}: not known; {choices(name, CURVES)}")
    future = read_future(passes, shape) if "ideal_min" in names else None
    runs = {name: _run_of(name, shape, future) for name in names}
    steps = Steps(shape)
    warmup: set[int] = set()  # requests, the first that appear
    num_read = num_forwards = 0
    for pass_ in passes:
        forward = steps.read(pass_)
        requests = pass_.requests.tolist()
        for request in requests:
            if len(warmup) < warmup_requests:
                warmup.add(request)
        counted = forward.kind != ForwardKind.PREFILL and warmup.isdisjoint(requests)
        num_read += 1
        num_forwards += counted
        for name, run in runs.items():
            try:
                run.add(forward, counted)
            except PolicyError as error:
                raise PolicyError(f"curve {name}: pass {pass_.pass_id}: {error}") from error
    if future is not None and num_read * shape.num_layers != future.offsets.size - 1:
        raise TraceError("curve ideal_min reads the passes twice: they must be a list, a reader or the like")
    return {name: Curve(*run.counts(), num_forwards) for name, run in runs.items()}


def _run_of(name: str, shape: ModelShape, future: Future | None) -> _Stacked | _SideBySide:
    if name in ("lru", "lru_misses_first"):
        return _SideBySide(shape, hits_first=name == "lru")
    if name in _SIGNALS:
        return _Stacked(shape, by_signal, _SIGNALS[name])
    if name == "ideal_min":
        return _Stacked(shape, by_next_use, future)
    return _Stacked(shape, by_recency if name == "lru_id" else one_by_one)
