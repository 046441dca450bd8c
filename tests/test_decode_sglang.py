from collections import Counter
from math import ceil

import numpy as np
import pytest
import torch
from decode_models import EOS, MASK, WORD, Editing, ScriptedModel, decode, kinds

from tracer.decode_sample import predict, propose_penalised
from tracer.decode_settings import DecodeError
from tracer.schema import ForwardKind

PREFILL, DENOISE, COMMIT, EDIT = ForwardKind.PREFILL, ForwardKind.DENOISE, ForwardKind.COMMIT, ForwardKind.EDIT
LOW = {"loop": "sglang_low_confidence", "threshold": 0.9}
JOINT = {"loop": "sglang_joint_threshold", "threshold": 0.9, "edit_threshold": 0.9}
OLD = JOINT | {"always_commit": False}


@pytest.mark.parametrize("num_accepted", [1, 2, 3, 5, 8, 16, 32])
def test_l2_low_confidence_runs_one_forward_more_which_commits(num_accepted):
    _, events = decode(ScriptedModel(num_accepted), [WORD] * 32, **LOW)
    assert kinds(events) == [PREFILL] + [DENOISE] * ceil(32 / num_accepted) + [COMMIT]


@pytest.mark.parametrize("loop", [LOW, JOINT])
def test_prompts_are_run_block_by_block(loop):
    model = ScriptedModel(8)
    _, events = decode(model, [2] * 21, block_length=8, gen_length=8, **loop)
    assert model.calls[:3] == [(0, 8), (8, 16), (16, 24)]
    assert [(e.kind, e.block, e.iteration, e.kv_len) for e in events[:3]] == [
        (PREFILL, -1, 0, 0),
        (PREFILL, -1, 1, 8),
        (DENOISE, 0, 0, 16),
    ]
    assert events[2].is_masked_in.tolist() == [False] * 5 + [True] * 3
    _, events = decode(ScriptedModel(8), [2] * 5, block_length=8, gen_length=3, **loop)
    assert events[0].kind == DENOISE


@pytest.mark.parametrize("loop", [LOW, JOINT, OLD])
def test_the_last_forward_of_a_block_is_over_its_final_tokens(loop):
    model = Editing(3, lambda n: {12: 3} if n == 0 else {})
    result, events = decode(model, [2] * 10, block_length=16, gen_length=40, **loop)
    for block in range(4):
        last = [event for event in events if event.block == block][-1]
        assert not last.is_masked_in.any()
        assert not last.edited.any()
        assert last.token_ids_in.tolist() == result.token_ids[last.positions].tolist()


@pytest.mark.parametrize("num_accepted", [1, 3, 8, 32])
def test_joint_threshold_without_edits(num_accepted):
    num_denoise = ceil(32 / num_accepted)
    _, events = decode(ScriptedModel(num_accepted), [], **JOINT)
    assert kinds(events) == [DENOISE] * num_denoise + [EDIT, COMMIT]
    _, events = decode(ScriptedModel(num_accepted), [], **OLD)
    assert kinds(events) == [DENOISE] * num_denoise + [EDIT]


def test_joint_threshold_edits_until_nothing_changes():
    def edits(n):
        return {3 + n: 3} if n < 2 else {}

    _, events = decode(Editing(16, edits), [], **JOINT)
    assert kinds(events) == [DENOISE] * 2 + [EDIT] * 3 + [COMMIT]
    _, events = decode(Editing(16, edits), [], **OLD)
    assert kinds(events) == [DENOISE] * 2 + [EDIT] * 3
    assert [np.flatnonzero(event.edited).tolist() for event in events] == [[], [], [3], [4], []]


@pytest.mark.parametrize(("num_accepted", "num_denoise"), [(32, 1), (8, 4)])
def test_joint_threshold_gives_up_an_edit_that_never_settles(num_accepted, num_denoise):
    """The forward after the last edit only finds that edits have run out."""
    never = Editing(num_accepted, lambda n: {5: 2 + n % 2})
    _, events = decode(never, [], **JOINT)
    assert Counter(kinds(events)) == {DENOISE: num_denoise, EDIT: 17, COMMIT: 1}
    assert [event.edited.any() for event in events if event.kind == EDIT] == [True] * 16 + [False]
    _, events = decode(Editing(num_accepted, lambda n: {5: 2 + n % 2}), [], **OLD)
    assert Counter(kinds(events)) == {DENOISE: num_denoise, EDIT: 17}


def test_joint_threshold_stops_when_the_steps_of_a_block_are_over():
    """32 masks one by one leave 16 of 48 steps in the older versions, whose last one edits: a forward more commits."""
    _, events = decode(Editing(1, lambda n: {5: 2 + n % 2}), [], **OLD)
    assert kinds(events) == [DENOISE] * 32 + [EDIT] * 16 + [COMMIT]
    _, events = decode(Editing(1, lambda n: {5: 2 + n % 2}), [], **JOINT)
    assert kinds(events) == [DENOISE] * 32 + [EDIT] * 17 + [COMMIT]


def test_prompts_are_not_edited():
    model = Editing(32, lambda n: dict.fromkeys(range(10), 3) if n == 0 else {})
    result, _ = decode(model, [2] * 6, **JOINT)
    assert result.token_ids[:11].tolist() == [2] * 6 + [3] * 4 + [WORD]


def test_a_penalty_lowers_the_token_before():
    logits = torch.zeros(3, 5)
    logits[:, 2] = 3.0
    logits[:, 4] = 2.5
    kept = logits.clone()
    ids, confidence = propose_penalised(logits, np.array([2, 1, 2]), 1.0)
    assert ids.tolist() == [2, 4, 2]
    assert torch.equal(logits, kept)
    lowered = torch.tensor([0.0, 0.0, 2.0, 0.0, 2.5])
    assert confidence[1] == pytest.approx(lowered.softmax(0)[4].item())
    assert confidence[0] == pytest.approx(predict(logits, np.array([2, 1, 2])).p_argmax[0])


@pytest.mark.parametrize("loop", [LOW, JOINT, OLD])
def test_an_end_of_text_ends_after_its_block(loop):
    result, events = decode(ScriptedModel(4, {10: EOS}), [2] * 8, block_length=8, gen_length=32, **loop)
    assert {event.block for event in events} == {-1, 0}
    assert result.returned_ids == [WORD, WORD, EOS]
    assert result.generated_ids == [WORD, WORD]
    result, events = decode(
        ScriptedModel(4, {10: EOS}), [2] * 8, block_length=8, gen_length=32, early_stop=False, **loop
    )
    assert max(event.block for event in events) == 3
    assert result.generated_ids == [WORD, WORD]
    _, events = decode(ScriptedModel(4), [EOS] * 9, block_length=8, gen_length=8, **loop)
    assert max(event.block for event in events) == 1  # that of the prompt does not count


@pytest.mark.parametrize(("loop", "num_forwards"), [(LOW, 8), (JOINT, 25), (OLD, 24)])
def test_masks_that_are_left_are_refused(loop, num_forwards):
    model = ScriptedModel(4, dict.fromkeys(range(16, 24), MASK))
    message = rf"^request 0, block 1, iteration {num_forwards}: 8 masks are left after {num_forwards} forwards, "
    with pytest.raises(DecodeError, match=message):
        decode(model, [2] * 8, block_length=8, **loop)
