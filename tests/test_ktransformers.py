from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, context_of, pass_of, run, shape_of
from strategies import random_passes, traces

from experiments import calibration
from policies.contract import Context, PolicyError
from policies.driver import drive
from policies.ktransformers import DYNAMICS, PLACES, Knobs
from policies.placement import first_of_each_layer, highest_of_all, highest_of_each_layer
from policies.registry import build_policy
from tracer.shipped import find_trace
from tracer.store import TraceReader


def placed(resident):
    return {(int(layer), int(expert)) for layer, expert in np.argwhere(resident)}


def start(policy, shape, slots):
    _, resident, capacity = policy.init(policy.params, shape, slots)
    return resident, capacity


# Placement


def test_worked_placements():
    frequency = np.array([[0.1, 0.5, 0.3, 0.8], [0.2, 0.4, 0.9, 0.1]])
    assert placed(highest_of_all(frequency, 3)) == {(0, 1), (0, 3), (1, 2)}
    assert placed(highest_of_each_layer(frequency, np.array([2, 1]))) == {(0, 1), (0, 3), (1, 2)}
    assert placed(highest_of_each_layer(frequency, np.array([1, 2]))) == {(0, 3), (1, 1), (1, 2)}
    assert placed(first_of_each_layer(np.array([3, 2]), 4)) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    shape, passes = random_passes(np.random.default_rng(0), num_layers=2)
    resident, capacity = start(built("ktransformers", {"kt_place": "uniform"}, shape, passes), shape, 5)
    assert placed(resident) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    assert capacity.tolist() == [3, 2]


def test_equal_counts_go_to_the_lower_layer_and_id():
    counts = np.array([[1, 2, 1, 2], [2, 2, 0, 1]])
    assert placed(highest_of_all(counts, 3)) == {(0, 1), (0, 3), (1, 0)}
    assert placed(highest_of_each_layer(counts, np.array([3, 1]))) == {(0, 0), (0, 1), (0, 3), (1, 0)}


@given(traces(), st.data())
@settings(max_examples=20)
def test_the_most_used_in_decode_forwards_of_calibration_start(trace, data):
    shape, passes = trace
    slots = data.draw(st.integers(shape.num_layers, shape.num_layers * shape.num_experts))
    load = np.zeros((shape.num_layers, shape.num_experts), np.int64)
    for pass_ in passes:
        for layer, ids in enumerate(pass_.expert_ids if not pass_.is_prefill else []):
            np.add.at(load[layer], ids.ravel(), 1)
    cells = sorted(np.ndindex(*load.shape), key=lambda cell: (-load[cell], cell))
    resident, capacity = start(built("ktransformers", {"kt_place": "frequency_global"}, shape, passes), shape, slots)
    assert placed(resident) == set(cells[:slots])
    assert capacity.tolist() == resident.sum(axis=1).tolist()
    resident, capacity = start(built("ktransformers", {}, shape, passes), shape, slots)
    assert max(capacity) - min(capacity) <= 1
    assert placed(resident) == {
        cell
        for layer in range(shape.num_layers)
        for cell in [cell for cell in cells if cell[0] == layer][: capacity[layer]]
    }


def test_popularity_is_that_of_the_calibration_split():
    shape = shape_of(1, 4)
    evaluated, split = ([pass_of(np.full((1, 3, 1), expert))] for expert in (3, 1))
    resident, _ = start(built("ktransformers", {}, shape, evaluated, split), shape, 1)
    assert placed(resident) == {(0, 1)}


# Decisions


@given(traces(), st.sampled_from(PLACES), st.sampled_from(DYNAMICS), st.data())
@settings(max_examples=40)
def test_decode_copies_nothing_and_changes_no_resident(trace, place, dynamic, data):
    shape, passes = trace
    slots = data.draw(st.integers(shape.num_layers, shape.num_layers * shape.num_experts))
    policy = built("ktransformers", {"kt_place": place, "kt_dyn": dynamic}, shape, passes)
    first, capacity = start(policy, shape, slots)
    follows = dynamic == "prefill"
    resident = [layer.copy() for layer in first]
    for decision in drive(policy, passes, shape, slots, ESTIMATES):
        step, plan, layer = decision.step, decision.plan, decision.step.layer
        assert (decision.resident == resident[layer]).all()
        assert decision.capacity == capacity[layer]
        missed = set(np.flatnonzero((step.load > 0) & ~decision.resident).tolist())
        prompt = step.expert_ids[step.block < 0].ravel().tolist() if follows else []
        expected = set(np.flatnonzero(resident[layer]).tolist())
        if prompt:
            ranked = sorted(expected | set(prompt), key=lambda expert: (-prompt.count(expert), expert))
            expected = set(ranked[: capacity[layer]])
        assert set(np.flatnonzero(plan.retained).tolist()) == expected
        assert plan.transfers.tolist() == sorted(missed & expected)
        assert plan.on_cpu.tolist() == sorted(missed - expected)
        assert prompt or not plan.transfers.size
        resident[layer] = plan.retained.copy()


