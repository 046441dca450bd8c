"""Expected reuse of each expert in the next forward, from what the gate chose and how sure the tokens are."""

from __future__ import annotations

import numpy as np

from policies.contract import PolicyError
from policies.jit import jit

SIGNALS = ("order", "load", "gate", "confidence")
ORDER, LOAD, GATE, CONFIDENCE = range(4)


@jit
def expert_sums(expert_ids, gates, confidence, signal, num_experts):
    """What the tokens routed to each expert add up to, and the total over all experts.

    Summed in float64 over (position, k) ascending: 1 for `load`, the gate for `gate`, gate times confidence for
    `confidence`.

    Args:
        expert_ids: [T, K].
        gates: [T, K].
        confidence: [T].
        signal: LOAD, GATE or CONFIDENCE.
        num_experts: E.

    Returns:
        Sums [E] and their total.
    """
    sums = np.zeros(num_experts, np.float64)
    total = 0.0
    for token in range(expert_ids.shape[0]):
        certainty = confidence[token] if signal == CONFIDENCE else 1.0
        for k in range(expert_ids.shape[1]):
            share = 1.0 if signal == LOAD else gates[token, k] * certainty
            sums[expert_ids[token, k]] += share
            total += share
    return sums, total


@jit
def priority(expert_ids, gates, confidence, signal, num_experts):
    """Priority of each expert of one layer, [E]: its sum over the total, 0 for what is not activated.

    Where every gate times confidence is 0, all confidences count as 1.

    Source: OLED-MoE, section 4.3, with psi(c) = c.

    Raises:
        PolicyError: a confidence is not known.
    """
    sums, total = expert_sums(expert_ids, gates, confidence, signal, num_experts)
    if np.isnan(total):
        raise PolicyError(
            "confidence is NaN: the trace does not know it, and oled needs it unless coop=false and priority=false"
        )
    if total == 0.0:
        sums, total = expert_sums(expert_ids, gates, confidence, GATE, num_experts)
    for expert in range(num_experts):
        sums[expert] /= total
    return sums
