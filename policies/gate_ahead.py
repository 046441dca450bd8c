"""Prefetch what the gates of the next layers choose on this layer's input, and keep what was activated last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Plan, Policy, PolicyError
from policies.jit import jit
from policies.knobs import limit_of, require_limit
from policies.lru import ORDERS, touch
from policies.pool_retention import retain
from policies.retention import by_priority, equal_capacity, ids_of, missed_of, nobody_resident
from tracer.schema import MAX_AHEAD_DEPTH, ModelShape

_MISSES_FIRST = ORDERS.index("misses_first")


@dataclass
class Knobs:
    """What can be chosen."""

    depth: int = 1
    """Prefetch for so many of the next layers of the same forward, 0 to 3. HybriMoE and DAOP let the gates of later
    layers judge the current hidden states, HybriMoE's paper those of three layers."""
    max_admit: int | None = None
    """How many of a layer's transfers may stay, those touched last first; null for all. A prefetch that was under way
    stays in any case. Ours: a bound as llama.cpp's per-layer caches discuss it."""

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= MAX_AHEAD_DEPTH:
            raise PolicyError(f"gate_ahead: depth is {self.depth}: allowed are 0 to {MAX_AHEAD_DEPTH}")
        require_limit("max_admit", self.max_admit)


class AheadParams(NamedTuple):
    """What never changes."""

    depth: int
    max_admit: int


class State(NamedTuple):
    """What each layer remembers."""

    touches: NDArray[np.int64]  # [L, E] time of last activation, 0 if never
    clock: NDArray[np.int64]  # [1] time of the last touch of all
    score: NDArray[np.float64]  # [L, E] time of last activation or naming


def init(params: AheadParams, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities."""
    size = (shape.num_layers, shape.num_experts)
    state = State(np.zeros(size, np.int64), np.zeros(1, np.int64), np.zeros(size))
    return state, nobody_resident(shape), equal_capacity(shape, slots)


@jit
def decide(params, state, step, view):
    """Copy every miss, retain the last activated, and queue anew what the next layers' gates name.

    The misses of a gate are touched before its hits. Being named counts as a touch only where a prefetch looks for a
    victim: otherwise it would find none in a full layer, as what is resident was activated after what is not.

    Source: the prefetching of HybriMoE and DAOP, without their CPU parts.
    """
    layer, load = step.layer, step.load
    resident = view.resident[layer]
    transfers = ids_of(missed_of(load, resident))
    touch(_MISSES_FIRST, state.touches, state.clock, step, resident)
    for expert in range(load.size):
        if load[expert] > 0:
            state.score[layer, expert] = state.touches[layer, expert]
    retained = retain(step, view, transfers, state.touches, state.touches, params.max_admit)
    prefetches, priority = _named(params.depth, state, step, view, step.signals)
    return Plan(transfers, np.empty(0, np.int64), retained, prefetches, priority, params.depth > 0, 0)


@jit
def _named(depth, state, step, view, signals):
    # `signals` is an argument of its own, so that numba leaves out what is behind its being None
    if signals is None:
        return np.empty((0, 2), np.int64), np.empty((0, 2), np.float64)
    num_layers, num_experts = view.resident.shape
    num_tokens, top_k = step.expert_ids.shape
    most = depth * min(num_tokens * top_k, num_experts)
    prefetches, priority = np.empty((most, 2), np.int64), np.empty((most, 2), np.float64)
    count = 0
    state.clock[0] += 1
    for ahead in range(1, min(depth, num_layers - 1 - step.layer) + 1):
        layer = step.layer + ahead
        votes = np.zeros(num_experts, np.float64)
        for token in range(num_tokens):
            for k in range(min(top_k, signals.ahead_ids.shape[2])):
                votes[signals.ahead_ids[ahead - 1, token, k]] += 1.0
        for expert in by_priority(votes, votes):
            state.score[layer, expert] = state.clock[0]
            if not view.resident[layer, expert] and not view.in_flight[layer, expert]:
                prefetches[count, 0], prefetches[count, 1] = layer, expert
                priority[count, 0], priority[count, 1] = ahead, -votes[expert]
                count += 1
    return prefetches[:count], priority[:count]


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: the trace has no `ahead_ids`.
    """
    if knobs.depth > 0 and not context.has_signals:
        raise PolicyError(
            "gate_ahead needs ahead_ids of the table signals, which this trace lacks: proxy-19x256-signals has them"
        )
    return Policy(
        "gate_ahead",
        AheadParams(knobs.depth, limit_of(knobs.max_admit)),
        init,
        decide,
        reads_signals=knobs.depth > 0,
        prefetches=knobs.depth > 0,
    )
