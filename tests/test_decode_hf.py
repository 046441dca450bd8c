from collections import Counter
from math import ceil

import numpy as np
import pytest
import torch
from decode_models import EOS, MASK, VOCAB, WORD, Editing, NoiseModel, ScriptedModel, decode, kinds

from tracer.decode_accept import accept_above, step_quotas
from tracer.decode_settings import DecodeError
from tracer.schema import ForwardKind

DENOISE, EDIT = ForwardKind.DENOISE, ForwardKind.EDIT
HF20 = {"loop": "hf20", "threshold": 0.9}
HF21 = {"loop": "hf21", "threshold": 0.9, "edit_threshold": 0.9}


def accept(confidence, threshold, quota=1):
    confidence = np.array(confidence, np.float32)
    return accept_above(confidence, np.ones(len(confidence), bool), threshold, quota).tolist()


def test_a1_near_ties_with_the_best_are_not_accepted():
    assert accept([0.5, 0.499995, 0.3], 0.9) == [True, False, False]


def test_a2_equality_with_the_threshold_does_not_count():
    c = np.float32(0.49999988)
    assert accept([0.95, c, 0.3], float(c)) == [True, False, False]


def test_a4_beyond_the_tie_only_the_best():
    assert accept([0.5, 0.49998, 0.3], 0.9) == [True, False, False]


def test_a3_at_least_the_quota_is_accepted_below_the_threshold():
    rng = np.random.default_rng(0)
    for _ in range(50):
        confidence = rng.uniform(0, 0.89, 16).astype(np.float32)
        masked = rng.random(16) < 0.5
        quota = int(rng.integers(0, 5))
        accepted = accept_above(confidence, masked, 0.9, quota)
        assert accepted.sum() == min(quota, masked.sum())
        assert not (accepted & ~masked).any()
        assert confidence[accepted].min(initial=1) >= confidence[masked & ~accepted].max(initial=0)


def test_a_quota_that_is_reached_is_no_limit_and_ties_go_to_the_lower_position():
    assert accept([0.95, 0.96, 0.2, 0.97], 0.9, quota=2) == [True, True, False, True]
    assert accept([0.3, 0.5, 0.5, 0.5], 0.9, quota=2) == [False, True, True, False]
    assert accept([0.3, 0.5], 0.9, quota=0) == [False, False]


@pytest.mark.parametrize(
    ("block_length", "steps", "quotas"),
    [(32, 32, [1] * 32), (32, 5, [7, 7, 6, 6, 6]), (4, 6, [1, 1, 1, 1, 0, 0]), (16, 1, [16])],
)
def test_quotas_share_the_block_among_the_steps(block_length, steps, quotas):
    assert step_quotas(block_length, steps) == quotas


@pytest.mark.parametrize("num_accepted", [1, 2, 3, 5, 8, 16, 32])
def test_l2_hf20_runs_as_many_forwards_as_it_takes_and_no_other(num_accepted):
    _, events = decode(ScriptedModel(num_accepted), [WORD] * 32, **HF20)
    assert kinds(events) == [DENOISE] * ceil(32 / num_accepted)


def test_hf_runs_the_whole_window_and_commits_nothing():
    for loop in (HF20, HF21):
        _, events = decode(ScriptedModel(8), [WORD] * 70, gen_length=60, **loop)
        assert {event.kv_len for event in events} == {0}
        for event in events:
            assert event.positions.tolist() == list(range(96 + 32 * event.block))
            assert not event.accepted[: 64 + 32 * event.block].any()
        assert events[0].is_masked_in.tolist() == [False] * 70 + [True] * 26


def test_hf20_stops_a_block_when_its_steps_are_over():
    _, events = decode(ScriptedModel(0), [WORD] * 32, steps=4, **HF20)
    assert [event.accepted.sum() for event in events] == [8, 8, 8, 8]
    _, events = decode(ScriptedModel(0), [WORD] * 32, steps=32, minimal_topk=8, **HF20)
    assert len(events) == 4


def test_hf20_takes_a_predicted_mask_and_leaves_it():
    model = ScriptedModel(0, {34: MASK})
    result, events = decode(model, [WORD] * 32, gen_length=64, **HF20)
    assert [event.block for event in events] == [0] * 32 + [1] * 32
    of_first = [event.accepted.any() for event in events[:32]]
    assert of_first == [True, True, *[False] * 30]  # from then on the best is the mask
    assert np.flatnonzero(result.token_ids == MASK).tolist() == list(range(34, 64))
    assert events[32].is_masked_in[34:].all()


