"""Keep the experts that routers have lately scored highest, chosen or not, and share the misses with the CPU (HybriMoE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, PolicyError, plain_plan
from policies.hybrid_schedule import hybrid_split
from policies.jit import jit
from policies.knobs import limit_of, require_choice, require_limit
from policies.misses import MISSES, MissPath, miss_path, require_misses, serve
from policies.retention import best, equal_capacity, lowest_first, missed_of, nobody_resident, with_admitted
from tracer.schema import ForwardKind, ModelShape

PATHS = ("hss", *MISSES)
POOLINGS = ("token_topp", "mean_topp")
_PREFILL = int(ForwardKind.PREFILL)


@dataclass
class Knobs:
    """What can be chosen."""

    misses: str = "hss"
    """`hss`: GPU and CPU share the misses by HybriMoE's hybrid scheduling; `h2d`: every miss is copied; `oled`: split
    as OLED-MoE does (section 4.4). Prefill copies every miss, with hss as HybriMoE's released code does, with oled as
    oled does."""
    mrs_alpha: float = 0.5
    """Weight of the newest scores in the average. HybriMoE's released code."""
    mrs_top: int | None = None
    """How many of the highest scores count, the others being 0; null for 2 k. HybriMoE's released code."""
    mrs_pool: str = "token_topp"
    """`token_topp`: every token keeps its highest scores, then their mean over the tokens; `mean_topp`: the highest of
    the mean, fewer than a block activates. Ours: the released code reads the first token alone."""
    max_admit: int | None = None
    """How many of a layer's transfers enter its slots, those of highest score first; null for all. Ours."""

    def __post_init__(self) -> None:
        require_misses(self.misses, PATHS)
        require_choice("mrs_pool", self.mrs_pool, POOLINGS)
        if not 0 < self.mrs_alpha <= 1:
            raise PolicyError(f"mrs_alpha is {self.mrs_alpha}: must be above 0 and at most 1")
        require_limit("max_admit", self.max_admit)
        if self.mrs_top is not None and self.mrs_top < 1:
            raise PolicyError(f"mrs_top is {self.mrs_top}: must be at least 1, or null for 2 k")


class Params(NamedTuple):
    """What never changes."""

    hybrid: bool  # misses are shared by hybrid scheduling
    path: MissPath  # else
    alpha: float
    top: int
    of_mean: bool
    max_admit: int


class State(NamedTuple):
    """What each layer remembers."""

    averages: NDArray[np.float64]  # [L, E] of router scores
    recency: NDArray[np.int64]  # [L, E] forward that activated the expert last, from 1


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities."""
    size = (shape.num_layers, shape.num_experts)
    return State(np.zeros(size), np.zeros(size, np.int64)), nobody_resident(shape), equal_capacity(shape, slots)


@jit
def average(averages, ids, scores, alpha, top, of_mean):
    """Move the averages of one layer towards the highest scores of its tokens.

    Source: HybriMoE, minus-recent-score caching: S = alpha * TopP(s) + (1 - alpha) * S.
    Differs: s is a mean over the tokens of a forward, of which the source has one.

    Args:
        averages: [E], changed in place.
        ids: [T, S] experts with known scores, the others having 0.
        scores: [T, S].
        alpha: weight of these scores.
        top: how many scores count; equal ones by lower id.
        of_mean: of the mean over the tokens, and not of every token.
    """
    num_tokens, num_known = ids.shape
    mean = np.zeros(averages.size, np.float64)
    places = np.arange(num_known)
    for token in range(num_tokens):
        if not of_mean:
            lowest_first(places, top, -scores[token], ids[token])
        for place in places[: num_known if of_mean else top]:
            mean[ids[token, place]] += scores[token, place] / num_tokens
    if of_mean:
        experts = np.arange(mean.size)
        lowest_first(experts, top, -mean, np.arange(mean.size))
        mean[experts[top:]] = 0.0
    for expert in range(averages.size):
        averages[expert] = alpha * mean[expert] + (1.0 - alpha) * averages[expert]


@jit
def decide(params, state, step, view):
    """Average the scores, serve the misses, and retain the highest averages of residents and transfers.

    Equal averages: the last activated stays, then the lower id.

    Source: HybriMoE, its cache management and scheduling, and its released code.
    Differs: prefetching by the next layers' gates, which the code leaves off, is not part of it. The released code
    takes every forward of several tokens for prefill, and copies all its misses; here only a prompt's first forward
    is that, as for oled, and decode forwards of a block are scheduled with their true loads.
    """
    layer, resident = step.layer, view.resident[step.layer]
    averages, recency = state.averages[layer], state.recency[layer]
    if step.signals.score_ids.shape[1] > 0:
        average(averages, step.signals.score_ids, step.signals.scores, params.alpha, params.top, params.of_mean)
    else:
        average(averages, step.expert_ids, step.gates, params.alpha, params.top, params.of_mean)
    for expert in range(step.load.size):
        if step.load[expert] > 0:
            recency[expert] = step.forward + 1
    if params.hybrid and step.kind != _PREFILL:
        transfers, on_cpu = hybrid_split(step.load, missed_of(step.load, resident), view.estimates)
    else:
        transfers, on_cpu = serve(params.path, step, view)
    held = with_admitted(resident, transfers, params.max_admit, averages, recency)
    return plain_plan(transfers, on_cpu, best(held, view.capacity[layer], averages, recency))


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: `misses=oled` without calibration, or neither router scores nor gates.
    """
    if not context.has_signals:
        context.require("gates")
    hybrid = knobs.misses == "hss"
    path = miss_path("h2d" if hybrid else knobs.misses, context)
    params = Params(
        hybrid=hybrid,
        path=path,
        alpha=float(knobs.mrs_alpha),
        top=2 * context.shape.top_k if knobs.mrs_top is None else knobs.mrs_top,
        of_mean=knobs.mrs_pool == "mean_topp",
        max_admit=limit_of(knobs.max_admit),
    )
    warnings = ()
    if not context.has_signals:
        warnings = ("the trace has no router scores: gates stand for those of routed experts, and all others count 0",)
    return Policy(
        "hybrimoe",
        params,
        init,
        decide,
        misses=knobs.misses,
        reads_estimates=hybrid or path.split,
        reads_signals=True,
        warnings=warnings,
    )
