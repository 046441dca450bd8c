"""Keep exactly what the previous forward activated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.knobs import require_choice
from policies.lru import ORDERS, init, touch
from policies.retention import best, ids_of, missed_of


@dataclass
class Knobs:
    """What can be chosen."""

    lru_order: str = "hits_first"
    """Order of touching, which decides what stays where a forward activates more than fits; see the knob of `lru`.
    No source."""

    def __post_init__(self) -> None:
        require_choice("lru_order", self.lru_order, ORDERS)


class Params(NamedTuple):
    """What never changes."""

    order: int  # index into lru.ORDERS


@jit
def decide(params, state, step, view):
    """Copy every miss and retain what is activated; of more than fits, the last touched.

    Source: OLED-MoE, section 3.2, as the naive use of overlap between iterations.
    """
    resident = view.resident[step.layer]
    touch(params.order, state.touches, state.clock, step, resident)
    times = state.touches[step.layer]
    retained = best(step.load, view.capacity[step.layer], times, times)
    return plain_plan(ids_of(missed_of(step.load, resident)), np.empty(0, np.int64), retained)


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs."""
    return Policy("prev_set", Params(ORDERS.index(knobs.lru_order)), init, decide)
