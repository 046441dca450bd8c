import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import (
    ESTIMATES,
    built,
    hits_of,
    hits_per_execution,
    min_bypass,
    most_hits,
    passes_of,
    run,
    sets_of,
    shape_of,
)
from strategies import random_passes, traces

from policies.contract import Context, PolicyError
from policies.driver import drive
from policies.ideal_min import NEVER, read_future
from policies.registry import build_policy

H2D = {"misses": "h2d"}
EXAMPLE = [{1, 2, 3}, {1, 2, 4}, {1, 3}, {2, 3}]
STARTS_EMPTY = [
    ("ondemand", {}),
    ("prev_set", {}),
    *(("lru", {"lru_order": order}) for order in ("hits_first", "misses_first", "id", "gate")),
    *(("lfu", {"lfu_inc": increment}) for increment in ("1", "n_e")),
    *(("oled", {"layer_adapt": False, "coop": False, "priority_signal": s}) for s in ("load", "gate", "confidence")),
]


def total_hits(name, knobs, shape, passes, capacity):
    return sum(hits_per_execution(run(name, knobs, shape, passes, capacity)))


def test_worked_example():
    passes = passes_of(EXAMPLE)
    assert hits_per_execution(run("ideal_min", H2D, shape_of(1, 5), passes, 2)) == [0, 2, 1, 2]
    assert hits_per_execution(run("ideal_free", H2D, shape_of(1, 5), passes, 2)) == [2, 2, 2, 2]
    assert most_hits(EXAMPLE, 2) == 5


def test_no_choice_of_what_stays_has_more_hits():
    rng = np.random.default_rng(14)
    for _ in range(400):
        num_experts, capacity, length = int(rng.integers(2, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 6))
        capacity = min(capacity, num_experts)
        active = rng.random((length, num_experts)) < rng.uniform(0.2, 0.8)
        active[np.arange(length), rng.integers(0, num_experts, length)] = True
        batches = [set(np.flatnonzero(row).tolist()) for row in active]
        hits = hits_per_execution(run("ideal_min", H2D, shape_of(1, num_experts), passes_of(batches), capacity))
        assert hits == hits_of(batches, min_bypass(batches, capacity))
        assert sum(hits) == most_hits(batches, capacity)


@given(traces(max_layers=2), st.data())
def test_order_of_hits_from_a_cold_start(trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    name, knobs = data.draw(st.sampled_from(STARTS_EMPTY))
    free, ideal, reached = (
        total_hits(*policy, shape, passes, capacity)
        for policy in (("ideal_free", H2D), ("ideal_min", H2D), (name, knobs))
    )
    assert reached <= ideal <= free
    assert free == sum(
        min(len(batch), capacity) for layer in range(shape.num_layers) for batch in sets_of(passes, layer)
    )


@given(traces(max_layers=1))
def test_more_slots_never_mean_fewer_hits(trace):
    shape, passes = trace
    hits = [total_hits("ideal_min", H2D, shape, passes, capacity) for capacity in range(1, shape.num_experts + 1)]
    assert hits == sorted(hits)


@pytest.mark.parametrize("name", ["ideal_min", "lru", "lfu"])
def test_with_a_slot_for_every_expert_only_first_touches_miss(name):
    shape, passes = random_passes(np.random.default_rng(8))
    missed = sum(len(d.plan.transfers) for d in run(name, H2D, shape, passes, shape.num_experts))
    assert missed == sum(len(set().union(*sets_of(passes, layer))) for layer in range(shape.num_layers))


def test_next_use_is_that_of_the_same_layer():
    future = read_future(passes_of(EXAMPLE), shape_of(1, 5))
    assert future.offsets.tolist() == [0, 3, 6, 8, 10]
    assert future.next_use.dtype == np.int32
    assert future.next_use.tolist() == [1, 1, 2, 2, 3, NEVER, NEVER, 3, NEVER, NEVER]


@given(traces())
def test_next_use_equals_a_search_forwards(trace):
    shape, passes = trace
    future = read_future(passes, shape)
    expected = []
    for index, pass_ in enumerate(passes):
        for layer in range(shape.num_layers):
            later = sets_of(passes[index + 1 :], layer)
            expected += [
                next((index + 1 + i for i, batch in enumerate(later) if expert in batch), NEVER)
                for expert in np.unique(pass_.expert_ids[layer]).tolist()
            ]
    assert future.next_use.tolist() == expected


def test_split_misses_are_kept_only_where_they_were_copied():
    shape, passes = random_passes(np.random.default_rng(2))
    decisions = run("ideal_min", {}, shape, passes, 5)
    assert any(len(decision.plan.on_cpu) for decision in decisions)
    for decision in decisions:
        assert not decision.plan.retained[decision.plan.on_cpu].any()


def test_free_placement_takes_the_busiest_then_the_lowest_id():
    shape, passes = random_passes(np.random.default_rng(4))
    for decision in run("ideal_free", {}, shape, passes, 3):
        load = decision.step.load
        busiest = sorted(np.flatnonzero(load), key=lambda e: (-load[e], e))[:3]
        assert np.flatnonzero(decision.resident).tolist() == sorted(busiest)
        assert (decision.plan.retained == decision.resident).all()


def test_caps_of_utilization():
    caps = []
    for num_activated in (60, 90):
        for capacity in (40, 100):
            passes = passes_of([range(num_activated)])
            (hits,) = hits_per_execution(run("ideal_free", H2D, shape_of(1, 256), passes, capacity))
            caps.append(hits / capacity)
    assert caps == [1, 0.6, 1, 0.9]
    assert np.mean(caps) == 0.875


def test_foresight_is_refused_for_another_run():
    shape, passes = shape_of(1, 5), passes_of(EXAMPLE)
    policy = built("ideal_min", H2D, shape, passes)
    for other in (passes_of([{1}]), passes_of([{1, 2, 3, 4}]), passes_of([*EXAMPLE, {1}])):
        with pytest.raises(PolicyError, match="than it was built from"):
            list(drive(policy, other, shape, 2, ESTIMATES))
    with pytest.raises(PolicyError, match="needs the passes of the run"):
        build_policy("ideal_min", H2D, Context(shape))


@pytest.mark.parametrize("name", ["ideal_min", "ideal_free"])
def test_split_misses_need_a_calibration_split(name):
    passes = passes_of(EXAMPLE)
    with pytest.raises(PolicyError, match=f"^{name} needs calibration"):
        build_policy(name, {}, Context(shape_of(1, 5), passes=passes))
    with pytest.raises(PolicyError, match=r"misses=cpu .*: allowed are h2d, oled"):
        build_policy(name, {"misses": "cpu"}, Context(shape_of(1, 5), passes=passes))
