"""Prefetch what stored tokens needed whose embedding or routing so far resembles that of this forward's (FineMoE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Plan, Policy, PolicyError
from policies.expert_maps import DISTRIBUTIONS, TOPK, MapStore, empty_store, stored
from policies.jit import jit
from policies.knobs import limit_of, require_choice, require_limit
from policies.map_learning import learn
from policies.map_prediction import POOLINGS, predict, priority_to_stay
from policies.map_search import Queries, directions, no_queries, search_trajectories, similar_sketch
from policies.pool_retention import capacity_of, require_pool, retain
from policies.retention import by_priority, ids_of, missed_of, nobody_resident
from tracer.schema import NUM_SCORES, ForwardKind, ModelShape

STORES = ("offline", "online")
SEMANTICS = ("token", "block_mean")
TARGETS = ("paper_l+d", "code_all_later")
RESETS = ("never", "evict")
MOST_ENTRIES = 10_000  # each is searched for every token
_EMA = 1 / 3
_PREFILL = int(ForwardKind.PREFILL)


@dataclass
class Knobs:
    """What can be chosen."""

    fm_store: str = "offline"
    """`offline`: the maps of calibration, which stay (FineMoE, section 6.1: 70 % of the prompts); `online`: empty at
    first, and every decode token's map enters, so that earlier forwards of the same block are soon among them. Ours:
    the offline maps are drawn evenly from all decode tokens of calibration, not kept by how little they repeat each
    other; tokens of prompts enter neither store."""
    depth: int = 3
    """Prefetch distance d in layers (FineMoE, section 6.1)."""
    fm_entries: int = 1000
    """Maps in the store at most (FineMoE, section 4.4, and its released code); `offline` has no more than the record
    of calibration holds."""
    fm_pool: str = "max"
    """How the tokens of a forward share one prefetch list: the `max` or `sum` of their shares for an expert; or
    `mean_map`: one search for the mean of all tokens, which selects as many experts as the target layer activates on
    average. Ours: FineMoE's forwards have one token."""
    gate_dist: str = "sigmoid_norm"
    """Shares of a layer's experts: `sigmoid_norm`, the known router scores divided by their sum; a `softmax` of their
    logits; or `topk_norm`, the gates of the chosen experts, for traces that have nothing else. Of maps of calibration
    with router scores, topk_norm takes the k highest unbiased ones, which need not be those chosen. Searches compare
    shares in 255 levels; for want of finer ones about one in a hundred with softmax finds another map, whose cosine is
    up to .002 lower. With depth 3 and proxy-19x256-signals the prediction for a layer of a decode forward names 58
    experts on average by trajectory and 39 by embedding (softmax: 53 and 38; topk_norm: 54 and 38), where 58 are
    activated. Ours: FineMoE's models have softmax gates."""
    fm_sem: str = "token"
    """What the semantic search compares: the input embedding of each `token` (FineMoE, section 4.2), or the mean of
    those of its block, since all masks have the same. Ours: block_mean."""
    fm_target: str = "paper_l+d"
    """Layers that the trajectory predicts at layer l: l + d (FineMoE, section 4.3), or all from there on, as the
    released code does but for an error, by which one layer is never predicted."""
    fm_freq_reset: str = "never"
    """Whether the count of an expert's uses begins anew when it is evicted, `evict`, as in the released code; then
    nothing that is not resident outranks what is."""
    fm_search_ms: float = 0.0
    """Time of a search, which runs beside the GPU: prefetches are issued so much later (FineMoE, section 4.5). Ours:
    the value. With the default, 0, searches are free, which favours FineMoE: give what one takes where it matters."""
    pool: str = "global"
    """`global`: one pool of slots for all layers, as in FineMoE; `layer`: equal pools, to compare with others."""
    max_admit: int | None = None
    """How many of a layer's transfers enter the pool, those of highest score first; null for all. Ours."""

    def __post_init__(self) -> None:
        require_choice("fm_store", self.fm_store, STORES)
        require_choice("fm_pool", self.fm_pool, POOLINGS)
        require_choice("gate_dist", self.gate_dist, DISTRIBUTIONS)
        require_choice("fm_sem", self.fm_sem, SEMANTICS)
        require_choice("fm_target", self.fm_target, TARGETS)
        require_choice("fm_freq_reset", self.fm_freq_reset, RESETS)
        require_pool(self.pool)
        require_limit("max_admit", self.max_admit)
        if self.depth < 1:
            raise PolicyError(f"depth is {self.depth}: must be at least 1")
        if not 1 <= self.fm_entries <= MOST_ENTRIES:
            raise PolicyError(f"fm_entries is {self.fm_entries}: allowed are 1 to {MOST_ENTRIES}")
        if not 0 <= self.fm_search_ms <= 1e6:
            raise PolicyError(f"fm_search_ms is {self.fm_search_ms}: must be from 0 to 1e6")
        if self.fm_store == "online" and self.fm_pool == "mean_map":
            raise PolicyError("fm_pool=mean_map makes one map of many tokens, which fm_store=online has no room for")


