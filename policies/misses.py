"""How misses are served, as a parameter of policies that decide only what stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from policies.contract import Context, PolicyError
from policies.dispatch import (
    DispatchKnobs,
    DispatchParams,
    dispatch_params,
    split_at,
    tokens_per_expert,
)
from policies.jit import jit
from policies.knobs import require_choice
from policies.priority import CONFIDENCE, priority
from policies.retention import by_priority, ids_of, missed_of
from tracer.schema import ForwardKind

MISSES = ("h2d", "oled")
_PREFILL = int(ForwardKind.PREFILL)


def require_misses(value: str, allowed: Sequence[str] = MISSES) -> None:
    """Refuse a miss path that a policy which starts empty cannot have.

    Raises:
        PolicyError: with the allowed paths.
    """
    if value == "cpu":
        raise PolicyError(
            f"misses=cpu admits nothing, so it needs residents at the start, and there are none: "
            f"allowed are {', '.join(allowed)}"
        )
    require_choice("misses", value, allowed)


class MissPath(NamedTuple):
    """How a policy serves its misses."""

    split: bool  # between copies and the CPU; else all are copied
    dispatch: DispatchParams  # of the split
    nbar: float  # tokens of an average expert, which the split counts with


def miss_path(misses: str, context: Context) -> MissPath:
    """The path of this name: `h2d` copies every miss, `oled` splits them as OLED-MoE with its default knobs does.

    Raises:
        PolicyError: `oled` without gates, or without calibration that says what an average expert has to do.
    """
    split = misses == "oled"
    if split:
        context.require("gates", "misses=oled", "policy.misses=h2d")
    nbar = tokens_per_expert(context.calibration) if split else 1.0
    return MissPath(split, dispatch_params(DispatchKnobs()), nbar)


@jit
def split_in_decode(dispatch, nbar, reuse, step, missed, num_activated, estimates):
    """Split the misses of a layer between copies and the CPU; in prefill, copy all of them.

    Source: OLED-MoE, section 4.4, which is about denoising iterations; it does not say what prefill does.

    Args:
        dispatch: DispatchParams.
        nbar: tokens of an average expert.
        reuse: [E] float64, expected reuse.
        step: the layer's Step.
        missed: [E] bool.
        num_activated: experts activated in this layer.
        estimates: Estimates, whole ns.

    Returns:
        Transfers in issue order (reuse descending, then id) and CPU experts ascending: int64.
    """
    if step.kind == _PREFILL:
        return by_priority(missed, reuse), np.empty(0, np.int64)
    return split_at(dispatch, nbar, reuse, step.load, missed, num_activated, estimates)


@jit
def serve(path, step, view):
    """Serve the misses of a layer: transfers in issue order, and CPU experts ascending.

    What a prefetch is just bringing is a transfer whatever the path; a split divides the others.
    """
    missed = missed_of(step.load, view.resident[step.layer])
    if not path.split:
        return ids_of(missed), np.empty(0, np.int64)
    num_activated = ids_of(step.load).size
    reuse = priority(step.expert_ids, step.gates, step.confidence, CONFIDENCE, step.load.size)
    coming = np.zeros(missed.size, np.bool_)
    for expert in range(missed.size):
        if missed[expert] and view.in_flight[step.layer, expert]:
            coming[expert] = True
            missed[expert] = False
    transfers, on_cpu = split_in_decode(path.dispatch, path.nbar, reuse, step, missed, num_activated, view.estimates)
    return np.concatenate((ids_of(coming), transfers)), on_cpu
