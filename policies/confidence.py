"""Other readings of confidence than the one a Step carries, worked out for a whole trace beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import PolicyError
from policies.jit import jit
from policies.steps import Steps
from tracer.schema import ModelShape, Pass

CONF_DECODED = ("prob", "one", "at_accept")


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False  # as the confidence of a Step is: numba knows the two as different types
    return array


class Readings(NamedTuple):
    """Confidence at the gates of every forward of a run."""

    values: NDArray[np.float64]  # [N] tokens of all forwards
    offsets: NDArray[np.int64]  # [F + 1]


@jit
def confidence_at(readings, step):
    """Confidence of each token at the gate of a step, [T]: that of the Step where there are no readings.

    Of None numba leaves out all that is behind it; arrays that nobody reads would cost time at every gate.

    Raises:
        PolicyError: there are readings, but of another trace.
    """
    if readings is None:
        return step.confidence
    if step.forward + 1 >= readings.offsets.size:
        raise PolicyError("the confidences were read from a shorter trace than the run has")
    start, end = readings.offsets[step.forward], readings.offsets[step.forward + 1]
    if end - start != step.confidence.size:
        raise PolicyError("the confidences were read from another trace than that of the run")
    return readings.values[start:end]


def read_all(
    passes: Iterable[Pass], shape: ModelShape, *, same_iter: bool, decoded: str, flip_scale: float
) -> Readings:
    """Confidence at the gates of every pass.

    Args:
        passes: the trace of the run.
        shape: its model's.
        same_iter: take each forward's own confidence, which no running system has at its gates, instead of that of
            the previous forward.
        decoded: what counts for a position that was decoded before: `prob`, the probability of the token that stands
            there; `one`; or `at_accept`, the probability with which it was accepted or last edited.
        flip_scale: factor for positions that were accepted in the forward that the confidence is of.

    Raises:
        PolicyError: there are no passes.
    """
    steps = Steps(shape)
    found = []
    for pass_ in _reread(passes, decoded, flip_scale):
        forward = steps.read(pass_)
        found.append(forward.own_confidence if same_iter else forward.confidence)
    if not found:
        raise PolicyError("this reading of confidence needs the trace of the run, and there are no passes")
    sizes = [values.size for values in found]
    return Readings(_read_only(np.concatenate(found)), _read_only(np.cumsum([0, *sizes], dtype=np.int64)))


def _reread(passes: Iterable[Pass], decoded: str, flip_scale: float) -> Iterator[Pass]:
    # the passes as if the trace had recorded these probabilities
    accepted_with: dict[tuple[int, int], float] = {}
    for pass_ in passes:
        p_argmax = np.where(pass_.accepted, flip_scale * pass_.p_argmax, pass_.p_argmax)
        p_current = pass_.p_current
        if decoded == "one":
            p_current = np.ones_like(p_current)
        elif decoded == "at_accept":
            places = list(zip(pass_.token_requests(pass_.requests).tolist(), pass_.positions.tolist(), strict=True))
            known = [
                accepted_with.get(place, current) for place, current in zip(places, p_current.tolist(), strict=True)
            ]
            p_current = np.array(known)
            for index in np.flatnonzero(pass_.accepted | pass_.edited):
                accepted_with[places[index]] = float(pass_.p_argmax[index])
        yield replace(pass_, p_argmax=p_argmax, p_current=p_current)
