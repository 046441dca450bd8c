from collections import Counter

import numpy as np
import pytest
import torch
from decode_models import EOS, MASK, VOCAB, WORD, ScriptedModel, decode, decode_request, kinds, settings

from tracer.decode_accept import accept_threshold
from tracer.decode_sample import draw, predict
from tracer.decode_settings import DecodeError
from tracer.schema import ForwardKind

PREFILL, DENOISE, IDLE, COMMIT = ForwardKind.PREFILL, ForwardKind.DENOISE, ForwardKind.IDLE, ForwardKind.COMMIT


def accept(confidence, threshold):
    confidence = np.array(confidence, np.float32)
    return int(accept_threshold(confidence, np.ones(len(confidence), bool), threshold).sum())


def test_a1_near_ties_with_the_best_are_accepted():
    assert accept([0.5, 0.499995, 0.3], 0.9) == 2


def test_a2_equality_with_the_threshold_counts():
    c = np.float32(0.49999988)
    assert accept([0.95, c, 0.3], float(c)) == 2


def test_a4_beyond_the_tie_only_the_best():
    assert accept([0.5, 0.49998, 0.3], 0.9) == 1


def test_a3_at_least_one_token_is_accepted_below_the_threshold():
    rng = np.random.default_rng(0)
    for _ in range(50):
        confidence = rng.uniform(0, 0.89, 16).astype(np.float32)
        eligible = rng.random(16) < 0.5
        accepted = accept_threshold(confidence, eligible, 0.9)
        assert accepted.any() == eligible.any()
        assert not (accepted & ~eligible).any()
        if eligible.any():
            assert accepted[np.argmax(np.where(eligible, confidence, -1))]


def test_a3_the_number_of_masks_strictly_falls():
    class Graded(ScriptedModel):
        """All below the threshold, and no two alike: the later a position, the more confident."""

        def forward(self, token_ids, start):
            logits = super().forward(token_ids, start)
            return logits + torch.arange(len(logits))[:, None] * 0.05 * torch.nn.functional.one_hot(
                logits.argmax(1), VOCAB
            )

    _, events = decode(Graded(num_confident=0), [], block_length=8, gen_length=8)
    denoising = [event for event in events if event.kind == DENOISE]
    assert max(event.p_argmax[event.is_masked_in].max() for event in denoising) < 0.9
    assert [event.is_masked_in.sum() for event in denoising] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [event.accepted.argmax() for event in denoising] == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("num_accepted", "total", "denoise", "idle", "commit"),
    [
        (1, 33, 32, 0, 1),
        (2, 17, 16, 1, 0),
        (3, 12, 11, 1, 0),
        (5, 8, 7, 1, 0),
        (8, 5, 4, 0, 1),
        (16, 4, 2, 2, 0),
        (32, 4, 1, 3, 0),
    ],
)
def test_l1_forwards_of_a_block_of_32_masks(num_accepted, total, denoise, idle, commit):
    _, events = decode(ScriptedModel(num_accepted), [WORD] * 32)
    counts = Counter(kinds(events))
    assert counts == Counter({PREFILL: 1, DENOISE: denoise, IDLE: idle, COMMIT: commit})
    assert counts.total() - 1 == total


@pytest.mark.parametrize("num_accepted", [1, 2, 3, 5, 8, 16, 32])
def test_each_block_is_left_by_a_forward_over_its_final_tokens(num_accepted):
    model = ScriptedModel(num_accepted)
    result, events = decode(model, [WORD] * 40, gen_length=60)
    assert (model.committed, model.run) == (96, 128)
    for block in range(3):
        of_block = [event for event in events if event.block == block]
        assert not of_block[-1].is_masked_in.any()
        assert of_block[-1].token_ids_in.tolist() == result.token_ids[of_block[-1].positions].tolist()
        assert [event.iteration for event in of_block] == list(range(len(of_block)))
        assert {event.kv_len for event in of_block} == {32 + 32 * block}


def test_prompt_tail_shares_the_first_block():
    result, events = decode(ScriptedModel(4), [2] * 37, gen_length=10)
    assert [(e.block, e.kv_len, len(e.positions)) for e in events[:2]] == [(-1, 0, 32), (0, 32, 32)]
    assert events[0].kind == PREFILL
    assert not events[0].is_masked_in.any()
    assert events[1].is_masked_in.tolist() == [False] * 5 + [True] * 27
    assert events[1].positions.tolist() == list(range(32, 64))
    assert result.generated_ids == [WORD] * 10


def test_prompt_of_whole_blocks_leaves_the_first_block_all_masks():
    _, events = decode(ScriptedModel(4), [2] * 64, gen_length=32)
    assert (events[0].kind, len(events[0].positions)) == (PREFILL, 64)
    assert events[1].kv_len == 64
    assert events[1].is_masked_in.all()


@pytest.mark.parametrize("prompt", [[], [2] * 5])
def test_prompt_shorter_than_a_block_prefills_its_masks_and_commits_nothing(prompt):
    model = ScriptedModel(4)
    _, events = decode(model, prompt, gen_length=32)
    assert model.calls[:2] == [(0, 32), (0, 32)]
    assert events[0].kind == PREFILL
    assert not events[0].accepted.any()
    assert events[0].is_masked_in.sum() == 32 - len(prompt)
    assert (events[1].kind, events[1].kv_len, events[1].block, events[1].iteration) == (DENOISE, 0, 0, 0)


def test_tail_of_the_last_block_is_accepted_but_not_part_of_the_answer():
    result, events = decode(ScriptedModel(4), [2] * 32, gen_length=40)
    assert sum(event.accepted.sum() for event in events) == 64
    assert len(result.token_ids) == 96
    assert result.generated_ids == [WORD] * 40


