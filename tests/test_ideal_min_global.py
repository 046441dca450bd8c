import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, context_of, min_bypass, most_hits, run, sets_of
from scripted import make_pass, make_shape
from strategies import random_passes, traces

from policies.contract import PolicyError
from policies.driver import drive
from policies.registry import build_policy

H2D = {"misses": "h2d"}
ADAPTIVE = {"priority": True, "layer_adapt": True, "coop": False, "c_min": 1, "resize_every": 1}


def hits_with(name, knobs, shape, passes, slots):
    policy = built(name, knobs, shape, passes)
    return [set(decision.hits.tolist()) for decision in drive(policy, passes, shape, slots, ESTIMATES)]


def batches_of(shape, passes):
    """What each layer execution activates, experts numbered over all layers."""
    return [
        {layer * shape.num_experts + expert for expert in np.unique(pass_.expert_ids[layer]).tolist()}
        for pass_ in passes
        for layer in range(shape.num_layers)
    ]


def test_no_choice_over_all_layers_has_more_hits():
    rng = np.random.default_rng(14)
    for _ in range(60):
        num_layers, num_experts, slots = int(rng.integers(1, 4)), int(rng.integers(2, 4)), int(rng.integers(1, 4))
        shape = make_shape(num_layers, num_experts)
        slots = max(slots, num_layers)
        passes = [
            make_pass(
                i,
                [rng.permutation(num_experts)[: rng.integers(1, num_experts + 1)].tolist() for _ in range(num_layers)],
            )
            for i in range(int(rng.integers(1, 4)))
        ]
        batches = batches_of(shape, passes)
        found = hits_with("ideal_min_global", H2D, shape, passes, slots)
        numbered = [{index % num_layers * num_experts + expert for expert in hits} for index, hits in enumerate(found)]
        before = min_bypass(batches, slots)
        assert numbered == [batch & resident for batch, resident in zip(batches, before, strict=True)]
        assert sum(map(len, found)) == most_hits(batches, slots)


@given(traces(), st.data())
@settings(max_examples=40)
def test_bounds_every_division_of_the_slots_and_every_pool(trace, data):
    shape, passes = trace
    slots = data.draw(st.integers(shape.num_layers, shape.num_layers * shape.num_experts))
    name, knobs = data.draw(
        st.sampled_from(
            [
                ("ideal_min", H2D),
                ("lru", {}),
                ("lfu", {"pool": "global"}),
                ("oled", ADAPTIVE),
                ("oled", {**ADAPTIVE, "resize": "lazy"}),
            ]
        )
    )
    bound, reached = (
        sum(map(len, hits_with(*policy, shape, passes, slots))) for policy in (("ideal_min_global", H2D), (name, knobs))
    )
    assert reached <= bound


def test_with_one_layer_it_is_ideal_min():
    shape, passes = random_passes(np.random.default_rng(4), num_layers=1)
    for knobs in (H2D, {}):
        one, two = (run(name, knobs, shape, passes, 5) for name in ("ideal_min", "ideal_min_global"))
        assert [d.plan.retained.tolist() for d in one] == [d.plan.retained.tolist() for d in two]


def test_with_a_slot_for_every_expert_only_first_touches_miss():
    shape, passes = random_passes(np.random.default_rng(8))
    missed = sum(len(d.plan.transfers) for d in run("ideal_min_global", H2D, shape, passes, shape.num_experts))
    assert missed == sum(len(set().union(*sets_of(passes, layer))) for layer in range(shape.num_layers))


def test_split_misses_are_kept_only_where_they_were_copied():
    shape, passes = random_passes(np.random.default_rng(2))
    decisions = run("ideal_min_global", {}, shape, passes, 5)
    assert any(len(decision.plan.on_cpu) for decision in decisions)
    for decision in decisions:
        assert not decision.plan.retained[decision.step.layer * shape.num_experts + decision.plan.on_cpu].any()


def test_needs_the_run():
    shape, passes = random_passes(np.random.default_rng(2))
    with pytest.raises(PolicyError, match="ideal_min_global needs the passes of the run, and there are none"):
        build_policy("ideal_min_global", {}, context_of(shape, [], passes))
