import pytest
from decode_models import EOS, MASK, settings

from tracer.decode import LOOPS
from tracer.decode_settings import LOOP_NAMES
from tracer.schema import TraceError

SGLANG = ("sglang_low_confidence", "sglang_joint_threshold")


def test_every_loop_has_settings():
    assert tuple(LOOPS) == LOOP_NAMES


@pytest.mark.parametrize(
    ("loop", "own"),
    [
        ("dinfer", {"threshold": 0.9}),
        ("hf20", {"threshold": 0.95, "sampler": "greedy", "steps": 32, "minimal_topk": 1}),
        (
            "hf21",
            {
                "threshold": 0.95,
                "edit_threshold": 0.9,
                "max_post_steps": 16,
                "num_to_transfer": 1,
                "mask_mode": "strict",
            },
        ),
        ("sglang_low_confidence", {"threshold": 0.95}),
        (
            "sglang_joint_threshold",
            {"threshold": 0.5, "edit_threshold": 0.0, "max_post_steps": 16, "penalty": 0.0, "always_commit": True},
        ),
    ],
)
def test_defaults_of_each_engine(loop, own):
    common = {"loop": loop, "block_length": 32, "gen_length": 32, "early_stop": True, "temperature": 0.0, "batch": 1}
    assert settings(loop=loop).facts() == common | own


def test_what_is_given_takes_the_place_of_a_default():
    chosen = settings(loop="hf21", threshold=0.7, edit_threshold=0.0, max_post_steps=0)
    assert (chosen.threshold, chosen.edit_threshold, chosen.max_post_steps) == (0.7, 0.0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_length": 0}, "block_length 0: must be at least 1"),
        ({"gen_length": 0}, "gen_length 0: must be at least 1"),
        ({"threshold": 1.5}, "threshold 1.5: must be from 0 to 1"),
        ({"threshold": float("nan")}, "threshold nan: must be from 0 to 1"),
        ({"eos_id": MASK}, "mask and end of text have the same id 7: must be different tokens"),
        ({"mask_id": EOS}, "mask and end of text have the same id 6: must be different tokens"),
        ({"loop": "greedy"}, f"decode loop 'greedy': allowed: {', '.join(LOOP_NAMES)}"),
        ({"loop": "hf2"}, f"decode loop 'hf2': did you mean hf21? allowed: {', '.join(LOOP_NAMES)}"),
        ({"batch": 0}, "batch 0: must be from 1 to 32"),
        ({"batch": 33}, "batch 33: must be from 1 to 32"),
        ({"seed": -1}, "seed -1: must be at least 0"),
        ({"temperature": -0.5}, "temperature -0.5: must be a number, 0 or more"),
        ({"temperature": float("inf")}, "temperature inf: must be a number, 0 or more"),
        ({"temperature": float("nan")}, "temperature nan: must be a number, 0 or more"),
        ({"loop": SGLANG[0], "temperature": 0.5}, f"temperature 0.5: must be 0, the loop {SGLANG[0]} draws nothing"),
        ({"loop": SGLANG[1], "temperature": 0.5}, f"temperature 0.5: must be 0, the loop {SGLANG[1]} draws nothing"),
        (
            {"edit_threshold": 0.5},
            "edit_threshold 0.5: the loop dinfer has no such setting, only hf21, sglang_joint_threshold",
        ),
        ({"loop": "hf20", "mask_mode": "soft01"}, "mask_mode soft01: the loop hf20 has no such setting, only hf21"),
        ({"sampler": "stock"}, "sampler stock: the loop dinfer has no such setting, only hf20"),
        ({"loop": "hf20", "sampler": "nucleus"}, "sampler 'nucleus': allowed: greedy, stock"),
        ({"loop": "hf21", "mask_mode": "soft"}, "mask_mode 'soft': did you mean soft01? allowed: strict, soft01"),
        ({"loop": "hf20", "steps": 0}, "steps 0: must be at least 1"),
        ({"loop": "hf20", "minimal_topk": 0}, "minimal_topk 0: must be at least 1"),
        (
            {"loop": "hf20", "minimal_topk": 33},
            "minimal_topk 33: must be at most gen_length 32, or no forward is run",
        ),
        ({"loop": "hf21", "num_to_transfer": 0}, "num_to_transfer 0: must be at least 1"),
        ({"loop": "hf21", "max_post_steps": -1}, "max_post_steps -1: must be at least 0"),
        ({"loop": "hf21", "edit_threshold": 2.0}, "edit_threshold 2.0: must be from 0 to 1"),
        ({"loop": SGLANG[1], "penalty": -1.0}, "penalty -1.0: must be a number, 0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(TraceError) as raised:
        settings(**changes)
    assert str(raised.value) == message
