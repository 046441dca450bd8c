"""What a policy is asked, what it sees and what it answers: the contract between policies and every driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from tracer.schema import Calibration, ModelShape, Pass


class PlanError(ValueError):
    """A policy answered with a plan that breaks the contract; the message says where and what."""


class PolicyError(ValueError):
    """A policy cannot be built from these knobs, this trace or this cache size; the message says why."""


MOST_REQUESTS = 256  # of one pass, that policies which follow requests can tell apart


class Estimates(NamedTuple):
    """What a policy believes an expert costs. Only a belief: the engines charge from the hardware profile."""

    h2d_ns: int  # T_H, one expert from host to GPU
    cpu_b0_ns: int  # one expert on the CPU takes b0 + b1 * load
    cpu_b1_ns: int


class StepSignals(NamedTuple):
    """What some policies read beyond a Step's routing. S = min(32, E); widths are 0 where the trace lacks the table."""

    token_ids: NDArray[np.int64]  # [T] input tokens
    positions: NDArray[np.int64]  # [T]
    score_ids: NDArray[np.int64]  # [T, S] best by biased score, the k chosen always among them
    scores: NDArray[np.float64]  # [T, S] unbiased sigmoid
    input_norm: NDArray[np.float64]  # [T] of the router input
    sketch: NDArray[np.float64]  # [T, 16] of the input embedding
    ahead_ids: NDArray[np.int64]  # [3, T, 16] top experts by the next layers' gates; -1 where there is no such layer


class Step(NamedTuple):
    """What exists at the gate of one layer of one forward; nothing of the future, and arrays are read-only.

    Confidence of a forward exists only after its last layer, so `confidence` is that of the same position in the
    same request's previous forward of the same block, and 1 in the first forward of a block.
    """

    forward: int  # index of the pass in the run, from 0
    layer: int  # index of the MoE layer, from 0
    kind: int  # ForwardKind of the pass
    expert_ids: NDArray[np.int64]  # [T, K]
    gates: NDArray[np.float64]  # [T, K] rows sum to 1
    load: NDArray[np.int64]  # [E] tokens routed to each expert; activated = load > 0
    confidence: NDArray[np.float64]  # [T]
    request: NDArray[np.int64]  # [T]
    block: NDArray[np.int64]  # [T]
    iteration: NDArray[np.int64]  # [T]
    signals: StepSignals | None = None  # only for a policy that reads them: each array costs time at every gate


class View(NamedTuple):
    """What the driver shows at the gate (and after a forward, to `boundary`)."""

    resident: NDArray[np.bool_]  # [L, E] landed on the GPU
    in_flight: NDArray[np.bool_]  # [L, E] prefetches that were started and have not landed
    capacity: NDArray[np.int64]  # [L] slots of each layer; [1] where the pool is global
    free_slots: int  # of the pool that this layer uses
    estimates: Estimates


class Plan(NamedTuple):
    """How one layer's misses are served and what stays resident after it.

    `retained` covers the pool: the layer's experts, [E], or with a global pool all of them, [L * E] numbered
    layer * E + expert. Prefetches are (layer, expert) with a priority pair, smaller first.
    """

    transfers: NDArray[np.int64]  # [G] experts of this layer in issue order
    on_cpu: NDArray[np.int64]  # experts of this layer
    retained: NDArray[np.bool_]  # [E] or [L * E]
    prefetches: NDArray[np.int64]  # [N, 2] layer, expert
    prefetch_priority: NDArray[np.float64]  # [N, 2] compared in order
    clear_prefetches: bool  # drop what this policy still has queued, when the plan acts
    prefetch_delay_ns: int  # prefetches enter the queue this long after the plan acts


class End(NamedTuple):
    """What exists after the last layer of a forward."""

    forward: int
    kind: int
    request: NDArray[np.int64]  # [T]
    block: NDArray[np.int64]  # [T]
    confidence: NDArray[np.float64]  # [T] of this very forward


