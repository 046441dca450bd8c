"""Prefetch and keep what an earlier request needed whose routing this forward resembles (MoE-Infinity)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Plan, Policy, PolicyError
from policies.counting_order import descending
from policies.jit import jit
from policies.knobs import limit_of, require_choice, require_limit
from policies.pool_fill import start_fill, still_fills
from policies.pool_retention import capacity_of, require_pool, retain
from policies.request_matrices import (
    RequestMatrices,
    count_requests,
    end_requests,
    nearest,
    request_matrices,
    see,
)
from policies.retention import ids_of, missed_of, nobody_resident
from tracer.schema import ModelShape

MODES = ("prefetch", "request_only")
MATCHES = ("prefix", "full")
UPDATES = ("online", "frozen")
MOST_ENTRIES = 10_000  # each is searched at every gate
_EXPERT_BITS = 16  # a shift is far quicker than a division
_EXPERT_MASK = (1 << _EXPERT_BITS) - 1
# counted: layer executions, the entry that `score` is made of, requests awaiting their prediction; of the fill: tokens
# of each layer in its entry, gates since the last that found something new
_NOW, _ENTRY, _AWAITING, _TOKENS, _GATES = range(5)
PER_EPSILON = 10**8  # epsilon is 1e-8; priorities are whole multiples of it
_ABOVE_ALL = 2.0**64  # priorities, at least epsilon / L, exceed all others when multiplied by it, which is exact


@dataclass
class Knobs:
    """What can be chosen."""

    mi_mode: str = "prefetch"
    """`prefetch`: predict at each gate and prefetch for the layers to come (MoE-Infinity, section 4.5);
    `request_only`: predict once, when a request's first forward reaches its last layer, fill the pool by that, and
    then only evict by it, as OLED-MoE (section 2.2) counts the system among the request-level caches. Ours: the pool
    is filled with as many of the highest priorities as it has slots, each once. A prefetch is only for the next time
    that its layer runs, so what lacks is asked for at every gate, until all has come or a forward brought nothing."""
    mi_match: str = "prefix"
    """What a stored matrix is compared over: `prefix`, the layers that have run, or `full`, all layers, the unrun
    ones of this forward being 0 (MoE-Infinity, section 4.5 flattens whole matrices). Ours: the default. It has no
    effect with mi_mode=request_only, which compares once all layers have run."""
    mi_update: str = "online"
    """`online`: the matrix of each finished request is stored, in place of the closest where all entries are in use;
    `frozen`: those of calibration stay. MoE-Infinity, section 4.3, does not say which entry makes room; its code
    replaces the least accessed."""
    mi_entries: int = 120
    """Stored matrices at most, of which calibration fills as many as it holds. MoE-Infinity, section 5.2, finds 120
    best; its code keeps 1000."""
    mi_protect_predicted: bool = False
    """Whether what is predicted for the layers to come makes room for no prefetch, and for a miss only where nothing
    else is left, in the order of algorithm 1. The released code protects so; the algorithm knows the priority alone."""
    depth: int | None = None
    """Prefetch for so many of the next layers; null for all of this forward, as the released code does. The text of
    section 4.5 has "next layer"."""
    pool: str = "global"
    """`global`: one pool of slots for all layers, as in MoE-Infinity; `layer`: equal pools, to compare with others."""
    max_admit: int | None = None
    """How many of a layer's transfers enter the pool, those of highest priority first; null for all. Ours."""

    def __post_init__(self) -> None:
        require_choice("mi_mode", self.mi_mode, MODES)
        require_choice("mi_match", self.mi_match, MATCHES)
        require_choice("mi_update", self.mi_update, UPDATES)
        require_pool(self.pool)
        for name in ("depth", "max_admit"):
            require_limit(name, getattr(self, name))
        if not 1 <= self.mi_entries <= MOST_ENTRIES:
            raise PolicyError(f"mi_entries is {self.mi_entries}: allowed are 1 to {MOST_ENTRIES}")
        if self.mi_mode == "request_only" and (self.mi_protect_predicted or self.depth is not None):
            raise PolicyError("mi_mode=request_only predicts no layers to come: it has no depth, nor what to protect")


