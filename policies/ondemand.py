"""Keep nothing: every activated expert streams through the staging slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from policies.retention import ids_of, nobody_resident
from tracer.schema import ModelShape

SIZED = False  # whatever the cache size


@dataclass
class Knobs:
    """Nothing can be chosen."""


def init(params: tuple[()], shape: ModelShape, slots: int) -> tuple[tuple[()], NDArray[np.bool_], NDArray[np.int64]]:
    """Start without a slot in any layer, whatever `slots` is."""
    return (), nobody_resident(shape), np.zeros(shape.num_layers, np.int64)


@jit
def decide(params, state, step, view):
    """Copy every activated expert, and retain none.

    Source: OLED-MoE, section 2.2 (misses by H2D transfer), with a GPU expert cache of no size.
    """
    return plain_plan(ids_of(step.load), np.empty(0, np.int64), np.zeros(step.load.size, np.bool_))


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy."""
    return Policy("ondemand", (), init, decide, sized=SIZED)
