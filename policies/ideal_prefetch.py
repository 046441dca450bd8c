"""Prefetch exactly what the next layers will activate, over the real link: what prediction could give at best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Plan, Policy, PolicyError
from policies.ideal_min import NEVER, Future, foresee, look_ahead
from policies.jit import jit
from policies.misses import MissPath, miss_path, require_misses, serve
from policies.retention import best, by_priority, equal_capacity, nobody_resident, with_transfers
from policies.steps import count_load
from tracer.schema import ModelShape, Pass

DEPTH = 3


@dataclass
class Knobs:
    """What can be chosen."""

    depth: int | None = None
    """Prefetch for so many of the next layer executions, in the next forward too; null: 3, or all layers where there
    are fewer. FineMoE, section 6.1, prefetches three layers ahead."""
    misses: str = "oled"
    """Path of what is missed all the same: `oled`, split with the CPU (OLED-MoE, section 4.4); `h2d`, all copied."""

    def __post_init__(self) -> None:
        require_misses(self.misses)


class Upcoming(NamedTuple):
    """What each layer execution of a run activates: 8 bytes an access, in the order of Future."""

    experts: NDArray[np.int32]  # [accesses] ascending within an execution
    loads: NDArray[np.int32]  # [accesses] tokens


class Params(NamedTuple):
    """What never changes."""

    path: MissPath
    future: Future
    upcoming: Upcoming
    first_use: NDArray[np.int64]  # [L, E] forward
    depth: int


class State(NamedTuple):
    """What ranks residents."""

    score: NDArray[np.float64]  # [L, E] minus the forward of next use, after the last execution of the layer


def read_upcoming(passes: Iterable[Pass], shape: ModelShape) -> tuple[Upcoming, NDArray[np.int64]]:
    """What each layer execution of the run activates, and the forward that first activates each expert, [L, E]."""
    first_use = np.full((shape.num_layers, shape.num_experts), NEVER, np.int64)
    experts, loads = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for forward, pass_ in enumerate(passes):
        load = count_load(pass_.expert_ids, shape.num_experts)
        first_use[(load > 0) & (first_use == NEVER)] = forward
        experts.append(np.nonzero(load)[1].astype(np.int32))
        loads.append(load[load > 0].astype(np.int32))
    return Upcoming(np.concatenate(experts), np.concatenate(loads)), first_use


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities."""
    return State(-params.first_use.astype(np.float64)), nobody_resident(shape), equal_capacity(shape, slots)


@jit
def decide(params, state, step, view):
    """Retain as `ideal_min` does, and prefetch what the next layer executions activate and is neither held nor coming.

    The nearest execution comes first, then its highest load, then the lowest id. A prefetch evicts the resident of
    farthest next use, never one that its own execution needs.

    Source: OLED-MoE, section 2.2 (prefetching within an iteration), with a predictor that never errs.
    """
    transfers, on_cpu = serve(params.path, step, view)
    look_ahead(params.future, state.score, step)
    retained = _nearest(step.layer, view, transfers, state.score)
    prefetches, priority = _wanted(params, step, view, retained)
    return Plan(transfers, on_cpu, retained, prefetches, priority, prefetches.shape[0] > 0, 0)


@jit
def _nearest(layer, view, transfers, score):
    flying = view.in_flight[layer]
    held = with_transfers(view.resident[layer], transfers)
    room = view.capacity[layer]
    for expert in range(held.size):
        if flying[expert]:  # has its slot already
            room -= 1
            held[expert] = False
    retained = best(held, room, score[layer], score[layer])
    for expert in transfers:
        if flying[expert]:
            retained[expert] = True
    return retained


@jit
def _wanted(params, step, view, retained):
    num_layers, num_experts = view.resident.shape
    offsets = params.future.offsets
    now = step.forward * num_layers + step.layer
    end = min(now + params.depth + 1, offsets.size - 1)
    most = offsets[end] - offsets[now + 1]
    prefetches, priority = np.empty((most, 2), np.int64), np.empty((most, 2), np.float64)
    count = 0
    for execution in range(now + 1, end):
        layer = execution % num_layers
        load = np.zeros(num_experts, np.float64)
        for access in range(offsets[execution], offsets[execution + 1]):
            expert = params.upcoming.experts[access]
            is_held = view.resident[layer, expert] or (layer == step.layer and retained[expert])
            if not is_held and not view.in_flight[layer, expert]:
                load[expert] = params.upcoming.loads[access]
        for expert in by_priority(load, load):
            prefetches[count, 0], prefetches[count, 1] = layer, expert
            priority[count, 0], priority[count, 1] = execution - now, -load[expert]
            count += 1
    return prefetches[:count], priority[:count]


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs, built from the passes of the run.

    Raises:
        PolicyError: `depth` beyond the layers, no passes, or `misses=oled` without calibration.
    """
    num_layers = context.shape.num_layers
    depth = min(DEPTH, num_layers) if knobs.depth is None else knobs.depth
    if not 0 <= depth <= num_layers:
        raise PolicyError(f"ideal_prefetch: depth is {depth}: allowed are 0 to {num_layers}, the layers of the trace")
    path = miss_path(knobs.misses, context)
    params = Params(path, foresee(context), *read_upcoming(context.passes, context.shape), depth)
    return Policy(
        "ideal_prefetch",
        params,
        init,
        decide,
        misses=knobs.misses,
        reads_estimates=path.split,
        prefetches=depth > 0,
        clairvoyant=True,
    )
