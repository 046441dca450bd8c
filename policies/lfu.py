"""Keep the experts that were activated most often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.knobs import require_choice
from policies.lru import ORDERS, touch
from policies.misses import MissPath, miss_path, require_misses, serve
from policies.retention import best, equal_capacity, nobody_resident, with_transfers
from tracer.schema import ModelShape

INCREMENTS = ("1", "n_e")


@dataclass
class Knobs:
    """What can be chosen."""

    lfu_inc: str = "1"
    """What a forward adds to the count of an expert that it activates: `1`, or `n_e`, its load in tokens.

    No source: OLED-MoE compares with LFU (section 5.3) and does not say what it counts.
    """
    lru_order: str = "hits_first"
    """Order in which the experts of one forward are touched, for ties; see the knob of `lru`. No source."""
    misses: str = "h2d"
    """`h2d`: every miss is copied; `oled`: split between copies and the CPU as OLED-MoE does (section 4.4)."""

    def __post_init__(self) -> None:
        self.lfu_inc = str(self.lfu_inc)  # in Python and YAML, 1 is a number
        require_choice("lfu_inc", self.lfu_inc, INCREMENTS)
        require_choice("lru_order", self.lru_order, ORDERS)
        require_misses(self.misses)


class Params(NamedTuple):
    """What never changes."""

    by_load: bool
    order: int  # index into lru.ORDERS
    path: MissPath


class State(NamedTuple):
    """What each layer remembers, of evicted experts too."""

    counts: NDArray[np.int64]  # [L, E]
    touches: NDArray[np.int64]  # [L, E] time of last touch, 0 if never
    clock: NDArray[np.int64]  # [1] time of the last touch of all


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities."""
    size = (shape.num_layers, shape.num_experts)
    state = State(np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(1, np.int64))
    return state, nobody_resident(shape), equal_capacity(shape, slots)


@jit
def decide(params, state, step, view):
    """Count what is activated and retain the most counted of residents and transfers.

    What is activated now stays before what is not; among equal counts, the last touched stays. Counts survive
    eviction and do not age.

    Source: OLED-MoE, section 5.3 (LFU); counts that survive eviction as in MoE-Infinity's dispatcher.
    """
    resident = view.resident[step.layer]
    transfers, on_cpu = serve(params.path, step, view)
    touch(params.order, state.touches, state.clock, step, resident)
    counts, times = state.counts[step.layer], state.touches[step.layer]
    held = with_transfers(resident, transfers)
    now = np.zeros(held.size, np.bool_)
    num_now = 0
    for expert in range(held.size):
        if step.load[expert] > 0:
            counts[expert] += step.load[expert] if params.by_load else 1
            now[expert] = held[expert]
            num_now += held[expert]
            held[expert] = False
    capacity = view.capacity[step.layer]
    retained = best(now, capacity, counts, times)
    older = best(held, max(capacity - num_now, 0), counts, times)
    for expert in range(held.size):
        if older[expert]:
            retained[expert] = True
    return plain_plan(transfers, on_cpu, retained)


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: `misses=oled` without calibration.
    """
    path = miss_path(knobs.misses, context)
    params = Params(knobs.lfu_inc == "n_e", ORDERS.index(knobs.lru_order), path)
    return Policy("lfu", params, init, decide, misses=knobs.misses, reads_estimates=path.split)
