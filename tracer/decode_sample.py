"""Which token a forward proposes for each position, and with what confidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 256  # rows whose probabilities are computed at once: those of a long window would be as large as its logits


class Prediction(NamedTuple):
    """What one forward says of each of its positions; probabilities are of the raw logits, in float32."""

    argmax_ids: NDArray[np.int64]  # [T]
    p_argmax: NDArray[np.float32]  # [T]
    p_current: NDArray[np.float32]  # [T] of the token that was fed in


class Proposal(NamedTuple):
    """What would be written at each position."""

    ids: NDArray[np.int64]  # [T]
    confidence: NDArray[np.float32]  # [T] as the engine reads it


def predict(logits: Tensor, token_ids: NDArray[np.int64]) -> Prediction:
    """Read logits [T, V]: the likeliest token, its probability, and that of the token fed in."""
    best = logits.argmax(dim=-1)
    current = torch.as_tensor(token_ids, device=logits.device)
    found = []
    for part, *ids in zip(logits.split(CHUNK), best.split(CHUNK), current.split(CHUNK), strict=True):
        probabilities = torch.softmax(part.float(), dim=-1)
        found.append(torch.stack([probabilities.gather(1, i[:, None])[:, 0] for i in ids]))
    p_best, p_current = torch.cat(found, dim=1).cpu().numpy()
    return Prediction(best.cpu().numpy(), p_best, p_current)


def draw(logits: Tensor, temperature: float, rng: np.random.Generator, *, tempered_confidence: bool) -> Proposal:
    """Draw a token for each position from logits [T, V] over a temperature.

    One uniform number a position is inverted through the distribution, so that what is drawn does not depend on the
    device, nor on which other requests run.

    Args:
        logits: [T, V].
        temperature: above 0.
        rng: of the request.
        tempered_confidence: confidence is the probability under the temperature, as the released `generate` has it;
            else under the raw logits, as dInfer has it.
    Source:
        Differs: dInfer adds Gumbel noise and takes the largest, and the released `generate` calls `multinomial`; both
        draw from this distribution, by other random numbers.
    """
    tempered = torch.softmax(logits.float() / temperature, dim=-1)
    cumulative = tempered.double().cumsum(dim=-1)
    uniform = torch.as_tensor(rng.random(len(logits)), device=logits.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniform, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    read = tempered if tempered_confidence else torch.softmax(logits.float(), dim=-1)
    return Proposal(ids.cpu().numpy(), _probability(read, ids))


def propose_penalised(logits: Tensor, token_ids: NDArray[np.int64], penalty: float) -> Proposal:
    """The likeliest tokens once each position's logit of the token fed in before it is lower by `penalty`.

    Args:
        logits: [T, V] of one block, which are left as they are.
        token_ids: [T] that were fed in; the first position has none before it.
        penalty: above 0.
    Source:
        SGLang, JointThreshold's penalty_lambda. Differs: there the logits themselves change; a trace records those of
        the model.
    """
    lowered = logits.float().clone()
    before = torch.as_tensor(token_ids[:-1], device=logits.device)[:, None]
    lowered[1:].scatter_add_(1, before, torch.full_like(before, -penalty, dtype=lowered.dtype))
    best = lowered.argmax(dim=-1)
    return Proposal(best.cpu().numpy(), _probability(torch.softmax(lowered, dim=-1), best))


def _probability(probabilities: Tensor, ids: Tensor) -> NDArray[np.float32]:
    return probabilities.gather(1, ids[:, None])[:, 0].cpu().numpy()
