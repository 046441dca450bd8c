"""Every loop beside the same loop written out once more, on texts that a random function answers."""

import numpy as np
import pytest
import reference_decode
from decode_models import NoiseModel, decode_request, noise

from tracer.decode_settings import LOOP_NAMES, DecodeError, DecodeSettings
from tracer.schema import ForwardKind

VOCAB, MASK, EOS = 9, 8, 7
SMALL = {"mask_id": MASK, "eos_id": EOS, "gen_length": 18}
VARIANTS = {
    "dinfer": [{}, {"threshold": 0.5}, {"temperature": 0.7}],
    "hf20": [{}, {"sampler": "stock"}, {"temperature": 0.6}, {"steps": 3}, {"steps": 5, "minimal_topk": 4}],
    "hf21": [
        {},
        {"threshold": 0.7, "edit_threshold": 0.5},
        {"threshold": 0.5, "edit_threshold": 0.0, "max_post_steps": 3},
        {"num_to_transfer": 3, "max_post_steps": 0},
        {"temperature": 0.5, "edit_threshold": 0.3},
    ],
    "sglang_low_confidence": [{}, {"threshold": 0.4}],
    "sglang_joint_threshold": [
        {},
        {"always_commit": False},
        {"edit_threshold": 0.4, "max_post_steps": 2},
        {"penalty": 1.3},
        {"edit_threshold": 0.6, "penalty": 0.5, "always_commit": False},
    ],
}
CASES = [(loop, changes) for loop in LOOP_NAMES for changes in VARIANTS[loop]]


def run(prompt, settings, seed):
    """What the loop ran, as the reference says it, or why it would not end."""
    events = []
    try:
        result = decode_request(NoiseModel(seed, VOCAB, MASK), prompt, settings, events.append, request=3)
    except DecodeError as error:
        return error, None, None
    ran = [
        reference_decode.Ran(
            event.kind.name.lower(),
            event.block,
            event.iteration,
            int(event.positions[0]),
            event.token_ids_in.tolist(),
            event.positions[event.accepted].tolist(),
            event.positions[event.edited].tolist(),
        )
        for event in events
    ]
    return ran, result.token_ids.tolist(), result.returned_ids


@pytest.mark.parametrize("block_length", [1, 4, 16, 64])
@pytest.mark.parametrize(("loop", "changes"), CASES)
def test_a_loop_does_what_its_description_says(loop, changes, block_length):
    kinds, num_refused = set(), 0
    num_tries, gen_length = (1, 5) if block_length == 1 else (1, 18) if block_length == 64 else (2, 14)
    for seed in range(num_tries):
        rng = np.random.default_rng([seed, block_length])
        prompt = rng.integers(0, MASK, rng.integers(0, 2 * block_length + 6)).tolist()
        chosen = SMALL | {
            "gen_length": gen_length,
            "loop": loop,
            "block_length": block_length,
            "early_stop": seed % 2 == 0,
            "seed": seed,
        }
        settings = DecodeSettings(**chosen | changes)
        ran, token_ids, returned = run(prompt, settings, seed)
        expected = reference_decode.LOOPS[loop](
            prompt, settings, lambda text, seed=seed: noise(seed, text, VOCAB, MASK), np.random.default_rng([seed, 3])
        )
        if isinstance(expected, str):
            assert isinstance(ran, DecodeError), expected
            num_refused += 1
            continue
        assert (ran, token_ids, returned) == expected
        kinds |= {ForwardKind[forward.kind.upper()] for forward in ran}
    assert num_refused < num_tries
    assert kinds <= KINDS[loop]
    if block_length > 1:
        assert ForwardKind.DENOISE in kinds


KINDS = {
    "dinfer": {ForwardKind.PREFILL, ForwardKind.DENOISE, ForwardKind.IDLE, ForwardKind.COMMIT},
    "hf20": {ForwardKind.DENOISE},
    "hf21": {ForwardKind.DENOISE, ForwardKind.EDIT},
    "sglang_low_confidence": {ForwardKind.PREFILL, ForwardKind.DENOISE, ForwardKind.COMMIT},
    "sglang_joint_threshold": {ForwardKind.PREFILL, ForwardKind.DENOISE, ForwardKind.EDIT, ForwardKind.COMMIT},
}


@pytest.mark.parametrize("loop", ["hf21", "sglang_joint_threshold"])
def test_the_texts_make_these_loops_edit(loop):
    """Else the comparison above would say nothing of editing."""
    num_edited = 0
    for seed in range(6):
        settings = DecodeSettings(**SMALL, loop=loop, block_length=16, edit_threshold=0.3)
        ran, _, _ = run([1, 2, 3], settings, seed)
        if not isinstance(ran, DecodeError):
            num_edited += sum(len(forward.edited) for forward in ran)
    assert num_edited > 20


def test_what_is_drawn_depends_on_seed_and_request_only():
    settings = {"loop": "hf20", "temperature": 4.0, "block_length": 16, "early_stop": False, **SMALL}
    texts = [
        decode_request(
            NoiseModel(0, VOCAB, MASK), [1], DecodeSettings(**settings, seed=seed), lambda event: None, request
        ).token_ids.tolist()
        for seed, request in [(0, 0), (0, 0), (1, 0), (0, 1)]
    ]
    assert texts[0] == texts[1]
    assert texts[0] not in (texts[2], texts[3])