def test_hf20_ends_after_a_block_with_an_end_of_text_even_without_early_stop():
    result, events = decode(
        ScriptedModel(4, {10: EOS}), [2] * 8, block_length=8, gen_length=32, early_stop=False, **HF20
    )
    assert {event.block for event in events} == {0}
    assert len(events) == 2
    assert result.returned_ids == [WORD, WORD, EOS]
    assert result.generated_ids == [WORD, WORD]
    assert (result.token_ids[16:] == EOS).all()


def test_hf20_ends_early_within_a_block_and_then_returns_the_prompt_too():
    result, events = decode(ScriptedModel(1, {10: EOS}), [2] * 8, block_length=8, gen_length=32, **HF20)
    assert len(events) == 3
    assert result.returned_ids == [2] * 8 + [WORD, WORD, EOS]
    assert result.generated_ids == [WORD, WORD]


def test_hf20_does_not_end_early_before_what_stands_left_of_the_end_of_text():
    class Backwards(ScriptedModel):
        """Decodes from the right."""

        def forward(self, token_ids, start):
            logits = super().forward(token_ids, start)
            best = np.flatnonzero(token_ids == MASK)[-1]
            logits[best, self.answers.get(start + best, WORD)] += 4
            return logits

    result, events = decode(Backwards(0, {10: EOS}), [2] * 8, block_length=8, gen_length=8, **HF20)
    assert len(events) == 8
    assert result.returned_ids == [WORD, WORD, EOS]  # and later nobody looks again


def test_hf20_returns_a_part_of_the_prompt_where_that_holds_an_end_of_text():
    """Pitfall 10: the first end of text is looked for from position 0 on."""
    prompt = [2, EOS, 2, 2, 2, 2, 2, 2]
    result, events = decode(ScriptedModel(1, {10: EOS}), prompt, block_length=8, gen_length=8, **HF20)
    assert len(events) == 3
    assert result.returned_ids == [2, EOS]
    assert result.generated_ids == []
    result, events = decode(ScriptedModel(1), prompt, block_length=8, gen_length=8, **HF20)
    assert (len(events), result.returned_ids) == (8, [WORD] * 8)


def test_hf20s_own_sampler_draws_at_temperature_0():
    """The patched one takes the likeliest token; the stock one takes it as often as it is likely."""
    shares = {}
    for sampler in ("greedy", "stock"):
        result, [event] = decode(ScriptedModel(0), [WORD] * 32, steps=1, sampler=sampler, **HF20)
        shares[sampler] = np.mean(result.token_ids[32:] == event.argmax_ids[32:])
    assert shares["greedy"] == 1
    assert 0.1 < shares["stock"] < 0.55  # the likeliest has 0.3


def test_a_confidence_is_the_probability_of_what_was_drawn():
    """At a threshold of 1/2 nothing that was drawn against the odds is accepted beyond the quota."""
    model = NoiseModel(3, VOCAB, MASK)
    result, events = decode(model, [1], gen_length=31, early_stop=False, loop="hf20", sampler="stock", threshold=0.5)
    for event in events:
        written = np.flatnonzero(event.accepted)
        if len(written) > 1:
            assert (result.token_ids[written] == event.argmax_ids[written]).all()
            assert (event.p_argmax[written] > 0.5).all()
    assert max(event.accepted.sum() for event in events) > 1


@pytest.mark.parametrize("num_accepted", [1, 2, 3, 5, 8, 16, 32])
def test_l3_hf21_checks_a_block_once_more(num_accepted):
    _, events = decode(ScriptedModel(num_accepted), [WORD] * 32, **HF21)
    assert kinds(events) == [DENOISE] * ceil(32 / num_accepted) + [EDIT]


@pytest.mark.parametrize("num_accepted", [1, 3, 8, 32])
def test_l3_hf21_gives_up_an_edit_that_never_settles(num_accepted):
    model = Editing(num_accepted, lambda n: {40: 2 + n % 2})
    result, events = decode(model, [WORD] * 32, **HF21)
    assert Counter(kinds(events)) == {DENOISE: ceil(32 / num_accepted), EDIT: 16}
    edited = [np.flatnonzero(event.edited).tolist() for event in events if event.kind == EDIT]
    assert edited == [[40]] * 16
    assert result.token_ids[40] == 3
    _, events = decode(Editing(32, lambda n: {40: 2 + n % 2}), [WORD] * 32, max_post_steps=0, **HF21)
    assert kinds(events) == [DENOISE]


