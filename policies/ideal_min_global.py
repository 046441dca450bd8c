"""Bound on residency, not on time: keep what the run needs again soonest, in one pool of slots for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.ideal_min import NEVER, Params, State, foresee, look_ahead
from policies.jit import jit
from policies.misses import miss_path, require_misses, serve
from policies.pool_retention import capacity_of
from policies.retention import best, nobody_resident
from tracer.schema import ModelShape


@dataclass
class Knobs:
    """What can be chosen."""

    misses: str = "oled"
    """`h2d`: every miss is copied, and hits are as many as any policy without prefetch can reach, however it divides
    the slots among layers; `oled`: split with the CPU (OLED-MoE, section 4.4), and only what was copied can be kept.

    The bound stands only beside policies of the same miss path.
    """

    def __post_init__(self) -> None:
        require_misses(self.misses)


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with all slots in one pool."""
    nearness = np.full((shape.num_layers, shape.num_experts), -NEVER, np.int64)
    return State(nearness), nobody_resident(shape), capacity_of("global", shape, slots)


@jit
def decide(params, state, step, view):
    """Retain those residents and transfers of all layers whose next use is nearest, in the order of layer executions.

    What is needed in the same forward comes layer by layer, so ties go to the lower layer, then to the lower id.

    Source: OLED-MoE, section 5.1 (ideal cache bound), for capacities that may change at any time.
    Differs: the greedy is exact for `misses=h2d`; what runs on the CPU cannot be retained and narrows the choice.
    """
    transfers, on_cpu = serve(params.path, step, view)
    look_ahead(params.future, state.nearness, step)
    held, first = view.resident.copy().reshape(-1), step.layer * step.load.size
    for expert in transfers:
        held[first + expert] = True
    nearness = state.nearness.reshape(-1)
    return plain_plan(transfers, on_cpu, best(held, view.capacity[0], nearness, nearness))


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs, built from the passes of the run.

    Raises:
        PolicyError: there are no passes, or `misses=oled` without calibration.
    """
    path = miss_path(knobs.misses, context)
    return Policy(
        "ideal_min_global",
        Params(path, foresee(context)),
        init,
        decide,
        pool="global",
        misses=knobs.misses,
        reads_estimates=path.split,
        clairvoyant=True,
    )
