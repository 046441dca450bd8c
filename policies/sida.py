"""Predict from the input tokens what a whole request, block or forward needs, and prefetch it (SiDA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import MOST_REQUESTS, Context, Plan, Policy, PolicyError
from policies.jit import jit
from policies.knobs import require_choice
from policies.retention import best, by_priority, equal_capacity, nobody_resident
from policies.streaming import stream
from policies.unit_prediction import UNITS, Rows, add_up, begins, last_in, token_rows, true_rows
from tracer.schema import ModelShape

OVERFLOWS = ("topC", "fifo")


@dataclass
class Knobs:
    """What can be chosen."""

    sida_unit: str = "request"
    """What is predicted at once, at the first gate of its first forward, from that forward's input tokens: `request`,
    from the prompt, as OLED-MoE (section 2.2) counts SiDA among the request-level systems; `block`; or `iter`, each
    forward by itself, as SiDA, section 3.3, does for batches. In a batch all is predicted anew when a unit of any
    request begins."""
    sida_over: str = "topC"
    """What of a layer's predicted experts is placed where they are more than its slots: `topC`, those of highest
    summed probability, which is ours; `fifo`, those that the tokens' lists named last, the tokens in order, as SiDA,
    section 3.1, evicts what came first, and in what is left of the slots those of highest summed probability."""
    oracle_noise: float | None = None
    """null: a table of the experts of each input token, counted in calibration, predicts; a token that it lacks is
    taken for an average one, which chooses by the load of calibration. SiDA, sections 3.4 and 4, trains a network for
    it. A number from 0 to 1: what the unit will activate is known, and this share of it is replaced by experts that
    it will not. Ours, to see what accuracy is worth."""

    def __post_init__(self) -> None:
        require_choice("sida_unit", self.sida_unit, UNITS)
        require_choice("sida_over", self.sida_over, OVERFLOWS)
        if self.oracle_noise is not None and not 0 <= self.oracle_noise <= 1:
            raise PolicyError(f"oracle_noise is {self.oracle_noise}: must be from 0 to 1, or null for the token table")


class Params(NamedTuple):
    """What never changes. V tokens."""

    unit: int  # index into UNITS
    first_out: bool
    foresees: bool  # rows are units of the run, else of tokens
    token_ids: NDArray[np.int64]  # [V] ascending; the row behind theirs is of all others
    rows: Rows


class State(NamedTuple):
    """The sets of the unit that is going on."""

    score: NDArray[np.float64]  # [L, E] summed probability; 0 outside the layer's set
    order: NDArray[np.int64]  # [L, E] the set of each layer, highest score first, then -1
    members: NDArray[np.int64]  # [256] requests of the last forward, then -1
    num_begun: NDArray[np.int64]  # [1] units


@jit
def decide(params, state, step, view):
    """Copy every miss without admitting it, and queue anew what the unit's sets lack, the nearest execution first.

    Source: SiDA, section 3 (data-aware placement of experts), and its released code.
    Differs: the router decides and predictions only place experts, so that the model's output stays; a forward's
    tokens depend on the forward before, so what it needs cannot be predicted while that one runs. A table of tokens
    stands for the LSTM, which needs training for each model.
    """
    if step.layer == 0 and begins(params.unit, state.members, step.request, step.iteration):
        _predict(params, state, step, view.capacity)
    transfers, retained = stream(step, view)
    prefetches, priority = _lacking(state, step.layer, view)
    return Plan(transfers, np.empty(0, np.int64), retained, prefetches, priority, True, 0)


@jit
def _predict(params, state, step, capacity):
    num_layers, num_experts = state.score.shape
    rows, chosen = params.rows, _rows_of(params, state, step.signals.token_ids)
    for layer in range(num_layers):
        score = state.score[layer]
        add_up(rows, chosen, layer, num_layers, score)
        first = score
        if params.first_out:
            first = last_in(rows, chosen, layer, num_layers, capacity[layer], num_experts) * 1.0
        placed = best(score > 0.0, capacity[layer], first, score)
        for expert in range(num_experts):
            if not placed[expert]:
                score[expert] = 0.0
        ranked = by_priority(placed, score)
        state.order[layer, : ranked.size] = ranked
        state.order[layer, ranked.size :] = -1


@jit
def _rows_of(params, state, token_ids):
    if not params.foresees:
        rows = np.empty(token_ids.size, np.int64)
        for token in range(token_ids.size):
            row = np.searchsorted(params.token_ids, token_ids[token])
            known = row < params.token_ids.size and params.token_ids[row] == token_ids[token]
            rows[token] = row if known else params.token_ids.size
        return rows
    row = state.num_begun[0]
    state.num_begun[0] += 1
    if (row + 1) * state.score.shape[0] >= params.rows.offsets.size:
        raise PolicyError("a clairvoyant policy ran on more forwards than it was built from")
    return np.full(1, row)


@jit
def _lacking(state, layer, view):
    num_layers = state.order.shape[0]
    prefetches, priority = np.empty((view.capacity.sum(), 2), np.int64), np.empty((view.capacity.sum(), 2), np.float64)
    count = 0
    for ahead in range(1, num_layers + 1):
        target = (layer + ahead) % num_layers
        for expert in state.order[target]:
            if expert < 0:
                break
            if not view.resident[target, expert] and not view.in_flight[target, expert]:
                prefetches[count, 0], prefetches[count, 1] = target, expert
                priority[count, 0], priority[count, 1] = ahead, -state.score[target, expert]
                count += 1
    return prefetches[:count], priority[:count]


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities and no set."""
    size = (shape.num_layers, shape.num_experts)
    state = State(np.zeros(size), np.full(size, -1), np.full(MOST_REQUESTS, -1), np.zeros(1, np.int64))
    return state, nobody_resident(shape), equal_capacity(shape, slots)


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: no calibration or no token ids for the token table, or no passes to know beforehand.
    """
    unit, noise = UNITS.index(knobs.sida_unit), knobs.oracle_noise
    foresees = noise is not None
    if noise is not None:
        token_ids = np.empty(0, np.int64)
        rows = true_rows(context.passes, context.shape, unit, noise, context.seed)
        if rows.offsets.size == 1:
            raise PolicyError(f"{context.policy} needs the passes of the run, and there are none")
    else:
        context.require("token_ids", instead="policy.oracle_noise=0")
        token_ids = context.calibration.token_ids
        rows = token_rows(context.calibration, context.shape.top_k)
    warnings: tuple[str, ...] = ()
    if foresees:
        warnings = (f"oracle_noise={knobs.oracle_noise} predicts from the run itself, which no running system can",)
    elif not token_ids.size:
        warnings = ("calibration knows no input token: all are predicted as average ones",)
    return Policy(
        "sida",
        Params(unit, knobs.sida_over == "fifo", foresees, token_ids, rows),
        init,
        decide,
        reads_signals=True,
        prefetches=True,
        clairvoyant=foresees,
        warnings=warnings,
    )
