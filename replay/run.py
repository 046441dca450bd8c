"""Runs of one trace on one machine: passes prepared once, a machine for the largest cache, and a log for each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from numba.core.dispatcher import Dispatcher

from policies.contract import Estimates, Policy
from policies.log import LogChunk
from policies.steps import Steps
from replay.executor import Run
from replay.machine import Machine
from tracer.schema import ModelShape, Pass

_HOST_TIMES = ("host_ns", "lead_ns", "decide_ns")


@dataclass(frozen=True, eq=False)
class Replayed:
    """What a run measured."""

    chunks: list[LogChunk]
    host_us: float  # of the issuing thread for one layer, without decisions and waits; medians
    lead_us: float  # part of it during which the GPU has nothing to do
    decide_us: float


def replay(
    machine: Machine,
    passes: Sequence[Pass],
    policy: Policy,
    shape: ModelShape,
    slots: int,
    estimates: Estimates,
    staging: int,
    progress: Callable[[int], object] | None = None,
) -> Replayed:
    """Run a policy over the first passes of a machine, with real copies, kernels and CPU experts.

    Args:
        machine: made for these passes, or for more that follow.
        passes: to be run.
        policy: built for the traced shape.
        shape: of the traced model.
        slots: of all layers together, without staging.
        estimates: what the policy believes an expert costs.
        staging: slots beyond the cache.
        progress: told of each forward that has run.

    Raises:
        PlanError, PolicyError, ProfileError, TraceError: as the simulator raises them, and where the machine is too small.
    """
    steps = Steps(shape, policy.reads_signals)
    forwards = [steps.read(pass_) for pass_ in passes]
    if isinstance(policy.decide, Dispatcher):  # what is compiled or chosen at first use is not measured
        list(Run(machine, policy, shape, slots, estimates, staging).log(passes[:1], forwards[:1]))
    run = Run(machine, policy, shape, slots, estimates, staging, len(passes))
    chunks = list(run.log(passes, forwards, progress))
    records = [record for note in run.forwards for record in note.layers]
    return Replayed(chunks, *(median(getattr(record, name) for record in records) / 1e3 for name in _HOST_TIMES))
