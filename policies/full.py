"""Keep every expert on the GPU: what running without offloading costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context, Policy, plain_plan
from policies.jit import jit
from tracer.schema import ModelShape

SIZED = False  # whatever the cache size


@dataclass
class Knobs:
    """Nothing can be chosen."""


def init(params: tuple[()], shape: ModelShape, slots: int) -> tuple[tuple[()], NDArray[np.bool_], NDArray[np.int64]]:
    """Start with all experts resident, whatever `slots` is."""
    resident = np.ones((shape.num_layers, shape.num_experts), np.bool_)
    return (), resident, np.full(shape.num_layers, shape.num_experts, np.int64)


@jit
def decide(params, state, step, view):
    """Serve nothing, as nothing is missed, and retain everything.

    Source: OLED-MoE, section 5.4 (full-residency bound).
    """
    nothing = np.empty(0, np.int64)
    return plain_plan(nothing, nothing, np.ones(step.load.size, np.bool_))


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy."""
    return Policy("full", (), init, decide, sized=SIZED)
