"""Let a policy decide over a whole trace without a clock, which is enough where nothing is prefetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.contract import Estimates, Plan, Policy, PolicyError, Step
from policies.residents import Residents
from policies.steps import Steps, end_of, step_at
from tracer.schema import ModelShape, Pass


@dataclass(frozen=True, eq=False)
class Decision:
    """What one layer execution found, and what the policy made of it."""

    pass_: Pass
    step: Step
    resident: NDArray[np.bool_]  # [E] of the layer at the gate
    capacity: int  # slots of the layer at the gate; of the pool where it is global
    plan: Plan

    @property
    def hits(self) -> NDArray[np.int64]:
        """Activated experts that were resident at the gate, ascending."""
        return np.flatnonzero((self.step.load > 0) & self.resident)


def drive(
    policy: Policy, passes: Iterable[Pass], shape: ModelShape, slots: int, estimates: Estimates
) -> Iterator[Decision]:
    """Decide every layer of every pass, in the order of the run.

    Without prefetches nothing outlives a layer: what is resident at a gate follows from the plans before it, whatever
    they took. This is the readable reference of that.

    Args:
        policy: built for this shape.
        passes: of the run, in order.
        shape: of the passes.
        slots: of all layers together.
        estimates: what the policy believes an expert costs.

    Raises:
        PlanError: a plan breaks the contract; the message says where.
        PolicyError: the policy does not start with these slots, cannot decide on this trace, or prefetches.
        TraceError: a pass is not of this shape.
    """
    residents = Residents(policy, shape, slots, estimates)
    steps = Steps(shape, policy.reads_signals)
    for pass_ in passes:
        forward = steps.read(pass_)
        for layer in range(shape.num_layers):
            step = step_at(forward, layer)
            residents.place(step)
            at_gate = residents.of_pool(layer, residents.resident).copy()
            resident = residents.resident[layer].copy()
            capacity = residents.capacity_of(layer)
            plan = residents.decide(step)
            if len(plan.prefetches):
                raise PolicyError(f"{policy.name} prefetches, so its decisions need an engine with a clock")
            residents.settle(layer, at_gate, plan)
            yield Decision(pass_, step, resident, capacity, plan)
        residents.boundary(end_of(forward))