class Params(NamedTuple):
    """What never changes."""

    each_gate: bool
    whole: bool  # matrices are compared over all layers
    learns: bool
    protect: bool
    depth: int
    max_admit: int


class State(NamedTuple):
    """What is remembered between gates."""

    score: NDArray[np.float64]  # [L, E] priority by the last prediction
    recency: NDArray[np.int64]  # [L, E] layer execution that activated the expert last, from 1
    fill: NDArray[np.int32]  # [L, E] tokens of what is yet to fill the pool
    counts: NDArray[np.int64]  # [5] by the names above
    matrices: RequestMatrices


@jit
def rank(score, entry):
    """Write the priority to stay: (p + epsilon) * (1 - layer / L), p the share of the layer's tokens in the entry.

    Source: MoE-Infinity, section 4.5, algorithm 1, lines 10-16, layers from 0 and epsilon 1e-8.

    Args:
        score: [L, E], written. Equal fractions give equal numbers.
        entry: [L, E] tokens routed, the same sum in each layer.
    """
    num_layers, num_experts = score.shape
    total = max(entry[0].sum(), 1)
    scale = float(PER_EPSILON * total * num_layers)
    for layer in range(num_layers):
        for expert in range(num_experts):
            count = np.int64(entry[layer, expert])
            score[layer, expert] = float((PER_EPSILON * count + total) * (num_layers - layer)) / scale


@jit
def protect(score, entry, first, end):
    """Put what the entry activated in some layers above all else: out of reach for prefetches, and last to leave.

    Args:
        score: [L, E] by `rank`, changed in place; infinite for what is protected.
        entry: [L, E] tokens routed.
        first: first of the layers.
        end: first layer after those.

    Returns:
        [L, E], the order of leaving: that of `score` before, but with what is protected behind all others.
    """
    order = score.copy()
    for layer in range(first, end):
        for expert in range(score.shape[1]):
            if entry[layer, expert] > 0:
                order[layer, expert] *= _ABOVE_ALL
                score[layer, expert] = np.inf
    return order


@jit
def predicted(entry, num_tokens, before, first, end, view):
    """Prefetches for some layers: what the entry activated in them, the likeliest and nearest first.

    Source: MoE-Infinity, section 4.5, algorithm 1: the share of the layer's tokens times 1 - distance / L.

    Args:
        entry: [L, E] tokens routed.
        num_tokens: their sum in each layer.
        before: layer that distances count from.
        first: first layer to prefetch for.
        end: first layer after those.
        view: View at the gate.

    Returns:
        Prefetches [N, 2] and their priorities [N, 2]; equal ones by layer, then expert.
    """
    num_layers, num_experts = entry.shape
    cells = np.empty(max(end - first, 0) * num_experts + 1, np.int32)
    keys = np.empty(cells.size, np.int64)
    size = 0
    for layer in range(first, end):
        weight = num_layers - (layer - before)
        counts, resident, in_flight = entry[layer], view.resident[layer], view.in_flight[layer]
        for expert in range(num_experts):
            count = np.int64(counts[expert])
            cells[size], keys[size] = layer << _EXPERT_BITS | expert, count * weight
            size += (count > 0) & ~resident[expert] & ~in_flight[expert]
    prefetches, priority = np.empty((size, 2), np.int64), np.zeros((size, 2), np.float64)
    scale = float(max(num_tokens, 1) * num_layers)
    for row, index in enumerate(descending(keys[:size])):
        prefetches[row, 0], prefetches[row, 1] = cells[index] >> _EXPERT_BITS, cells[index] & _EXPERT_MASK
        priority[row, 0] = -float(keys[index]) / scale
    return prefetches, priority


