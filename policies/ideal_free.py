"""Bound on residency, not on time: before each layer, its busiest experts are placed at no cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.misses import MissPath, miss_path, require_misses, serve
from policies.retention import best, equal_capacity, nobody_resident
from tracer.schema import ModelShape


@dataclass
class Knobs:
    """What can be chosen."""

    misses: str = "oled"
    """Path of what does not fit: `h2d`, all copied; `oled`, split with the CPU (OLED-MoE, section 4.4).

    The bound stands only beside policies of equal fixed capacities and the same miss path.
    """

    def __post_init__(self) -> None:
        require_misses(self.misses)


class Params(NamedTuple):
    """What never changes."""

    path: MissPath


class State(NamedTuple):
    """What `place` needs to know."""

    capacity: NDArray[np.int64]  # [L]


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities."""
    capacity = equal_capacity(shape, slots)
    return State(capacity), nobody_resident(shape), capacity


@jit
def place(params, state, step):
    """The activated experts of highest load, ties to the lower id, as many as fit.

    No policy of the same fixed capacities finds more activated experts resident, whatever it prefetches. It is a
    bound on residency, not on time: fewest misses need not be the fastest.

    Source: OLED-MoE, section 5.1 (ideal cache bound), read literally: loading costs nothing.
    """
    activated = np.empty(step.load.size, np.bool_)
    for expert in range(step.load.size):
        activated[expert] = step.load[expert] > 0
    return best(activated, state.capacity[step.layer], step.load, step.load)


@jit
def decide(params, state, step, view):
    """Serve what did not fit, and retain what was placed."""
    transfers, on_cpu = serve(params.path, step, view)
    return plain_plan(transfers, on_cpu, view.resident[step.layer].copy())


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: `misses=oled` without calibration.
    """
    path = miss_path(knobs.misses, context)
    return Policy(
        "ideal_free", Params(path), init, decide, place=place, misses=knobs.misses, reads_estimates=path.split
    )
