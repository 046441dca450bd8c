"""Keep exactly what the previous forward activated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.knobs import limit_of, require_choice, require_limit
from policies.lru import ORDERS, init, require_order, touch
from policies.retention import best, ids_of, missed_of, with_admitted


@dataclass
class Knobs:
    """What can be chosen."""

    lru_order: str = "hits_first"
    """Order of touching, which decides what stays where a forward activates more than fits; see the knob of `lru`.
    No source."""
    max_admit: int | None = None
    """How many of a layer's transfers may stay, those touched last first; null for all. Ours, as in `lru`."""

    def __post_init__(self) -> None:
        require_choice("lru_order", self.lru_order, ORDERS)
        require_limit("max_admit", self.max_admit)


class Params(NamedTuple):
    """What never changes."""

    order: int  # index into lru.ORDERS
    max_admit: int


@jit
def decide(params, state, step, view):
    """Copy every miss and retain what is activated; of more than fits, the last touched.

    Source: OLED-MoE, section 3.2, as the naive use of overlap between iterations.
    """
    resident = view.resident[step.layer]
    touch(params.order, state.touches, state.clock, step, resident)
    times = state.touches[step.layer]
    transfers = ids_of(missed_of(step.load, resident))
    held = with_admitted(resident, transfers, params.max_admit, times, times)
    for expert in range(held.size):
        held[expert] &= step.load[expert] > 0
    return plain_plan(transfers, np.empty(0, np.int64), best(held, view.capacity[step.layer], times, times))


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: an order by gates, which the trace lacks.
    """
    require_order(knobs.lru_order, context)
    return Policy("prev_set", Params(ORDERS.index(knobs.lru_order), limit_of(knobs.max_admit)), init, decide)
