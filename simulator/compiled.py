"""The engine of runs and sweeps: compiled loops, equal to the reference to the nanosecond."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from policies.contract import Estimates, Policy
from policies.log import LogChunk
from policies.profile import Costs, staging_of
from simulator import clock_loop, des
from simulator.drive import drive
from simulator.link import Copy
from simulator.pointers import is_compiled
from simulator.timing import time
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
    chunk_forwards: int = 128,
    on_copy: Callable[[Copy], None] | None = None,
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
        on_copy: told of every copy to the GPU, prefetches included, whose times the log lacks, in the order of landing
            and before its stretch of the log is handed on.

    Raises:
        ProfileError: fewer staging slots than a chunk of transfers has.
        PlanError: a plan breaks the contract; the message says where.
        PolicyError: the policy does not start with these slots, cannot decide on this trace, or prefetches without a
            score to rank residents by.
        TraceError: a pass is not of this shape.
    """
    staging = staging_of(costs.transfer_chunk, staging_slots)
    if policy.prefetches:
        run = clock_loop.simulate if is_compiled(policy.decide) else des.simulate
        return run(
            *(passes, policy, shape, slots, costs, estimates),
            staging_slots=staging,
            chunk_forwards=chunk_forwards,
            on_copy=on_copy,
        )
    decisions = drive(passes, policy, shape, slots, estimates, chunk_forwards=chunk_forwards)
    chunks = time(decisions, costs, staging)
    return chunks if on_copy is None else _telling(chunks, on_copy)


def _telling(chunks: Iterable[LogChunk], on_copy: Callable[[Copy], None]) -> Iterator[LogChunk]:
    for chunk in chunks:
        layers, transfers = chunk.layers, chunk.layers.lists["transfers"]
        of_layer = np.repeat(layers.scalars["layer"], transfers.lengths()).tolist()
        times = (layers.lists[name].values.tolist() for name in ("transfer_start_ns", "transfer_end_ns"))
        for layer, expert, start_ns, end_ns in zip(of_layer, transfers.values.tolist(), *times, strict=True):
            on_copy(Copy(layer, expert, is_prefetch=False, start_ns=start_ns, end_ns=end_ns))
        yield chunk
