"""What a policy in plain Python is, and what helps to write one: a class to fill in, and the making of plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.contract import Context, End, Plan, PlanError, Step, View
from policies.pool import number_in_pool, part_of_pool
from tracer.schema import ModelShape


class PlainPolicy:
    """A policy of one's own: `decide`, and whichever other of these methods it needs.

    Its knobs are the keyword arguments of its `__init__`, or the fields where it is a dataclass. Every run has an
    object of its own, so state is kept in `self`. What is declared here may also be set in `__init__`.
    """

    pool: ClassVar[str] = "layer"
    """`layer`: each layer has slots of its own; `global`: all layers share one pool."""
    misses: ClassVar[str] = "h2d"
    """How misses are served, as tables show it. `h2d`: all are copied; a policy that uses the CPU says another word."""
    prefetches: ClassVar[bool] = False
    """Plans may name prefetches. `start` then sets `self.score`, which ranks residents that could make room."""
    resizes: ClassVar[bool] = False
    """`after_forward` may move slots between layers."""
    reads_signals: ClassVar[bool] = False
    """`decide` reads `step.signals`; a trace without them is refused."""
    clairvoyant: ClassVar[bool] = False
    """`learn` is shown the trace of the run: for bounds only."""
    score: NDArray[np.float64] | None = None  # [L, E] changed by `decide`; a prefetch evicts only who scores below it

    def learn(self, context: Context) -> None:
        """Before the run: read `context.calibration`, made of requests that are not evaluated, or `context.seed`."""

    def start(self, shape: ModelShape, slots: int) -> Any:
        """Begin a run with an empty cache and equal layers, or answer with what is different.

        Args:
            shape: of the traced model: `num_layers` L, `num_experts` E, `top_k`.
            slots: of all layers together.

        Returns:
            None; or who is resident at the start, [L, E] bool; or those and the slots of each layer, [L].
        """

    def decide(self, step: Step, view: View) -> Plan:
        """At the gate of every layer of every forward: how misses are served, and who stays. Most return `plan(...)`.

        Args:
            step: the layer's routing and all that is known at its gate.
            view: who is on the GPU now, and the slots there are. Arrays of both are read-only.
        """
        raise NotImplementedError

    def after_forward(self, end: End, view: View) -> Any:
        """After the last layer of every forward: learn from its confidences, or move slots between layers.

        Returns:
            None; or the slots of each layer, [L] with the same sum, and who leaves, [L, E] bool.
        """


def missed(step: Step, view: View) -> NDArray[np.int64]:
    """Experts that the layer activates and that are not resident, ascending: each must be served."""
    return np.flatnonzero((step.load > 0) & ~view.resident[step.layer])


def keep_best(step: Step, view: View, score: ArrayLike, on_cpu: Sequence[int] | NDArray[Any] = ()) -> NDArray[np.bool_]:
    """Who stays: of residents and transfers those of the highest score, as many as there is room for.

    Slots of prefetches in flight are left free. Ties go to the lower layer, then the lower expert id.

    Args:
        step: the layer's Step.
        view: View at its gate.
        score: [L, E] of all experts, whichever pool they are in.
        on_cpu: misses that are not copied, and so cannot stay.

    Returns:
        Shape [E] of the layer, or [L * E] of the global pool: `retained` of a plan.

    Raises:
        PlanError: the scores are not one number for each expert.
    """
    scores = np.asarray(score, np.float64)
    if scores.shape != view.resident.shape or np.isnan(scores).any():
        raise PlanError(f"score is of shape {scores.shape}, must be {view.resident.shape} without nan")
    resident, in_flight, scores = (
        part_of_pool(view.capacity, step.layer, array) for array in (view.resident, view.in_flight, scores)
    )
    copied = np.setdiff1d(missed(step, view), _ids("on_cpu", on_cpu))
    entering = np.zeros(resident.size, np.bool_)
    entering[number_in_pool(view.capacity, step.load.size, step.layer, copied)] = True
    candidates = np.flatnonzero((resident | entering) & ~in_flight)
    room = resident.sum() + view.free_slots
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:room]
    retained = entering & in_flight  # a copy that is under way cannot be turned away
    retained[best] = True
    return retained


def plan(
    step: Step,
    view: View,
    retained: ArrayLike,
    *,
    on_cpu: ArrayLike = (),
    transfers: ArrayLike | None = None,
    prefetches: Iterable[Sequence[float]] = (),
    clear_prefetches: bool = False,
    prefetch_delay_ns: int = 0,
) -> Plan:
    """What `decide` answers, from lists or arrays.

    Args:
        step: the layer's Step.
        view: View at its gate.
        retained: who stays after the layer, as a mask or as ids; `keep_best` makes one.
        on_cpu: misses that the CPU computes.
        transfers: misses that are copied, in this order; None is all that the CPU does not compute, ascending.
        prefetches: copies for layers to come, as (layer, expert) or (layer, expert, priority), smaller first.
        clear_prefetches: what is still queued from before is dropped.
        prefetch_delay_ns: how long after the plan acts the prefetches are queued.

    Raises:
        PlanError: an argument is not what it must be.
    """
    num_experts = view.resident.size // view.capacity.size
    ids = _ids("on_cpu", on_cpu)
    copied = np.setdiff1d(missed(step, view), ids) if transfers is None else _ids("transfers", transfers)
    rows = [tuple(row) for row in prefetches]
    for row in rows:
        if len(row) not in (2, 3):
            raise PlanError(f"prefetch {row}: must be (layer, expert) or (layer, expert, priority)")
    pairs = _ids("prefetches", [row[:2] for row in rows]).reshape(-1, 2)
    priority = np.array([(row[2] if len(row) == 3 else 0.0, 0.0) for row in rows], np.float64).reshape(-1, 2)
    return Plan(copied, ids, _mask(retained, num_experts), pairs, priority, clear_prefetches, prefetch_delay_ns)


def _ids(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Numbers of experts as an array of its own; a mask is taken for those that are true."""
    array = np.asarray(values)
    if array.dtype == np.bool_ and array.size:
        return np.flatnonzero(array)
    if array.size and array.dtype.kind not in "iu":
        raise PlanError(f"{name} is {array.tolist()}, must be ids of experts")
    return array.astype(np.int64)


def _mask(retained: ArrayLike, size: int) -> NDArray[np.bool_]:
    array = np.asarray(retained)
    if array.dtype == np.bool_ and array.shape == (size,):
        return array.copy()
    ids = _ids("retained", array)
    if array.dtype == np.bool_ or ids.ndim != 1 or (ids.size and not 0 <= ids.min() <= ids.max() < size):
        raise PlanError(f"retained is {array.tolist()}, must be a mask of {size} experts, or ids of 0 to {size - 1}")
    mask = np.zeros(size, np.bool_)
    mask[ids] = True
    return mask