class Params(NamedTuple):
    """What never changes."""

    distribution: int
    pooling: int
    depth: int
    fewest: int  # experts of a map that are predicted at least
    learns: bool
    of_mean: bool
    of_block: bool
    all_later: bool
    resets: bool
    delay_ns: int
    max_admit: int


class State(NamedTuple):
    """What is remembered between gates."""

    score: NDArray[np.float64]  # [L, E] predicted share times uses
    shares: NDArray[np.float64]  # [L, E] by the last prediction for the layer
    uses: NDArray[np.int64]  # [L, E] forwards that activated the expert
    activity: NDArray[np.float64]  # [L] activated experts, smoothed over decode forwards; 0 before the first
    store: MapStore
    queries: Queries


@jit
def count_uses(state, step, view, resets):
    """Count what the layer activates, and smooth how much that is."""
    layer, num_activated = step.layer, 0
    if resets:
        for at in range(state.uses.shape[0]):
            for expert in range(step.load.size):
                if not view.resident[at, expert] and not view.in_flight[at, expert]:
                    state.uses[at, expert], state.score[at, expert] = 0, 0.0
    for expert in range(step.load.size):
        if step.load[expert] > 0:
            num_activated += 1
            state.uses[layer, expert] += 1
            state.score[layer, expert] = priority_to_stay(state.shares[layer, expert], state.uses[layer, expert])
    if step.kind != _PREFILL:
        before = state.activity[layer]
        state.activity[layer] = num_activated if before == 0.0 else before + _EMA * (num_activated - before)


@jit
def _search(params, state, step, view):
    """Predict the layers that this gate is for; returns prefetches [N, 2] and their priorities [N, 2], in order."""
    store, queries, layer = state.store, state.queries, step.layer
    num_layers, num_experts = state.score.shape
    first = min(layer + params.depth, num_layers)  # layers that the trajectory predicts
    end = num_layers if params.all_later else min(first + 1, num_layers)
    nearer = first if layer == 0 else 1  # the semantic search predicts layers from 1 up to this
    num_queries = 1 if params.of_mean else step.expert_ids.shape[0]
    entries, similarities = np.empty(num_queries, np.int64), np.empty(num_queries, np.float64)
    start = 1 if layer == 0 else first
    wanted = np.full((end - start, num_experts), -1.0)
    if nearer > 1 and store.size[0] > 0:
        sketches, cosines = directions(step, params.of_block, params.of_mean), np.empty(store.scales.shape[1])
        found = (-1, 0.0)
        for query in range(num_queries):
            found = similar_sketch(store, sketches, query, cosines, found)
            entries[query], similarities[query] = found
        predict(params, state, view, layer, (1, nearer), entries, similarities, wanted[: nearer - 1])
    if params.learns or first < end:
        search_trajectories(params.distribution, store, queries, step, params.of_mean, entries, similarities)
    if first < end and store.size[0] > 0:
        predict(params, state, view, layer, (first, end), entries, similarities, wanted)
    if params.learns and layer == num_layers - 1:
        sketches = directions(step, params.of_block, False)
        learn(store, queries, step, sketches, min(params.depth, num_layers) / num_layers)

    values = wanted.ravel()
    order = by_priority(values >= 0.0, values)
    prefetches, priority = np.empty((order.size, 2), np.int64), np.zeros((order.size, 2), np.float64)
    for row, index in enumerate(order):
        prefetches[row, 0], prefetches[row, 1] = start + index // num_experts, index % num_experts
        priority[row, 0] = -values[index]
    return prefetches, priority