def test_early_stop_ends_after_the_block_that_holds_the_end_of_text():
    result, events = decode(ScriptedModel(4, {10: EOS}), [2] * 8, block_length=8, gen_length=32)
    assert max(event.block for event in events) == 0
    assert sum(event.accepted.sum() for event in events) == 8
    assert result.token_ids[8:16].tolist() == [WORD, WORD, EOS, WORD, WORD, WORD, WORD, WORD]
    assert (result.token_ids[16:] == EOS).all()
    assert result.generated_ids == [WORD] * 7


def test_without_early_stop_decoding_goes_on_to_the_end():
    result, events = decode(ScriptedModel(4, {10: EOS}), [2] * 8, block_length=8, gen_length=32, early_stop=False)
    assert max(event.block for event in events) == 3
    assert sum(event.accepted.sum() for event in events) == 32
    assert result.generated_ids == [WORD] * 31


def test_end_of_text_in_the_prompts_tail_stops_after_the_first_block():
    _, events = decode(ScriptedModel(4), [2] * 8 + [EOS], block_length=8, gen_length=32)
    assert max(event.block for event in events) == 0


@pytest.mark.parametrize("block_length", [1, 4, 16, 64])
def test_block_lengths(block_length):
    result, events = decode(ScriptedModel(3), [2] * 10, block_length=block_length, gen_length=20)
    assert result.generated_ids == [WORD] * 20
    decoded = len(result.token_ids) - 10
    assert sum(event.accepted.sum() for event in events) == decoded
    for event in events[1:]:
        assert len(event.positions) == block_length
        assert event.kv_len % block_length == 0


def test_mask_stall_names_request_and_block():
    model = ScriptedModel(4, dict.fromkeys(range(16, 24), MASK))
    with pytest.raises(DecodeError, match=r"^request 3, block 1, iteration 1: .*8 masked"):
        decode_request(model, [2] * 8, settings(block_length=8), lambda event: None, request=3)


def test_a_predicted_mask_waits_while_others_are_accepted():
    class Hesitant(ScriptedModel):
        def forward(self, token_ids, start):
            self.answers = {9: MASK} if (token_ids == MASK).sum() > 1 else {}
            return super().forward(token_ids, start)

    result, events = decode(Hesitant(8), [2] * 8, block_length=8, gen_length=8)
    assert [event.accepted[1] for event in events[1:3]] == [False, True]
    assert events[1].accepted.sum() == 7
    assert result.generated_ids == [WORD] * 8


def test_probabilities_of_a_forward():
    _, events = decode(ScriptedModel(1), [2] * 33, gen_length=31)
    first = events[1]
    assert np.isnan(first.p_current[1:]).all()
    assert first.p_current[0] == pytest.approx(0.3)
    assert first.p_argmax[1] == pytest.approx(0.95)
    assert first.argmax_ids[:2].tolist() == [2, WORD]
    assert first.wall_ns > 0


def test_s1_softmax():
    guess = predict(torch.tensor([[2.0, 1.0, 0.0]] * 3), np.array([0, 1, 2]))
    assert guess.argmax_ids.tolist() == [0, 0, 0]
    assert guess.p_argmax == pytest.approx([0.66524096] * 3, abs=1e-7)
    assert guess.p_current == pytest.approx([0.66524096, 0.24472847, 0.09003057], abs=1e-7)


def test_s1_softmax_over_a_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 200)
    tempered = np.float32([0.86681333, 0.11731043, 0.01587624])
    raw = np.float32([0.66524096, 0.24472847, 0.09003057])
    for expected, as_generate_has_it in ((tempered, True), (raw, False)):
        ids, confidence = draw(logits, 0.5, np.random.default_rng(0), tempered_confidence=as_generate_has_it)
        assert set(ids.tolist()) == {0, 1, 2}
        np.testing.assert_allclose(confidence, expected[ids], atol=1e-7)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    num_draws, logits = 40_000, torch.tensor([2.0, 1.0, 0.0, -1e9, 1.5])
    ids, _ = draw(logits.expand(num_draws, -1), 0.5, np.random.default_rng(0), tempered_confidence=True)
    likely = (logits / 0.5).softmax(0).numpy()
    found = np.bincount(ids, minlength=5)
    assert found[3] == 0
    kept = [0, 1, 2, 4]
    expected = num_draws * likely[kept]
    assert ((found[kept] - expected) ** 2 / expected).sum() < 16.3  # chi squared, 3 degrees of freedom


def test_what_is_drawn_is_the_number_below_which_the_probabilities_add_up():
    class Numbers:
        def __init__(self, *numbers):
            self.numbers = numbers

        def random(self, count):
            return np.array(self.numbers)

    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(5, -1)
    ids, _ = draw(logits, 1.0, Numbers(0.0, 0.49, 0.51, 0.76, 1 - 1e-12), tempered_confidence=True)
    assert ids.tolist() == [0, 0, 1, 2, 2]


def test_logits_that_are_not_finite_are_refused():
    class Broken(ScriptedModel):
        def forward(self, token_ids, start):
            return super().forward(token_ids, start) * float("nan")

    with pytest.raises(DecodeError, match="block -1, iteration 0: logits are not finite"):
        decode(Broken(), [2] * 8)


def test_prompt_with_a_mask_is_refused():
    with pytest.raises(DecodeError, match="request 0: the prompt holds the mask token 7"):
        decode(ScriptedModel(), [2, MASK])


def test_what_dinfer_returns_holds_the_prompt_and_no_end_of_text_at_all():
    result, _ = decode(ScriptedModel(4, {10: EOS}), [2, EOS, 3] + [2] * 5, block_length=8, gen_length=5)
    assert result.returned_ids == [2, 3, *[2] * 5, *[WORD] * 7]  # to the end of the block
    assert result.generated_ids == [WORD] * 4