@jit
def plain_plan(transfers, on_cpu, retained):
    """A plan without prefetches."""
    return Plan(transfers, on_cpu, retained, np.empty((0, 2), np.int64), np.empty((0, 2), np.float64), False, 0)


@dataclass(frozen=True)
class Policy:
    """One policy, ready for a run: parameters and the functions that every driver calls.

    The state that `init` makes is a NamedTuple of arrays, which the other functions change in place; a policy that
    prefetches has `score`, [L, E] float64, in it, which ranks residents when a prefetch needs a victim.

    Args:
        init: (params, shape, slots) -> (state, residents [L, E] bool, capacity [L] or [1] int64). slots is the total.
        decide: (params, state, step, view) -> Plan, at the gate of each layer.
        boundary: (params, state, end, view) -> (capacity, evictions [L, E] bool), after each forward's last layer.
        place: (params, state, step) -> residents [E] bool of the step's layer, free of charge; for bounds only.
        reads_estimates: decisions depend on `view.estimates`, so that they hold for one profile only.
        prefetches: some plan may name prefetches.
        resizes: slots may move between layers.
        admits_by: knob that lets transfers stay, where some part of the policy is there to do so; a run in which none
            ever stayed then says so.
        reads_signals: decisions depend on `step.signals`, which other policies are not given.
        clairvoyant: was built from the trace that it is run on.
        warnings: what the person who reads the results should know about this policy on this trace.
        file: that it was made from, where it is not one of ours.
    """

    name: str
    params: Any
    init: Callable[[Any, ModelShape, int], tuple[Any, NDArray[np.bool_], NDArray[np.int64]]]
    decide: Callable[[Any, Any, Step, View], Plan]
    boundary: Callable[[Any, Any, End, View], tuple[NDArray[np.int64], NDArray[np.bool_]]] | None = None
    place: Callable[[Any, Any, Step], NDArray[np.bool_]] | None = None
    pool: str = "layer"
    misses: str = "h2d"
    reads_estimates: bool = False
    reads_signals: bool = False
    prefetches: bool = False
    resizes: bool = False
    admits_by: str = ""
    clairvoyant: bool = False
    sized: bool = True  # False: ignores the cache size (full, ondemand)
    variant: str = ""  # knobs that differ from their defaults, as key=value
    warnings: tuple[str, ...] = ()
    file: str = ""


@dataclass(frozen=True)
class Context:
    """What a policy may be built from, beyond its knobs.

    Args:
        passes: the trace of the run, for clairvoyant policies alone; can be iterated repeatedly.
        calibrate: makes the record of requests that are not evaluated; called once, and only for a policy that asks.
        calibration_passes: of the same requests, where they are at hand; can be iterated repeatedly.
        has_signals: the trace of the run has the table `signals`.
        lacks: what the trace of the run has as null throughout, as `TraceMetadata.lacks`.
        policy: name of the policy that is being built.
    """

    shape: ModelShape
    passes: Iterable[Pass] = ()
    calibrate: Callable[[], Calibration] | None = None
    calibration_passes: Iterable[Pass] = ()
    has_signals: bool = False
    lacks: frozenset[str] = frozenset()
    seed: int = 0
    policy: str = "the policy"

    def require(self, what: str, because: str = "", instead: str = "") -> None:
        """Refuse a trace that lacks what the policy reads.

        Args:
            what: one of `lacks`.
            because: the knob that asks for it, empty where the policy always does.
            instead: knobs that do without.

        Raises:
            PolicyError: with these.
        """
        if what in self.lacks:
            needs = f"{self.policy} {because}".strip()
            without = f"; {instead} does without" if instead else ""
            raise PolicyError(f"{needs} needs {what.replace('_', ' ')}, which are null in this trace{without}")

    @cached_property
    def calibration(self) -> Calibration:
        """What the policy may learn beforehand.

        Raises:
            PolicyError: there is nothing to learn from.
        """
        if self.calibrate is None:
            raise PolicyError(
                f"{self.policy} needs calibration, and there is none: warmup_requests must be 1 or more, or calibration the path of a record"
            )
        return self.calibrate()