@jit
def decide(params, state, step, view):
    """Match, prefetch for the layers to come, copy every miss, and let the lowest of the pool leave.

    What the layer activates leaves last; equal priorities: the least recently activated first, then the highest
    number.

    Source: MoE-Infinity, sections 4.3 to 4.5.
    Differs: matrices count the tokens of a whole block, and in prefill of the prompt; the released code departs from
    the paper in what it compares and evicts, and is not followed. A request that is absent from a forward counts as
    finished. Without calibration the policy is refused, so that it never starts with no matrix at all. With
    `mi_mode=request_only` the pool is filled over several forwards: a copy that has not started when its layer begins
    is dropped, and none starts where nothing that scores lower makes room.
    """
    layer, matrices, counts = step.layer, state.matrices, state.counts
    num_layers, num_experts = state.score.shape
    if layer == 0:
        counts[_ENTRY] = end_requests(matrices, step, params.learns, counts[_ENTRY])
    counts[_AWAITING] += count_requests(matrices, step)
    see(matrices, step)
    counts[_NOW] += 1
    load, recency, now = step.load, state.recency[layer], counts[_NOW]
    for expert in range(num_experts):
        recency[expert] = now if load[expert] > 0 else recency[expert]

    prefetches, priority = np.empty((0, 2), np.int64), np.empty((0, 2), np.float64)
    order, entry, issues = state.score, -1, False
    if params.each_gate or (layer == num_layers - 1 and counts[_AWAITING] > 0):
        entry = nearest(matrices, num_layers - 1 if params.whole else layer)
    if entry >= 0 and (entry != counts[_ENTRY] or params.protect):
        rank(state.score, matrices.entries[entry])
        counts[_ENTRY] = entry
    if params.each_gate:
        issues = entry >= 0
        if issues:
            chosen, end = matrices.entries[entry], layer + 1 + min(params.depth, num_layers - 1 - layer)
            if params.protect:
                order = protect(state.score, chosen, layer + 1, end)
            prefetches, priority = predicted(chosen, chosen[0].sum(), layer, layer + 1, end, view)
    else:
        if entry >= 0:
            chosen = matrices.entries[entry]
            start_fill(state.fill, counts[_GATES:], chosen, state.score, state.recency, view.capacity)
            counts[_AWAITING], counts[_TOKENS] = 0, chosen[0].sum()
        issues = counts[_AWAITING] == 0 and still_fills(state.fill, counts[_GATES:], view)
        if issues:
            prefetches, priority = predicted(state.fill, counts[_TOKENS], 0, 0, num_layers, view)

    transfers = ids_of(missed_of(step.load, view.resident[layer]))
    retained = retain(step, view, transfers, order, state.recency, params.max_admit)
    return Plan(transfers, np.empty(0, np.int64), retained, prefetches, priority, issues, 0)


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: there is no calibration.
    """
    stored = context.calibration.request_loads
    params = Params(
        each_gate=knobs.mi_mode == "prefetch",
        whole=knobs.mi_match == "full",
        learns=knobs.mi_update == "online",
        protect=knobs.mi_protect_predicted,
        depth=limit_of(knobs.depth),
        max_admit=limit_of(knobs.max_admit),
    )

    def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
        capacity = capacity_of(knobs.pool, shape, slots)
        size = (shape.num_layers, shape.num_experts)
        score = np.empty(size)
        rank(score, np.zeros(size, np.int32))
        state = State(
            score=score,
            recency=np.zeros(size, np.int64),
            fill=np.zeros(size, np.int32),
            counts=np.array([0, -1, 0, 0, -1]),
            matrices=request_matrices(stored, knobs.mi_entries),
        )
        return state, nobody_resident(shape), capacity

    warnings = ()
    if knobs.mi_entries > len(stored):
        warnings = (f"mi_entries={knobs.mi_entries}: the record of calibration holds {len(stored)} requests",)
    return Policy("moe_infinity", params, init, decide, pool=knobs.pool, prefetches=knobs.depth != 0, warnings=warnings)
