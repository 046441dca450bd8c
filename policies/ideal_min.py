"""Bound on residency, not on time: keep what the run needs again soonest (Belady's MIN with bypass, in batches)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, PolicyError, plain_plan
from policies.jit import jit
from policies.misses import MissPath, miss_path, require_misses, serve
from policies.retention import best, equal_capacity, nobody_resident, with_transfers
from policies.steps import count_load
from tracer.schema import ModelShape, Pass

NEVER = np.iinfo(np.int32).max


@dataclass
class Knobs:
    """What can be chosen."""

    misses: str = "oled"
    """`h2d`: every miss is copied, and hits are as many as any policy without prefetch can reach at these capacities;
    `oled`: split with the CPU (OLED-MoE, section 4.4), and only what was copied can be kept.

    The bound stands only beside policies of equal fixed capacities and the same miss path.
    """

    def __post_init__(self) -> None:
        require_misses(self.misses)


class Future(NamedTuple):
    """Next use of every access of a run: 4 bytes an access, 8 a layer execution."""

    offsets: NDArray[np.int64]  # [forwards * L + 1] into next_use
    next_use: NDArray[np.int32]  # [accesses] forward that needs the expert next; by (forward, layer, expert)


class Params(NamedTuple):
    """What never changes."""

    path: MissPath
    future: Future


class State(NamedTuple):
    """Where in the future each expert is needed next."""

    nearness: NDArray[np.int64]  # [L, E] minus the forward of next use, as of the layer's last execution


def read_future(passes: Iterable[Pass], shape: ModelShape) -> Future:
    """Next use of every access of the run, in one reading of its passes."""
    size = shape.num_layers * shape.num_experts
    last = np.full(size, -1, np.int64)  # index of the last access of each (layer, expert)
    counts: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    next_use = np.empty(1024, np.int32)
    end = 0
    for forward, pass_ in enumerate(passes):
        load = count_load(pass_.expert_ids, shape.num_experts)
        counts.append((load > 0).sum(axis=1))
        accessed = np.flatnonzero(load)
        start, end = end, end + accessed.size
        if end > next_use.size:
            next_use = np.concatenate([next_use, np.empty(end + next_use.size, np.int32)])
        before = last[accessed]
        next_use[before[before >= 0]] = forward
        next_use[start:end] = NEVER
        last[accessed] = np.arange(start, end)
    return Future(np.cumsum(np.concatenate(counts)), next_use[:end].copy())


def foresee(context: Context) -> Future:
    """Next use of every access of the run that a policy is built for.

    Raises:
        PolicyError: there are no passes.
    """
    future = read_future(context.passes, context.shape)
    if not future.next_use.size:
        raise PolicyError(f"{context.policy} needs the passes of the run, and there are none")
    return future


def init(params: Params, shape: ModelShape, slots: int) -> tuple[State, NDArray[np.bool_], NDArray[np.int64]]:
    """Start empty, with equal capacities."""
    nearness = np.full((shape.num_layers, shape.num_experts), -NEVER, np.int64)
    return State(nearness), nobody_resident(shape), equal_capacity(shape, slots)


@jit
def look_ahead(future, nearness, step):
    """Read the next use of each expert that the step activates into `nearness`, [L, E].

    Raises:
        PolicyError: the run is not the one that the policy was built from.
    """
    offsets, row = future.offsets, step.forward * nearness.shape[0] + step.layer
    if row + 1 >= offsets.size:
        raise PolicyError("a clairvoyant policy ran on more forwards than it was built from")
    access, end = offsets[row], offsets[row + 1]
    for expert in range(step.load.size):
        if step.load[expert] > 0:
            if access < end:
                nearness[step.layer, expert] = -future.next_use[access]
            access += 1
    if access != end:
        raise PolicyError("a clairvoyant policy ran on another trace than it was built from")


@jit
def decide(params, state, step, view):
    """Retain the residents and transfers of nearest next use, ties to the lower id.

    It is a bound on residency, not on time: fewest misses need not be the fastest.

    Source: OLED-MoE, section 5.1 (ideal cache bound), where loading costs what it costs.
    Differs: the greedy is exact for `misses=h2d`; what runs on the CPU cannot be retained and narrows the choice.
    """
    transfers, on_cpu = serve(params.path, step, view)
    look_ahead(params.future, state.nearness, step)
    nearness = state.nearness[step.layer]
    held = with_transfers(view.resident[step.layer], transfers)
    return plain_plan(transfers, on_cpu, best(held, view.capacity[step.layer], nearness, nearness))


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy with these knobs, built from the passes of the run.

    Raises:
        PolicyError: there are no passes, or `misses=oled` without calibration.
    """
    future = foresee(context)
    path = miss_path(knobs.misses, context)
    return Policy(
        "ideal_min",
        Params(path, future),
        init,
        decide,
        misses=knobs.misses,
        reads_estimates=path.split,
        clairvoyant=True,
    )
