"""Keep what calibration used most, and compute a miss where it is done sooner (Fiddler)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.knobs import require_choice
from policies.placement import highest_of_each_layer
from policies.retention import by_priority, equal_capacity, ids_of, missed_of
from tracer.schema import ModelShape

OBJECTIVES = ("sum", "max")
_MAX = OBJECTIVES.index("max")


@dataclass
class Knobs:
    """What can be chosen."""

    fd_obj: str = "sum"
    """What the split of a layer's misses keeps low. `sum`: the time of all experts together, so that each goes where
    it takes less, as the released code and the paper have it; `max`: the longer of the two sides, as a comment in
    that code has it. Either way both sides run side by side here."""

    def __post_init__(self) -> None:
        require_choice("fd_obj", self.fd_obj, OBJECTIVES)


class Params(NamedTuple):
    """What never changes."""

    objective: int  # index into OBJECTIVES


@jit
def decide(params, state, step, view):
    """Copy a miss, or compute it on the CPU where its tokens take less than the copy; none is admitted.

    Source: Fiddler, its comparison of CPU time and transfer time of an expert, and its one buffer for copies.
    """
    resident = view.resident[step.layer]
    missed = missed_of(step.load, resident)
    if params.objective == _MAX:
        copied = _shortest_longer_side(step.load, missed, view.estimates)
    else:
        copied = _soonest(step.load, missed, view.estimates)
    return plain_plan(ids_of(copied), ids_of(missed & ~copied), resident.copy())


@jit
def _soonest(load, missed, estimates):
    copied = np.zeros(load.size, np.bool_)
    for expert in range(load.size):
        cpu_ns = estimates.cpu_b0_ns + estimates.cpu_b1_ns * load[expert]
        copied[expert] = missed[expert] and cpu_ns >= estimates.h2d_ns
    return copied


@jit
def _shortest_longer_side(load, missed, estimates):
    # All copies take the same time, so whatever their number, they are best those of the highest loads.
    ids = by_priority(missed, load)
    cpu_ns = 0
    for expert in ids:
        cpu_ns += estimates.cpu_b0_ns + estimates.cpu_b1_ns * load[expert]
    num_copies, shortest_ns = 0, cpu_ns
    for index in range(ids.size):
        cpu_ns -= estimates.cpu_b0_ns + estimates.cpu_b1_ns * load[ids[index]]
        longer_ns = max((index + 1) * estimates.h2d_ns, cpu_ns)
        if longer_ns <= shortest_ns:  # ties to the GPU
            num_copies, shortest_ns = index + 1, longer_ns
    copied = np.zeros(load.size, np.bool_)
    for expert in ids[:num_copies]:
        copied[expert] = True
    return copied


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: there is no calibration.
    """
    load = context.calibration.load

    def init(params: Params, shape: ModelShape, slots: int) -> tuple[tuple[()], NDArray[np.bool_], NDArray[np.int64]]:
        capacity = equal_capacity(shape, slots)
        return (), highest_of_each_layer(load, capacity), capacity

    return Policy(
        "fiddler", Params(OBJECTIVES.index(knobs.fd_obj)), init, decide, misses="fiddler", reads_estimates=True
    )
