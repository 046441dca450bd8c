"""Keep the experts that were activated last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.knobs import limit_of, require_choice, require_limit
from policies.misses import MissPath, miss_path, require_misses, serve
from policies.pool_retention import capacity_of, require_pool, retain
from policies.retention import by_priority, equal_capacity, ids_of, nobody_resident
from tracer.schema import ModelShape

ORDERS = ("hits_first", "misses_first", "id", "gate")
_HITS_FIRST, _MISSES_FIRST, _GATE = ORDERS.index("hits_first"), ORDERS.index("misses_first"), ORDERS.index("gate")


@dataclass
class Knobs:
    """What can be chosen."""

    lru_order: str = "hits_first"
    """Order in which the experts of one forward are touched, which decides what leaves when not all of them fit.

    `hits_first`: hits, then misses, each by ascending id; `misses_first`: the other way round; `id`: all by ascending
    id; `gate`: all by ascending sum of gates. OLED-MoE does not say which; under `id` alone what a cache of C slots
    holds is always part of what one of C + 1 holds.
    """
    pool: str = "layer"
    """`layer`: equal slots for each layer, as OLED-MoE, section 5.1, has it; `global`: one pool for all layers, as
    MoE-Infinity and FineMoE have. Ours, to tell what a pool does from what a policy does in it."""
    misses: str = "h2d"
    """`h2d`: every miss is copied; `oled`: split between copies and the CPU as OLED-MoE does (section 4.4)."""
    max_admit: int | None = None
    """How many of a layer's transfers may stay, those touched last first; null for all. Ours: a bound as llama.cpp's
    per-layer caches discuss it."""

    def __post_init__(self) -> None:
        require_choice("lru_order", self.lru_order, ORDERS)
        require_misses(self.misses)
        require_pool(self.pool)
        require_limit("max_admit", self.max_admit)


class Params(NamedTuple):
    """What never changes."""

    order: int  # index into ORDERS
    path: MissPath
    max_admit: int


class State(NamedTuple):
    """What each layer remembers."""

    touches: NDArray[np.int64]  # [L, E] time of last touch, 0 if never
    clock: NDArray[np.int64]  # [1] time of the last touch of all


@jit
def touch(order, touches, clock, step, resident):
    """Give every activated expert of the step's layer a time of its own, in the given order.

    Args:
        order: index into ORDERS.
        touches: [L, E] times of last touch, changed in place.
        clock: [1] time of the last touch of all, changed in place.
        step: the layer's Step.
        resident: [E] residents of the layer at the gate.
    """
    times, load = touches[step.layer], step.load
    if order in (_HITS_FIRST, _MISSES_FIRST):
        now = clock[0]
        for turn in range(2):
            hits = (turn == 0) == (order == _HITS_FIRST)
            for expert in range(load.size):  # a branch would be guessed wrongly often
                touched = (load[expert] > 0) & (resident[expert] == hits)
                now += touched
                times[expert] = now if touched else times[expert]
        clock[0] = now
        return
    for expert in _by_gates(step) if order == _GATE else ids_of(load):
        clock[0] += 1
        times[expert] = clock[0]


@jit
def _by_gates(step):
    against = np.zeros(step.load.size, np.float64)  # minus the sums of gates: the lowest sum comes first
    for token in range(step.expert_ids.shape[0]):
        for k in range(step.expert_ids.shape[1]):
            against[step.expert_ids[token, k]] -= step.gates[token, k]
    return by_priority(step.load, against)


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities."""
    state = State(np.zeros((shape.num_layers, shape.num_experts), np.int64), np.zeros(1, np.int64))
    return state, nobody_resident(shape), equal_capacity(shape, slots)


@jit
def decide(params, state, step, view):
    """Touch what is activated and retain the last touched of residents and transfers.

    Hits are decided before anything is replaced, and a batch is touched as a whole: experts that are activated
    together do not evict each other one by one.

    Source: OLED-MoE, section 5.1 (naive LRU).
    """
    transfers, on_cpu = serve(params.path, step, view)
    touch(params.order, state.touches, state.clock, step, view.resident[step.layer])
    return plain_plan(transfers, on_cpu, retain(step, view, transfers, state.touches, state.touches, params.max_admit))


def require_order(order: str, context: Context) -> None:
    """Refuse an order of touches that the trace of the run cannot give.

    Raises:
        PolicyError: `gate`, and it lacks gates.
    """
    if order == "gate":
        context.require("gates", "lru_order=gate", "policy.lru_order=hits_first")


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: `misses=oled` without calibration, or gates that the trace lacks are asked for.
    """
    require_order(knobs.lru_order, context)
    path = miss_path(knobs.misses, context)
    params = Params(ORDERS.index(knobs.lru_order), path, limit_of(knobs.max_admit))

    def init_pool(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
        state, resident, _ = init(params, shape, slots)
        return state, resident, capacity_of(knobs.pool, shape, slots)

    return Policy("lru", params, init_pool, decide, pool=knobs.pool, misses=knobs.misses, reads_estimates=path.split)
