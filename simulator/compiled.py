"""The engine of runs and sweeps: compiled loops, equal to the reference to the nanosecond."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policies.contract import Estimates, Policy
from policies.log import LogChunk
from policies.profile import Costs
from simulator import des
from simulator.drive import drive
from simulator.timing import staging_of, time
from tracer.schema import ModelShape, Pass


def simulate(
    passes: Iterable[Pass],
    policy: Policy,
    shape: ModelShape,
    slots: int,
    costs: Costs,
    estimates: Estimates,
    *,
    staging_slots: int | None = None,
    chunk_forwards: int = 256,
) -> Iterator[LogChunk]:
    """Run a policy over a trace in simulated time.

    Log, errors and their messages are those of the reference engine, `simulator.des`. A policy without prefetches
    decides first and is timed then; where it is not compiled, it is called from Python. One that prefetches needs
    the clock while it decides; where it is not compiled, the reference engine runs it.

    Args:
        passes: of the run, in order; a ReadPasses is not read again.
        policy: built for this shape.
        shape: of the traced model.
        slots: expert slots of all layers together, without staging.
        costs: what everything takes.
        estimates: what the policy believes an expert costs.
        staging_slots: slots beyond the cache for transfers; None is twice the transfer chunk.
        chunk_forwards: forwards in one stretch of the log.

    Raises:
        ProfileError: fewer staging slots than a chunk of transfers has.
        PlanError: a plan breaks the contract; the message says where.
        PolicyError: the policy does not start with these slots, cannot decide on this trace, or prefetches without a
            score to rank residents by.
        TraceError: a pass is not of this shape.
    """
    staging = staging_of(costs, staging_slots)
    if policy.prefetches:
        return des.simulate(
            passes, policy, shape, slots, costs, estimates, staging_slots=staging, chunk_forwards=chunk_forwards
        )
    decisions = drive(passes, policy, shape, slots, estimates, chunk_forwards=chunk_forwards)
    return time(decisions, costs, staging)
