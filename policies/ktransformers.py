"""Keep what calibration used most, and compute every miss on the CPU (KTransformers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.knobs import require_choice
from policies.placement import first_of_each_layer, highest_of_all, highest_of_each_layer
from policies.retention import best, equal_capacity, ids_of
from tracer.schema import ModelShape

PLACES = ("uniform", "frequency_layer", "frequency_global")
DYNAMICS = ("none", "prefill")


@dataclass
class Knobs:
    """What can be chosen."""

    kt_place: str = "frequency_layer"
    """Which experts start on the GPU, by the tokens that calibration routed to them in decode forwards.

    `frequency_layer`: the most used of each layer, layers having equal slots, which is ours. From the released code:
    `uniform`, its default, the first ids of each layer; `frequency_global`, its `frequency`, the most used of all
    layers together, so that layers have unequal slots and some may have none. Its `front-loading`, which fills the
    first layers first, and `random` are left out.
    """
    kt_dyn: str = "none"
    """`prefill`: each prompt replaces the residents of a layer by those that its tokens chose most, as the released
    code does for long ones; here it does so for all, which is its strongest form. `none`: they never change."""

    def __post_init__(self) -> None:
        require_choice("kt_place", self.kt_place, PLACES)
        require_choice("kt_dyn", self.kt_dyn, DYNAMICS)


class Params(NamedTuple):
    """What never changes."""

    follows_prompts: bool


@jit
def decide(params, state, step, view):
    """Compute every miss on the CPU and retain the residents; prompts may choose new ones.

    What a prompt chooses and is missed is copied and stays; equal counts go to the lower id. Experts that no token of
    the prompt chose have nothing to be copied for, so they stay only where they are resident and slots are left.

    Source: KTransformers, its placement of routed experts on GPU and CPU, and the update of its SGLang integration.
    Differs: the released code computes a layer wholly on the GPU when it follows a prompt; here what is not to stay
    runs on the CPU there as well. Deferring experts to the next layer changes the model's output and is left out.
    """
    layer, load = step.layer, step.load
    resident = view.resident[layer]
    retained = resident.copy()
    if params.follows_prompts:
        counts = _prompt_load(step)
        if counts.sum() > 0:
            retained = best(resident | (counts > 0), view.capacity[layer], counts, counts)
    transfers = ids_of(retained & ~resident)
    return plain_plan(transfers, ids_of((load > 0) & ~resident & ~retained), retained)


@jit
def _prompt_load(step):
    counts = np.zeros(step.load.size, np.int64)
    for token in range(step.block.size):
        if step.block[token] < 0:
            for k in range(step.expert_ids.shape[1]):
                counts[step.expert_ids[token, k]] += 1
    return counts


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: a placement by frequency without calibration.
    """
    load = None if knobs.kt_place == "uniform" else context.calibration.load

    def init(params: Params, shape: ModelShape, slots: int) -> tuple[tuple[()], NDArray[np.bool_], NDArray[np.int64]]:
        capacity = equal_capacity(shape, slots)
        if load is None:
            return (), first_of_each_layer(capacity, shape.num_experts), capacity
        if knobs.kt_place == "frequency_layer":
            return (), highest_of_each_layer(load, capacity), capacity
        resident = highest_of_all(load, slots)
        return (), resident, resident.sum(axis=1)

    follows = knobs.kt_dyn == "prefill"
    return Policy(
        "ktransformers", Params(follows), init, decide, misses="cpu", admits_by="kt_dyn=prefill" if follows else ""
    )
