"""Keep the experts that were activated most often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, PolicyError, plain_plan
from policies.jit import jit
from policies.knobs import limit_of, require_choice, require_limit
from policies.lru import ORDERS, require_order, touch
from policies.misses import MissPath, miss_path, require_misses, serve
from policies.pool_retention import capacity_of, require_pool, retain
from policies.retention import nobody_resident
from tracer.schema import ModelShape

INCREMENTS = ("1", "n_e")


@dataclass
class Knobs:
    """What can be chosen."""

    lfu_inc: str = "1"
    """What a forward adds to the count of an expert that it activates: `1`, or `n_e`, its load in tokens.

    No source: OLED-MoE compares with LFU (section 5.3) and does not say what it counts.
    """
    lfu_decay: float = 1.0
    """What the counts of a layer are multiplied by whenever it runs, above 0 and at most 1: below 1 they age.
    Ours; MoE-Infinity's dispatcher never ages its counts, OLED-MoE does not say."""
    pool: str = "layer"
    """`layer`: equal slots for each layer; `global`: one pool for all layers, as MoE-Infinity's dispatcher has it."""
    lru_order: str = "hits_first"
    """Order in which the experts of one forward are touched, for ties; see the knob of `lru`. No source."""
    misses: str = "h2d"
    """`h2d`: every miss is copied; `oled`: split between copies and the CPU as OLED-MoE does (section 4.4)."""
    max_admit: int | None = None
    """How many of a layer's transfers may stay, those of highest count first; null for all. Ours, as in `lru`."""

    def __post_init__(self) -> None:
        self.lfu_inc = str(self.lfu_inc)  # in Python and YAML, 1 is a number
        require_choice("lfu_inc", self.lfu_inc, INCREMENTS)
        require_choice("lru_order", self.lru_order, ORDERS)
        require_misses(self.misses)
        require_pool(self.pool)
        require_limit("max_admit", self.max_admit)
        if not 0 < self.lfu_decay <= 1:
            raise PolicyError(f"lfu_decay is {self.lfu_decay}: must be above 0 and at most 1")


class Params(NamedTuple):
    """What never changes."""

    by_load: bool
    order: int  # index into lru.ORDERS
    path: MissPath
    decay: float
    max_admit: int


class State(NamedTuple):
    """What each layer remembers, of evicted experts too."""

    counts: NDArray[np.float64]  # [L, E]
    touches: NDArray[np.int64]  # [L, E] time of last touch, 0 if never
    clock: NDArray[np.int64]  # [1] time of the last touch of all


@jit
def decide(params, state, step, view):
    """Count what is activated and retain the most counted of residents and transfers.

    What is activated now stays before what is not; among equal counts, the last touched stays. Counts survive
    eviction.

    Source: OLED-MoE, section 5.3 (LFU); counts that survive eviction as in MoE-Infinity's dispatcher.
    """
    transfers, on_cpu = serve(params.path, step, view)
    touch(params.order, state.touches, state.clock, step, view.resident[step.layer])
    counts = state.counts[step.layer]
    for expert in range(counts.size):
        counts[expert] *= params.decay
        if step.load[expert] > 0:
            counts[expert] += step.load[expert] if params.by_load else 1
    retained = retain(step, view, transfers, state.counts, state.touches, params.max_admit)
    return plain_plan(transfers, on_cpu, retained)


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: `misses=oled` without calibration, or gates that the trace lacks are asked for.
    """
    require_order(knobs.lru_order, context)
    path = miss_path(knobs.misses, context)
    params = Params(
        knobs.lfu_inc == "n_e", ORDERS.index(knobs.lru_order), path, float(knobs.lfu_decay), limit_of(knobs.max_admit)
    )

    def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
        size = (shape.num_layers, shape.num_experts)
        state = State(np.zeros(size), np.zeros(size, np.int64), np.zeros(1, np.int64))
        return state, nobody_resident(shape), capacity_of(knobs.pool, shape, slots)

    return Policy("lfu", params, init, decide, pool=knobs.pool, misses=knobs.misses, reads_estimates=path.split)
