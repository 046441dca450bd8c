"""Keep the experts of most importance in the last forward, changing few at a time (SwapMoE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Plan, Policy, PolicyError, plain_plan
from policies.jit import jit
from policies.knobs import require_choice, require_limit
from policies.placement import highest_of_each_layer
from policies.retention import by_priority, equal_capacity
from policies.streaming import stream
from tracer.schema import ModelShape

PLANS = ("uniform", "given")


@dataclass
class Knobs:
    """What can be chosen."""

    swap_m: int = 8
    """How many experts of a layer at most are swapped in by a forward. SwapMoE, section 3.2, amortises updates over
    inputs and has no number."""
    swap_f: int = 1
    """Every so many forwards swap. SwapMoE, section 3.4.1, raises the frequency until latency suffers."""
    swap_plan: str = "uniform"
    """Slots of the layers: `uniform`, equal ones; `given`, those of `swap_slots`. SwapMoE, section 3.4.2, searches
    for them by the accuracy that restricted routing costs, and here routing is not restricted."""
    swap_slots: tuple[int, ...] = ()
    """Slots of each layer, for `swap_plan=given`. Ours, in place of the search."""
    swap_from_staging: bool = True
    """Whether a miss that is swapped in stays where it was copied to; else it is copied once more, as a prefetch
    beside the next layers. Ours: SwapMoE, section 3.2, loads asynchronously, and has no misses to copy."""

    def __post_init__(self) -> None:
        require_limit("swap_m", self.swap_m)
        require_choice("swap_plan", self.swap_plan, PLANS)
        if self.swap_f < 1:
            raise PolicyError(f"swap_f is {self.swap_f}: must be at least 1")
        if bool(self.swap_slots) != (self.swap_plan == "given"):
            raise PolicyError("swapmoe: swap_slots must be given with swap_plan=given, and only then")


class Params(NamedTuple):
    """What never changes."""

    most: int  # experts that a forward swaps into a layer
    every: int  # forwards
    from_staging: bool


class State(NamedTuple):
    """What each layer remembers."""

    recency: NDArray[np.int64]  # [L, E] forward that activated the expert last, from 1
    score: NDArray[np.float64]  # [L, E] importance in the layer's last execution; 0 if not activated


@jit
def weigh(step, norms, importance):
    """Write the importance of each expert of the step's layer: the gates of its tokens, each times the token's norm.

    Source: SwapMoE, equation 1.
    Differs: gates are normalised, and the norm of an expert's weights, which no trace has, is 1.

    Args:
        step: the layer's Step.
        norms: [T] of the router input; [0] where the trace lacks them, which then are 1.
        importance: [E] written.
    """
    importance[:] = 0.0
    for token in range(step.expert_ids.shape[0]):
        norm = norms[token] if norms.size > 0 else 1.0
        for k in range(step.expert_ids.shape[1]):
            importance[step.expert_ids[token, k]] += norm * step.gates[token, k]


@jit
def swapped(candidates, resident, num_free, most, importance, recency):
    """Choose misses to swap in, the most important first: each fills a free slot or replaces a resident below it.

    The resident of lowest importance leaves; of equal ones the least recently activated, then the highest id.

    Source: SwapMoE, section 3.2 (replacing unimportant experts by important ones).

    Args:
        candidates: [E] bool.
        resident: [E] bool, changed in place to what is resident afterwards.
        num_free: slots of the layer.
        most: how many may enter.
        importance: [E].
        recency: [E].

    Returns:
        Those that enter, in this order: int64.
    """
    entering = by_priority(candidates, importance)[:most]
    for index in range(entering.size):
        if index >= num_free:
            lowest = -1
            for other in range(resident.size):
                if resident[other] and (
                    lowest < 0
                    or importance[other] < importance[lowest]
                    or (importance[other] == importance[lowest] and recency[other] <= recency[lowest])
                ):
                    lowest = other
            if lowest < 0 or importance[lowest] >= importance[entering[index]]:
                return entering[:index]
            resident[lowest] = False
        resident[entering[index]] = True
    return entering


@jit
def decide(params, state, step, view):
    """Copy every miss, and swap in the most important ones, from staging or by a second copy.

    Source: SwapMoE, section 3.2.
    Differs: routing is not restricted to residents, so that the model's output stays and there are misses.
    """
    layer, load = step.layer, step.load
    importance, recency = state.score[layer], state.recency[layer]
    weigh(step, step.signals.input_norm, importance)
    for expert in range(load.size):
        if load[expert] > 0:
            recency[expert] = step.forward + 1
    transfers, retained = stream(step, view)
    after = view.resident[layer].copy()
    swaps = step.forward % params.every == params.every - 1
    candidates = (load > 0) & ~retained
    entering = swapped(candidates, after, view.free_slots, params.most if swaps else 0, importance, recency)
    nothing = np.empty(0, np.int64)
    if params.from_staging:
        return plain_plan(transfers, nothing, after)
    prefetches = np.empty((entering.size, 2), np.int64)
    for row in range(entering.size):
        prefetches[row, 0], prefetches[row, 1] = layer, entering[row]
    return Plan(transfers, nothing, retained, prefetches, np.zeros((entering.size, 2), np.float64), False, 0)


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs.

    Raises:
        PolicyError: there is no calibration, there are no gates, or `swap_slots` are not one number for each layer.
    """
    context.require("gates")
    importance = context.calibration.importance
    num_layers, num_experts = importance.shape
    given = np.array(knobs.swap_slots, np.int64)
    if given.size not in (0, num_layers) or (given < 1).any() or (given > num_experts).any():
        raise PolicyError(
            f"swapmoe: swap_slots are {given.tolist()}: must be {num_layers}, one for each layer, of 1 to {num_experts}"
        )

    def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
        capacity = equal_capacity(shape, slots)
        if given.size:
            if given.sum() != slots:
                raise PolicyError(
                    f"swapmoe: swap_slots add up to {given.sum()}: must be {slots}, the slots of all layers"
                )
            capacity = given.copy()
        size = (shape.num_layers, shape.num_experts)
        return State(np.zeros(size, np.int64), np.zeros(size)), highest_of_each_layer(importance, capacity), capacity

    warnings = ()
    if not context.has_signals:
        warnings = ("the trace has no norms of the router input: importance counts gates alone",)
    return Policy(
        "swapmoe",
        Params(knobs.swap_m, knobs.swap_f, knobs.swap_from_staging),
        init,
        decide,
        reads_signals=True,
        prefetches=not knobs.swap_from_staging and knobs.swap_m > 0,
        admits_by=f"swap_m={knobs.swap_m}" if knobs.swap_from_staging and knobs.swap_m > 0 else "",
        warnings=warnings,
    )
