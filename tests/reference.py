"""Plain restatements of what policies must do, and the smallest traces to try them on: oracles for the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.calibration import calibrated
from policies.contract import Context, Estimates, Policy, View
from policies.driver import Decision, drive
from policies.registry import build_policy
from tracer.schema import ForwardKind, ModelShape, Pass

ESTIMATES = Estimates(h2d_ns=120, cpu_b0_ns=40, cpu_b1_ns=30)


# Views


def shown(
    resident: NDArray[np.bool_],
    in_flight: NDArray[np.bool_],
    capacity: NDArray[np.int64],
    free_slots: int = 0,
    estimates: Estimates = ESTIMATES,
) -> View:
    """The arrays as drivers show them, read-only: for others the policy would be compiled once more."""
    views = [array.view() for array in (resident, in_flight, capacity)]
    for view in views:
        view.flags.writeable = False
    return View(*views, free_slots, estimates)


# Traces


def shape_of(num_layers: int, num_experts: int, top_k: int = 1) -> ModelShape:
    return ModelShape(tuple(range(num_layers)), num_experts, top_k, hidden=8, expert_intermediate=4)


def pass_of(
    expert_ids: NDArray[np.int64],
    pass_id: int = 0,
    *,
    gates: NDArray[np.float64] | None = None,
    requests: Sequence[int] = (0,),
    blocks: Sequence[int] = (0,),
    iterations: Sequence[int] | None = None,
    kind: ForwardKind = ForwardKind.DENOISE,
    **tokens: Any,
) -> Pass:
    """A pass with this routing, [L, T, K], its tokens shared equally by the requests; `tokens` replaces columns."""
    num_layers, num_tokens, top_k = expert_ids.shape
    num_requests = len(requests)
    zeros = np.zeros(num_requests, np.int64)
    columns = {
        "positions": np.tile(np.arange(num_tokens // num_requests), num_requests),
        "token_ids_in": np.zeros(num_tokens, np.int64),
        "is_masked_in": np.ones(num_tokens, bool),
        "argmax_ids": np.zeros(num_tokens, np.int64),
        "p_argmax": np.full(num_tokens, 0.5),
        "p_current": np.full(num_tokens, np.nan),
        "accepted": np.zeros(num_tokens, bool),
        "edited": np.zeros(num_tokens, bool),
    }
    return Pass(
        pass_id=pass_id,
        requests=np.array(requests),
        blocks=np.array(blocks),
        iterations=zeros if iterations is None else np.array(iterations),
        kinds=np.full(num_requests, int(kind)),
        num_tokens=np.full(num_requests, num_tokens // num_requests),
        kv_lens=zeros,
        num_masked_in=zeros,
        num_accepted=zeros,
        wall_ns=-1,
        cos_router_input=np.zeros((num_requests, num_layers), np.float32),
        cos_layer_output=np.zeros((num_requests, num_layers), np.float32),
        expert_ids=expert_ids,
        gates=np.full(expert_ids.shape, 1 / top_k) if gates is None else gates,
        **{**columns, **{name: np.asarray(column) for name, column in tokens.items()}},
    )


def passes_of(batches: Iterable[Iterable[int]]) -> list[Pass]:
    """One layer whose forwards activate these sets, one token for each expert."""
    return [
        pass_of(np.array([sorted(batch)], np.int64)[..., None], i, iterations=[i]) for i, batch in enumerate(batches)
    ]


def sets_of(passes: Iterable[Pass], layer: int = 0) -> list[set[int]]:
    """What each forward activates in a layer."""
    return [set(pass_.expert_ids[layer].ravel().tolist()) for pass_ in passes]


# Running policies


def built(
    name: str,
    knobs: Mapping[str, Any],
    shape: ModelShape,
    passes: Sequence[Pass],
    calibration: Sequence[Pass] | None = None,
) -> Policy:
    """A policy built for this trace, which is its calibration split as well unless there is another."""
    return build_policy(name, knobs, context_of(shape, passes, calibration))


def context_of(
    shape: ModelShape,
    passes: Sequence[Pass],
    calibration: Sequence[Pass] | None = None,
) -> Context:
    """What a policy may be built from that runs on these passes, calibrated on others or, without, on the same."""
    split = passes if calibration is None else calibration
    return Context(
        shape,
        passes=passes,
        calibrate=lambda: calibrated(split, shape, "tests"),
        calibration_passes=split,
        has_signals=bool(passes) and passes[0].signals is not None,
    )


def run(
    name: str, knobs: Mapping[str, Any], shape: ModelShape, passes: Sequence[Pass], slots_per_layer: int
) -> list[Decision]:
    """Everything that a policy decides over a trace."""
    slots = slots_per_layer * shape.num_layers
    return list(drive(built(name, knobs, shape, passes), passes, shape, slots, ESTIMATES))


def hits_per_execution(decisions: Iterable[Decision]) -> list[int]:
    return [len(decision.hits) for decision in decisions]


def answers(decisions: Iterable[Decision]) -> list[tuple[Any, ...]]:
    """Everything that was decided, to compare runs by."""
    return [
        (
            decision.step.forward,
            decision.step.layer,
            decision.capacity,
            *(tuple(part.tolist()) for part in (decision.resident, *decision.plan[:3])),
        )
        for decision in decisions
    ]


# Oracles. Each runs one layer from a cold start and returns what is resident before each forward.


def lru_residents(batches: Sequence[set[int]], capacity: int, order: str = "hits_first") -> list[set[int]]:
    """Batch LRU for the orders that do not need gates: the last touched stands last in a list."""
    stack: list[int] = []
    before = []
    for batch in batches:
        resident = set(stack)
        before.append(resident)
        hits, misses = sorted(batch & resident), sorted(batch - resident)
        touched = {"hits_first": hits + misses, "misses_first": misses + hits, "id": sorted(batch)}[order]
        stack = [expert for expert in stack if expert not in batch] + touched
        stack = stack[max(len(stack) - capacity, 0) :]
    return before


def sequential_lru_hits(batches: Sequence[set[int]], capacity: int) -> list[int]:
    """LRU that serves and replaces one expert at a time, by ascending id: not what the policy does."""
    stack: list[int] = []
    hits = []
    for batch in batches:
        hits.append(0)
        for expert in sorted(batch):
            hits[-1] += expert in stack
            stack = [*(other for other in stack if other != expert), expert]
            del stack[:-capacity]
    return hits


def lfu_residents(batches: Sequence[Mapping[int, int]], capacity: int, by_load: bool) -> list[set[int]]:
    """LFU over loads of each forward, {expert: tokens}: sorts by (activated now, count, last touch)."""
    count: dict[int, int] = {}
    touched: dict[int, int] = {}
    resident: set[int] = set()
    before = []
    time = 0
    for batch in batches:
        before.append(set(resident))
        for expert in [*sorted(batch.keys() & resident), *sorted(batch.keys() - resident)]:
            time += 1
            touched[expert] = time
            count[expert] = count.get(expert, 0) + (batch[expert] if by_load else 1)
        ranked = sorted(resident | batch.keys(), key=lambda e: (e in batch, count[e], touched[e]), reverse=True)
        resident = set(ranked[:capacity])
    return before


def min_bypass(batches: Sequence[set[int]], capacity: int) -> list[set[int]]:
    """Belady's MIN with bypass in batches: always keep what is used again soonest."""
    resident: set[int] = set()
    before = []
    for index, batch in enumerate(batches):
        before.append(resident)
        later = list(enumerate(batches))[index + 1 :]
        next_use = {e: next((i for i, other in later if e in other), len(batches)) for e in resident | batch}
        resident = set(sorted(next_use, key=lambda e: (next_use[e], e))[:capacity])
    return before


def most_hits(batches: Sequence[set[int]], capacity: int) -> int:
    """Most hits that any choice of what stays can reach without prefetching, by trying all of them."""
    reached = {frozenset[int](): 0}
    for batch in batches:
        then: dict[frozenset[int], int] = {}
        for resident, hits in reached.items():
            held = sorted(resident | batch)
            for size in range(min(capacity, len(held)) + 1):
                for kept in map(frozenset, itertools.combinations(held, size)):
                    then[kept] = max(then.get(kept, -1), hits + len(resident & batch))
        reached = then
    return max(reached.values())


def hits_of(batches: Sequence[set[int]], before: Sequence[set[int]]) -> list[int]:
    return [len(batch & resident) for batch, resident in zip(batches, before, strict=True)]