def test_hf21_edits_until_nothing_changes():
    result, events = decode(Editing(32, lambda n: {33 + n: 3} if n < 2 else {}), [WORD] * 32, **HF21)
    assert kinds(events) == [DENOISE, EDIT, EDIT, EDIT]
    assert [np.flatnonzero(event.edited).tolist() for event in events] == [[], [33], [34], []]
    assert result.generated_ids[:4] == [WORD, 3, 3, WORD]
    assert not events[1].accepted.any()
    assert events[2].token_ids_in[33] == 3


def test_hf21_edits_no_prompt_and_no_earlier_block():
    everywhere = lambda n: dict.fromkeys(range(40), 3) if n == 0 else {}  # noqa: E731 - a table
    result, events = decode(Editing(8, everywhere), [2] * 36, gen_length=28, **HF21)
    assert np.flatnonzero(events[-2].edited).tolist() == [36, 37, 38, 39]
    assert result.token_ids[:36].tolist() == [2] * 36


def test_hf21_edits_while_masks_are_left():
    class Eager(ScriptedModel):
        def forward(self, token_ids, start):
            logits = super().forward(token_ids, start)
            if (token_ids == MASK).sum() == 24:
                logits[32] = np.log(0.05 / (VOCAB - 1))
                logits[32, 3] = np.log(0.95)
            return logits

    _, events = decode(Eager(8), [WORD] * 32, **HF21)
    assert kinds(events) == [DENOISE] * 4 + [EDIT]
    assert [event.edited.sum() for event in events] == [0, 1, 0, 0, 0]
    assert [event.accepted.sum() for event in events] == [8, 8, 8, 8, 0]


def test_hf21_may_edit_a_token_back_to_a_mask():
    _, events = decode(Editing(32, lambda n: {40: MASK} if n == 0 else {}), [WORD] * 32, **HF21)
    assert kinds(events) == [DENOISE, EDIT, DENOISE, EDIT]
    assert np.flatnonzero(events[1].edited).tolist() == [40]
    assert np.flatnonzero(events[2].is_masked_in).tolist() == [40]
    assert np.flatnonzero(events[2].accepted).tolist() == [40]


def test_hf21_counts_post_steps_over_a_whole_block():
    """A token that becomes a mask again and again does not go on for ever: the steps are not counted anew."""
    _, events = decode(Editing(32, lambda n: {40: MASK}), [WORD] * 32, **HF21)
    assert kinds(events) == [DENOISE, EDIT] * 16 + [DENOISE]


def test_hf21_looks_for_an_end_of_text_after_a_block_with_early_stop_only():
    for early_stop, num_blocks in ((True, 1), (False, 4)):
        result, events = decode(
            ScriptedModel(4, {10: EOS}), [2] * 8, block_length=8, gen_length=32, early_stop=early_stop, **HF21
        )
        assert len({event.block for event in events}) == num_blocks
        assert result.returned_ids == [WORD, WORD, EOS]
    _, events = decode(ScriptedModel(4), [EOS] * 9, block_length=8, gen_length=16, **HF21)
    assert len({event.block for event in events}) == 3  # that of the prompt does not count


def test_hf21_that_would_never_end_is_refused():
    model = ScriptedModel(4, dict.fromkeys(range(16, 24), MASK))
    with pytest.raises(DecodeError, match=r"^request 0, block 1, iteration 1: the same tokens again, and 8 masks"):
        decode(model, [2] * 8, block_length=8, **HF21)


def test_hf21_that_draws_masks_for_ever_is_refused():
    class OnlyMasks(ScriptedModel):
        def forward(self, token_ids, start):
            self.begin(token_ids, start)
            logits = torch.full((len(token_ids), VOCAB), -1e4)
            logits[:, MASK] = 0
            return logits

    with pytest.raises(DecodeError, match=r"block 0, iteration 500: 500 forwards over masks, and 1 masks"):
        decode(OnlyMasks(), [], block_length=1, gen_length=1, temperature=1.0, **HF21)
