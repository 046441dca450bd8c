"""The loops of the released modeling code, LLaDA2.0 and LLaDA2.1: the whole window at every forward, without a cache."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from tracer.decode_accept import accept_above, step_quotas
from tracer.decode_sample import Proposal, draw
from tracer.decode_state import Active, Choice, Decoding, Ending, StallWatch, Steps, proposal_of, until_eos
from tracer.schema import ForwardKind


def decode_hf20(decoding: Decoding) -> Steps[Ending]:
    """Decode as LLaDA2.0's `generate` does: at most `steps` forwards over all from position 0 to the block's end.

    Kept as they are there: a mask that the model predicts is taken and stays, and may be left when the steps are
    over; with an end of text in the block, decoding ends after it even without `early_stop`; with `early_stop`, it
    ends as soon as one is accepted and no mask stands before the first one in the row. That first one may stand in
    the prompt, whose part up to it is then returned; what an early stop returns holds the prompt.

    Source:
        LLaDA2.0, released `generate`. Differs: the stock sampler draws at temperature 0 too, and takes the probability
        of what it drew for its confidence; `sampler=greedy` takes the likeliest token instead.
    """
    settings = decoding.settings
    quotas = step_quotas(settings.block_length, min(settings.steps, settings.gen_length // settings.minimal_topk))
    for block, start, stop in decoding.blocks:
        for iteration, quota in enumerate(quotas):
            if not decoding.num_masked(start, stop):
                break
            rule = partial(_choose_hf20, decoding, quota)
            event = yield from decoding.forward(ForwardKind.DENOISE, block, iteration, 0, stop, rule=rule, active=start)
            took_eos = (decoding.token_ids[:stop][event.accepted] == settings.eos_id).any()
            if settings.early_stop and took_eos and (end := _early_end(decoding, stop)) is not None:
                return _end_early(decoding, end)
        if decoding.holds_eos(decoding.prompt_length, stop):
            decoding.end_here(stop)
            break
    return until_eos(decoding.answer, settings.eos_id)


def _early_end(decoding: Decoding, stop: int) -> int | None:
    """Position of the row's first end of text, if no mask stands between the prompt and it."""
    position = int(np.flatnonzero(decoding.token_ids[:stop] == decoding.settings.eos_id)[0])
    return None if decoding.num_masked(decoding.prompt_length, position) else position


def _end_early(decoding: Decoding, position: int) -> Ending:
    """The row up to and with the end of text at a position, prompt included."""
    settings, tokens = decoding.settings, decoding.token_ids
    returned = tokens[: position + 1].copy()
    tokens[tokens == settings.mask_id] = settings.eos_id
    return Ending(returned[:-1][decoding.prompt_length :][: settings.gen_length], returned)


def _choose_hf20(decoding: Decoding, quota: int, active: Active) -> Choice:
    proposal = _propose(decoding, active)
    return Choice(proposal.ids, accept_above(proposal.confidence, active.masked, decoding.settings.threshold, quota))


def decode_hf21(decoding: Decoding) -> Steps[Ending]:
    """Decode as LLaDA2.1's `generate` does: denoise a block, edit it meanwhile, and go on until nothing is edited.

    A block ends with a forward that edits nothing, or after `max_post_steps` forwards without masks. An end of text
    matters after a block, and with `early_stop` only.

    Raises:
        DecodeError: a block would never lose its masks. Differs: the released loop would run for ever.
    Source:
        LLaDA2.1, released `generate`. Differs: `mask_mode=strict` hides later blocks, which the released loop means to
        do; it passes its mask of zeros and ones where one is added to scores: `mask_mode=soft01`.
    """
    settings = decoding.settings
    rule = partial(_choose_hf21, decoding)
    for block, start, stop in decoding.blocks:
        watch = StallWatch(decoding, block, start, stop)
        iteration = post_steps = 0
        while True:
            num_masked = decoding.num_masked(start, stop)
            if num_masked:
                watch.look(iteration, post_steps)
            elif (post_steps := post_steps + 1) > settings.max_post_steps:
                break
            kind = ForwardKind.DENOISE if num_masked else ForwardKind.EDIT
            event = yield from decoding.forward(kind, block, iteration, 0, stop, rule=rule, active=start)
            iteration += 1
            if not num_masked and not event.edited.any():
                break
        if settings.early_stop and decoding.holds_eos(decoding.prompt_length, stop):
            decoding.end_here(stop)
            break
    return until_eos(decoding.answer, settings.eos_id)


def _choose_hf21(decoding: Decoding, active: Active) -> Choice:
    settings = decoding.settings
    proposal = _propose(decoding, active)
    taken = accept_above(proposal.confidence, active.masked, settings.threshold, settings.num_to_transfer)
    return Choice(proposal.ids, taken | edits(proposal, active, settings.edit_threshold))


def edits(proposal: Proposal, active: Active, threshold: float) -> NDArray[np.bool_]:
    """Tokens, but not those of the prompt, for which another one is proposed with more confidence than the threshold."""
    is_sure = proposal.confidence > np.float32(threshold)
    return ~active.masked & ~active.is_prompt & is_sure & (proposal.ids != active.token_ids)


def _propose(decoding: Decoding, active: Active) -> Proposal:
    settings = decoding.settings
    if settings.is_greedy:
        return proposal_of(active.prediction)
    return draw(active.logits, settings.temperature or 1.0, decoding.rng, tempered_confidence=True)
