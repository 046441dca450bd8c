"""dInfer's loop: block after block on committed keys and values, several forwards before it looks again."""

from __future__ import annotations

from functools import partial

import numpy as np

from tracer.decode_accept import accept_threshold, num_unrolled
from tracer.decode_sample import draw
from tracer.decode_state import Active, Choice, Decoding, Ending, Steps, proposal_of
from tracer.schema import ForwardKind

MOST_UNROLLS = 1000  # that may accept nothing in a row where tokens are drawn


def decode_dinfer(decoding: Decoding) -> Steps[Ending]:
    """Decode as dInfer's BlockDiffusionLLM does: prefill, then block after block on committed keys and values.

    A prompt shorter than a block is prefilled with the masks of its block; nothing is committed then. The end of text
    counts also where it stands in the prompt's tail. What is returned is prompt and whole blocks, less every end of text.

    Raises:
        DecodeError: an unroll accepts nothing while masks remain. Differs: dInfer would run for ever.
    Source:
        dInfer, BlockDiffusionLLM and BlockDiffusionRunner. Differs: requests of a batch each go at their own pace;
        dInfer unrolls by the masks of all of them, and goes to the next block once none has masks left.
    """
    settings, tokens = decoding.settings, decoding.token_ids
    first = decoding.blocks[0][1]
    prefilled = max(first, settings.block_length)
    yield from decoding.forward(ForwardKind.PREFILL, -1, 0, 0, prefilled)
    for block, start, stop in decoding.blocks:
        yield from _decode_block(decoding, block, start, stop)
        if settings.early_stop and decoding.holds_eos(start, stop):
            decoding.end_here(stop)
            break
    answer = decoding.answer
    return Ending(answer[answer != settings.eos_id], tokens[tokens != settings.eos_id])


def _decode_block(decoding: Decoding, block: int, start: int, stop: int) -> Steps[None]:
    """Denoise one block and commit it: by its last idle forward, or else by a forward of its own."""
    rule = partial(choose_dinfer, decoding)
    iteration = num_masked = num_vain = 0
    while remaining := decoding.num_masked(start, stop):
        num_accepted = 0
        for _ in range(num_unrolled(remaining)):
            num_masked = decoding.num_masked(start, stop)
            kind = ForwardKind.DENOISE if num_masked else ForwardKind.IDLE
            event = yield from decoding.forward(kind, block, iteration, start, stop, rule=rule)
            num_accepted += np.count_nonzero(event.accepted)
            iteration += 1
        num_vain = 0 if num_accepted else num_vain + 1
        if num_vain > (0 if decoding.settings.is_greedy else MOST_UNROLLS):
            decoding.refuse(
                block,
                iteration - 1,
                f"nothing can be accepted, the model predicts a mask at all {remaining} masked positions",
            )
    if num_masked:
        yield from decoding.forward(ForwardKind.COMMIT, block, iteration, start, stop)


def choose_dinfer(decoding: Decoding, active: Active) -> Choice:
    """The threshold rule over masked positions, except where the mask itself would be written."""
    settings = decoding.settings
    if settings.is_greedy:
        proposal = proposal_of(active.prediction)
    else:
        proposal = draw(active.logits, settings.temperature, decoding.rng, tempered_confidence=False)
    eligible = active.masked & (proposal.ids != settings.mask_id)
    return Choice(proposal.ids, accept_threshold(proposal.confidence, eligible, settings.threshold))
