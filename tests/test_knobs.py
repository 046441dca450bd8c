"""Knobs from Python are held to the types of their fields, as those of the command line are."""

import numpy as np
import pytest
from strategies import random_passes

from policies.contract import Context, PolicyError
from policies.registry import POLICIES, build_policy, policy_module

SHAPE, PASSES = random_passes(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"coop": "false"}, "oled: coop is 'false', must be true or false"),
        ({"priority": 0}, "oled: priority is 0, must be true or false"),
        ({"layer_adapt": []}, "must be true or false"),
        ({"prefill_updates": None}, "prefill_updates is None, must be true or false"),
        ({"max_swaps": 1.5}, "oled: max_swaps is 1.5, must be a whole number"),
        ({"resize_every": None}, "resize_every is None, must be a whole number"),
        ({"c_min": True}, "c_min is True, must be a whole number"),
        ({"t_gpu_ns": 0.9}, "t_gpu_ns is 0.9, must be a whole number"),
        ({"kappa": "1"}, "oled: kappa is '1', must be a number"),
        ({"kappa": None}, "kappa is None, must be a number"),
        ({"ema": True}, "ema is True, must be a number"),
        ({"lambda_ms": [1]}, r"lambda_ms is \[1\], must be a number"),
        ({"tie": None}, "tie is None, must be text"),
        ({"tie": ["id"]}, "must be text"),
        ({5: 1}, "oled has no knob 5; allowed:"),
        ({"ema": 2}, "ema is 2: must be above 0"),
        # what compiled code could not count with
        ({"kappa": 1e308}, r"kappa is 1e\+308, must be within 1e\+15"),
        ({"kappa": 1e30}, r"kappa is 1e\+30, must be within 1e\+15"),
        ({"lambda_ms": 1e16}, r"lambda_ms is 1e\+16, must be within"),
        ({"conf_flip_scale": 1.1e15}, r"conf_flip_scale is 1.1e\+15, must be within"),
        ({"t_gpu_ns": 2**63 - 1}, r"t_gpu_ns is 9.22337e\+18, must be within"),
        ({"max_swaps": 10**400}, r"max_swaps is 10+, must be within 1e\+300"),
        ({"end_iter_tokens": 65537}, "end_iter_tokens is 65537: must be 1 to 65536"),
        ({"end_iter_tokens": 0}, "end_iter_tokens is 0: must be 1 to 65536"),
    ],
)
def test_a_value_of_another_type_is_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        build_policy("oled", knobs, Context(SHAPE))


@pytest.mark.parametrize("name", [None, 5, ["lru"], {}])
def test_what_is_no_name_is_no_policy(name):
    with pytest.raises(PolicyError, match="no policy "):
        policy_module(name)


@pytest.mark.parametrize("knobs", [None, "misses", 5, [("misses", "h2d")]])
def test_what_holds_no_knobs_is_refused(knobs):
    with pytest.raises(PolicyError, match=r"lru was given \w+, needs its own Knobs or a mapping"):
        build_policy("lru", knobs, Context(SHAPE))


def test_numbers_of_numpy_and_whole_floats_are_numbers():
    knobs = {"max_swaps": np.int64(3), "kappa": np.float32(0.5), "resize_every": 7.0, "coop": False}
    built = build_policy("oled", knobs, Context(SHAPE))
    assert built.variant == "kappa=0.5, max_swaps=3, coop=false, resize_every=7"


def test_a_policys_own_knobs_are_checked_too():
    knobs = POLICIES["oled"].Knobs(coop=False)
    assert build_policy("oled", knobs, Context(SHAPE)).variant == "coop=false"
    knobs.coop = "false"
    with pytest.raises(PolicyError, match="coop is 'false'"):
        build_policy("oled", knobs, Context(SHAPE))
