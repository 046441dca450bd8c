"""OLED-MoE with layers that shrink by the confidences that the forward itself has left."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import PolicyError
from policies.jit import jit
from policies.oled_rules import State, boundary, decide
from policies.priority import CONFIDENCE, gates_at, priority
from tracer.schema import ForwardKind, ModelShape

_PREFILL = int(ForwardKind.PREFILL)


class KeepingState(NamedTuple):
    """OLED-MoE's own state, and the routing of the forward that runs."""

    own: State
    expert_ids: NDArray[np.int64]  # [L, N, K]
    gates: NDArray[np.float64]  # [L, N, K]


def keeping(state: State, shape: ModelShape, num_tokens: int) -> KeepingState:
    """The state with room for the routing of forwards of up to this many tokens."""
    size = (shape.num_layers, num_tokens, shape.top_k)
    return KeepingState(state, np.zeros(size, np.int64), np.zeros(size))


@jit
def decide_and_keep(params, state, step, view):
    """Decide as ever, and keep the layer's routing until the end of a decode forward.

    Raises:
        PolicyError: the forward has more tokens than there is room for.
    """
    num_tokens, top_k = step.expert_ids.shape
    if step.kind != _PREFILL:
        gates = gates_at(step.signals, step)
        if num_tokens > state.gates.shape[1]:
            raise PolicyError("a decode forward has more tokens than end_iter_tokens")
        for token in range(num_tokens):
            for k in range(top_k):
                state.expert_ids[step.layer, token, k] = step.expert_ids[token, k]
                state.gates[step.layer, token, k] = gates[token, k]
    return decide(params, state.own, step, view)


@jit
def boundary_ranked_anew(params, state, end, view):
    """Rank every layer anew by the confidences after a decode forward, then divide the slots as ever.

    What has left does not return, so this decides only what leaves layers that shrink.
    """
    if end.kind != _PREFILL:
        num_tokens = end.confidence.size
        num_layers, num_experts = view.resident.shape
        for layer in range(num_layers):
            ids, gates = state.expert_ids[layer, :num_tokens], state.gates[layer, :num_tokens]
            ranked = priority(ids, gates, end.confidence, CONFIDENCE, num_experts)
            for expert in range(num_experts):
                state.own.keys[layer, expert] = ranked[expert]
    return boundary(params, state.own, end, view)
