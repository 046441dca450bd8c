"""SGLang's loops: prompts block by block, then LowConfidence, or JointThreshold, which edits."""

from __future__ import annotations

from functools import partial

from tracer.decode_accept import accept_above
from tracer.decode_hf import edits
from tracer.decode_sample import propose_penalised
from tracer.decode_settings import DecodeSettings
from tracer.decode_state import Active, Choice, Decoding, Ending, Steps, proposal_of, until_eos
from tracer.schema import ForwardKind


def decode_low_confidence(decoding: Decoding) -> Steps[Ending]:
    """Decode as SGLang's LowConfidence does: until no mask is left, then one forward that stores the final block.

    Raises:
        DecodeError: masks are left after as many forwards as the block has positions. Differs: SGLang would go on.
    Source:
        SGLang, dllm/algorithm/low_confidence.py and base.py.
    """
    rule = partial(_choose_low_confidence, decoding.settings)
    yield from _prefill(decoding)
    for block, start, stop in decoding.blocks:
        iteration = 0
        while decoding.num_masked(start, stop):
            if iteration == decoding.settings.block_length:
                _refuse_masks(decoding, block, start, stop, iteration)
            yield from decoding.forward(ForwardKind.DENOISE, block, iteration, start, stop, rule=rule)
            iteration += 1
        yield from decoding.forward(ForwardKind.COMMIT, block, iteration, start, stop)
        if _is_ended(decoding, stop):
            break
    return until_eos(decoding.answer, decoding.settings.eos_id)


def _choose_low_confidence(settings: DecodeSettings, active: Active) -> Choice:
    ids, confidence = proposal_of(active.prediction)
    return Choice(ids, accept_above(confidence, active.masked, settings.threshold))


def decode_joint_threshold(decoding: Decoding) -> Steps[Ending]:
    """Decode as SGLang's JointThreshold does: denoise and edit, then edit until nothing changes or edits run out.

    With `always_commit` a forward of its own stores the final block, as in versions that schedule steps; without, as
    in the versions before, only where the last forward changed something. Edits run out when a forward without masks
    is the (max_post_steps + 1)th: it changes nothing.

    Raises:
        DecodeError: masks are left when the steps of a block are over. Differs: SGLang would go on.
    Source:
        SGLang, dllm/algorithm/joint_threshold.py and base.py, in both versions.
    """
    yield from _prefill(decoding)
    for block, start, stop in decoding.blocks:
        yield from _decode_block(decoding, block, start, stop)
        if _is_ended(decoding, stop):
            break
    return until_eos(decoding.answer, decoding.settings.eos_id)


def _decode_block(decoding: Decoding, block: int, start: int, stop: int) -> Steps[None]:
    settings = decoding.settings
    rule = partial(_choose_joint, settings)
    # JointThreshold.max_steps, and before it the bound of the loop itself
    most_steps = settings.block_length + settings.max_post_steps + settings.always_commit
    iteration = post_steps = 0
    is_changed = True
    while is_changed and iteration < most_steps:
        is_edit = not decoding.num_masked(start, stop)
        post_steps += is_edit
        spent = post_steps > settings.max_post_steps
        event = yield from decoding.forward(
            ForwardKind.EDIT if is_edit else ForwardKind.DENOISE,
            block,
            iteration,
            start,
            stop,
            rule=None if spent else rule,
        )
        is_changed = not is_edit or bool(event.edited.any())
        iteration += 1
    if decoding.num_masked(start, stop):
        _refuse_masks(decoding, block, start, stop, iteration)
    if settings.always_commit or is_changed:
        yield from decoding.forward(ForwardKind.COMMIT, block, iteration, start, stop)


def _choose_joint(settings: DecodeSettings, active: Active) -> Choice:
    if settings.penalty > 0:
        proposal = propose_penalised(active.logits, active.token_ids, settings.penalty)
    else:
        proposal = proposal_of(active.prediction)
    taken = accept_above(proposal.confidence, active.masked, settings.threshold)
    return Choice(proposal.ids, taken | edits(proposal, active, settings.edit_threshold))


def _prefill(decoding: Decoding) -> Steps[None]:
    """One forward for each full block of the prompt."""
    length = decoding.settings.block_length
    for iteration, start in enumerate(range(0, decoding.blocks[0][1], length)):
        yield from decoding.forward(ForwardKind.PREFILL, -1, iteration, start, start + length)


def _is_ended(decoding: Decoding, stop: int) -> bool:
    """Whether the new tokens hold an end of text that counts."""
    if not (decoding.settings.early_stop and decoding.holds_eos(decoding.prompt_length, stop)):
        return False
    decoding.end_here(stop)
    return True


def _refuse_masks(decoding: Decoding, block: int, start: int, stop: int, iteration: int) -> None:
    remaining = decoding.num_masked(start, stop)
    decoding.refuse(
        block, iteration, f"{remaining} masks are left after {iteration} forwards, the model predicts masks"
    )