@jit
def decide(params, state, step, view):
    """Search, prefetch for the layer at distance d, copy every miss, and let the lowest of the pool leave.

    At a forward's first gate the layers before that one are prefetched as well, by the semantic search. The score is
    share times uses. What the layer activates leaves last; equal scores: the less used first, then the highest number.

    Source: FineMoE, sections 4.2 to 4.5.
    Differs: every token of the forward is searched for, and one list made of all; an online store takes up decode
    tokens alone, and an offline one is an even sample of calibration; the released code departs from the paper in
    which experts it selects and for which layers, and is not followed.
    """
    count_uses(state, step, view, params.resets)
    prefetches, priority = _search(params, state, step, view)
    transfers = ids_of(missed_of(step.load, view.resident[step.layer]))
    retained = retain(step, view, transfers, state.score, state.uses, params.max_admit)
    has_any = prefetches.shape[0] > 0
    return Plan(
        transfers,
        np.empty(0, np.int64),
        retained,
        prefetches,
        priority,
        has_any,
        params.delay_ns if has_any else 0,
    )


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: the trace, or calibration, lacks router scores or sketches that the knobs need; or there is no
            calibration for `fm_store=offline`.
    """
    shape, distribution = context.shape, DISTRIBUTIONS.index(knobs.gate_dist)
    learns, num_layers = knobs.fm_store == "online", shape.num_layers
    lacking = " and ".join(["scores"] * (distribution != TOPK) + ["sketch"] * (learns or knobs.depth > 1))
    if lacking and not context.has_signals:
        raise PolicyError(
            f"finemoe gate_dist={knobs.gate_dist} depth={knobs.depth} fm_store={knobs.fm_store} needs {lacking} of the "
            "table signals, which this trace lacks: proxy-19x256-signals has them; policy.gate_dist=topk_norm "
            "policy.depth=1 policy.fm_store=offline needs none"
        )
    if distribution == TOPK:
        context.require("gates", "gate_dist=topk_norm")
    calibration, warnings = None if learns else context.calibration, ()
    if calibration is not None:
        num_maps = len(calibration.map_ids)
        if lacking and np.isnan(calibration.map_sketches).any():
            raise PolicyError(f"finemoe needs {lacking} of the table signals, which {calibration.name} lacks")
        if knobs.fm_entries > num_maps:
            warnings = (f"fm_entries={knobs.fm_entries}: the record of calibration holds {num_maps} maps",)
    params = Params(
        distribution=distribution,
        pooling=POOLINGS.index(knobs.fm_pool),
        depth=knobs.depth,
        fewest=shape.top_k,
        learns=learns,
        of_mean=knobs.fm_pool == "mean_map",
        of_block=knobs.fm_sem == "block_mean",
        all_later=knobs.fm_target == "code_all_later",
        resets=knobs.fm_freq_reset == "evict",
        delay_ns=round(knobs.fm_search_ms * 1e6),
        max_admit=limit_of(knobs.max_admit),
    )
    num_known = shape.top_k if distribution == TOPK else min(NUM_SCORES, shape.num_experts)

    def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
        capacity = capacity_of(knobs.pool, shape, slots)
        if calibration is None:
            store = empty_store(num_layers, shape.num_experts, num_known, knobs.fm_entries)
        else:
            store = stored(calibration, distribution, shape.top_k, knobs.fm_entries, shape.num_experts)
        size = (num_layers, shape.num_experts)
        state = State(
            score=np.zeros(size),
            shares=np.zeros(size),
            uses=np.zeros(size, np.int64),
            activity=np.zeros(num_layers),
            store=store,
            queries=no_queries(store, learns),
        )
        return state, nobody_resident(shape), capacity

    return Policy(
        "finemoe",
        params,
        init,
        decide,
        pool=knobs.pool,
        reads_signals=True,
        prefetches=num_layers > 1,
        warnings=warnings,
    )