@pytest.mark.parametrize("dynamic", DYNAMICS)
def test_laws_hold_on_the_shipped_trace(dynamic):
    reader = TraceReader(find_trace("proxy-tiny"))
    shape = reader.metadata.shape
    context, _ = calibration.context_of(reader, 1)
    policy = build_policy("ktransformers", {"kt_dyn": dynamic}, context)
    num_copied = 0
    for decision in drive(policy, reader.passes(), shape, 16 * shape.num_layers, ESTIMATES):
        num_copied += len(decision.plan.transfers)
        if not decision.pass_.is_prefill:
            assert decision.plan.transfers.size == 0
            assert (decision.plan.retained == decision.resident).all()
        assert decision.plan.retained.sum() == 16
    assert (num_copied > 0) == (dynamic == "prefill")


def test_a_prompt_brings_in_what_it_chose_most():
    # 0 and 1 start; the prompt chooses 3 twice, 2 and 1 once: 3 comes, 1 stays by its lower id, 2 runs on the CPU
    shape = shape_of(1, 5)
    prompt = pass_of(np.array([[[3], [2], [3], [1]]]), blocks=(-1,))
    prompt = replace(prompt, kinds=np.zeros(1, np.int64))
    decode = pass_of(np.array([[[4], [3], [0], [0]]]), 1)
    policy = built("ktransformers", {"kt_place": "uniform", "kt_dyn": "prefill"}, shape, [prompt, decode])
    first, second = drive(policy, [prompt, decode], shape, 2, ESTIMATES)
    assert (first.plan.transfers.tolist(), first.plan.on_cpu.tolist()) == ([3], [2])
    assert np.flatnonzero(first.plan.retained).tolist() == [1, 3]
    assert (second.hits.tolist(), second.plan.transfers.tolist(), second.plan.on_cpu.tolist()) == ([3], [], [0, 4])


def test_a_prompt_beside_decoding_requests_counts_by_itself():
    shape = shape_of(1, 5)
    mixed = pass_of(np.array([[[4], [4], [4], [2], [2], [3]]]), requests=(0, 1), blocks=(0, -1))
    policy = built("ktransformers", {"kt_place": "uniform", "kt_dyn": "prefill"}, shape, [mixed])
    (decision,) = drive(policy, [mixed], shape, 2, ESTIMATES)
    assert np.flatnonzero(decision.plan.retained).tolist() == [2, 3]
    assert decision.plan.on_cpu.tolist() == [4]


@pytest.mark.parametrize("place", PLACES)
def test_with_a_slot_for_every_expert_nothing_is_missed(place):
    shape, passes = random_passes(np.random.default_rng(7), batch=2)
    for decision in run("ktransformers", {"kt_place": place}, shape, passes, shape.num_experts):
        assert len(decision.hits) == np.count_nonzero(decision.step.load)


def test_what_it_is_built_from():
    shape, passes = random_passes(np.random.default_rng(0))
    policy = built("ktransformers", {}, shape, passes)
    assert (policy.misses, policy.prefetches, policy.reads_estimates, policy.clairvoyant) == (
        "cpu",
        False,
        False,
        False,
    )
    build_policy("ktransformers", {"kt_place": "uniform"}, Context(shape))
    for place in ("frequency_layer", "frequency_global"):
        with pytest.raises(PolicyError, match="ktransformers needs calibration, and there is none"):
            build_policy("ktransformers", {"kt_place": place}, Context(shape))
    for knobs in ({"kt_place": "random"}, {"kt_dyn": "decode"}):
        with pytest.raises(PolicyError, match="allowed are"):
            Knobs(**knobs)
    policy = build_policy("ktransformers", {}, context_of(shape, passes))
    for slots in (shape.num_layers - 1, shape.num_layers * shape.num_experts + 1):
        with pytest.raises(PolicyError, match=f"{slots} slots for 3 layers of 16 experts"):
            start(policy, shape, slots)
