"""Expected reuse of each expert in the next forward, from what the gate chose and how sure the tokens are."""

from __future__ import annotations

import numpy as np

from policies.contract import PolicyError
from policies.jit import jit

SIGNALS = ("order", "load", "gate", "confidence")
ORDER, LOAD, GATE, CONFIDENCE = range(4)


@jit
def gates_at(signals, step):
    """Gates of a step, [T, K]: normalised, or as raw sigmoids where the policy reads signals.

    `signals` is an argument of its own, so that numba leaves out what is behind its being None.
    """
    if signals is None:
        return step.gates
    num_tokens, top_k = step.expert_ids.shape
    gates = np.empty((num_tokens, top_k), np.float64)
    found = np.empty(step.load.size, np.float64)
    for token in range(num_tokens):
        for index in range(signals.score_ids.shape[1]):
            found[signals.score_ids[token, index]] = signals.scores[token, index]
        for k in range(top_k):  # the chosen are always among those with a score
            gates[token, k] = found[step.expert_ids[token, k]]
    return gates


@jit
def priority(expert_ids, gates, confidence, signal, num_experts):
    """Priority of each expert of one layer, [E] float64: its share of what the routes of all tokens add up to.

    A route counts 1 under `load`, its gate under `gate`, and gate times confidence under `confidence`, summed over
    (position, k) ascending. What is not activated has 0. Where every gate times confidence is 0, all confidences
    count as 1.

    Source: OLED-MoE, section 4.3, with psi(c) = c; `load` and `gate` are steps towards it.

    Args:
        expert_ids: [T, K].
        gates: [T, K].
        confidence: [T].
        signal: LOAD, GATE or CONFIDENCE.
        num_experts: E.

    Raises:
        PolicyError: a confidence, or a gate, is not known.
    """
    sums = np.zeros(num_experts, np.float64)
    total = 0.0
    sure = signal != CONFIDENCE
    while total == 0.0:
        for token in range(expert_ids.shape[0]):
            factor = 1.0 if sure else confidence[token]
            for k in range(expert_ids.shape[1]):
                value = 1.0 if signal == LOAD else gates[token, k] * factor
                sums[expert_ids[token, k]] += value
                total += value
        if sure:
            break
        sure = True
    if np.isnan(total):
        raise PolicyError("the trace does not know the confidence of a token, or its gates, which priorities need")
    for expert in range(num_experts):
        sums[expert] /= total
    return sums
