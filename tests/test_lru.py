import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    answers,
    hits_of,
    hits_per_execution,
    lru_residents,
    pass_of,
    passes_of,
    run,
    sequential_lru_hits,
    sets_of,
    shape_of,
)
from strategies import random_passes, traces

from policies.contract import PolicyError
from policies.lru import ORDERS, Knobs, touch
from policies.retention import best, equal_capacity
from policies.steps import Steps, step_at

batches = st.lists(st.sets(st.integers(0, 6), min_size=1), min_size=1, max_size=10)


def residents_per_execution(decisions):
    return [set(np.flatnonzero(decision.resident).tolist()) for decision in decisions]


def touched_in_order(order):
    """Experts 0 to 4 are activated with sums of gates .1, .3, .6, .8, .2; 1 and 3 are resident."""
    ids = np.array([[[0, 2], [1, 3], [3, 4]]])
    gates = np.array([[[0.1, 0.6], [0.3, 0.5], [0.3, 0.2]]])
    step = step_at(Steps(shape_of(1, 6, 2)).read(pass_of(ids, gates=gates)), 0)
    resident = np.isin(np.arange(6), [1, 3])
    resident.flags.writeable = False
    touches, clock = np.zeros((1, 6), np.int64), np.zeros(1, np.int64)
    touch(ORDERS.index(order), touches, clock, step, resident)
    assert clock[0] == 5
    assert touches[0, 5] == 0
    return np.argsort(touches[0, :5]).tolist()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("hits_first", [1, 3, 0, 2, 4]),
        ("misses_first", [0, 2, 4, 1, 3]),
        ("id", [0, 1, 2, 3, 4]),
        ("gate", [0, 4, 1, 2, 3]),
    ],
)
def test_each_order_touches_as_it_says(order, expected):
    assert touched_in_order(order) == expected


@pytest.mark.parametrize(
    ("name", "knobs", "limit", "retained"),
    [
        ("lru", {}, 1, [[3], [3, 4], [4, 5]]),
        ("lru", {"lru_order": "misses_first"}, 1, [[3], [3, 4], [4, 5]]),
        ("lru", {}, 0, [[], [], []]),
        ("lru", {}, None, [[2, 3], [3, 4], [1, 5]]),
        ("prev_set", {}, 1, [[3], [3, 4], [4, 5]]),
        ("lfu", {}, 1, [[3], [3, 4], [1, 4]]),
        ("lfu", {}, 2, [[2, 3], [3, 4], [1, 4]]),
    ],
)
def test_only_so_many_transfers_enter(name, knobs, limit, retained):
    passes = passes_of([{1, 2, 3}, {3, 4}, {1, 4, 5}])
    decisions = run(name, {**knobs, "max_admit": limit}, shape_of(1, 6), passes, 2)
    assert [np.flatnonzero(decision.plan.retained).tolist() for decision in decisions] == retained


@pytest.mark.parametrize("name", ["lru", "lfu", "prev_set", "oled"])
def test_impossible_limits_are_refused(name):
    with pytest.raises(PolicyError, match="max_admit is -1: must be at least 0, or null for no limit"):
        run(name, {"max_admit": -1}, shape_of(1, 6), passes_of([{1}]), 2)


def test_a_batch_is_served_before_it_is_replaced():
    repeated = passes_of([range(60)] * 4)
    assert hits_per_execution(run("lru", {}, shape_of(1, 64), repeated, 40)) == [0, 40, 40, 40]


def test_one_expert_at_a_time_would_be_another_baseline():
    assert sequential_lru_hits([set(range(60))] * 4, 40) == [0, 0, 0, 0]


def test_worked_example_beside_the_bounds():
    passes = passes_of([{1, 2, 3}, {1, 2, 4}, {1, 3}, {2, 3}])
    assert hits_per_execution(run("lru", {}, shape_of(1, 5), passes, 2)) == [0, 1, 1, 1]


@given(batches, st.integers(1, 7), st.sampled_from(["hits_first", "misses_first", "id"]))
def test_equals_a_list_in_order_of_touch(sets, capacity, order):
    decisions = run("lru", {"lru_order": order}, shape_of(1, 7), passes_of(sets), capacity)
    assert residents_per_execution(decisions) == lru_residents(sets, capacity, order)


@given(traces(max_layers=2), st.data())
def test_every_layer_is_a_cache_of_its_own(trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    decisions = run("lru", {}, shape, passes, capacity)
    for layer in range(shape.num_layers):
        sets = sets_of(passes, layer)
        found = hits_per_execution(decision for decision in decisions if decision.step.layer == layer)
        assert found == hits_of(sets, lru_residents(sets, capacity))


@given(traces(), st.sampled_from(["hits_first", "misses_first"]), st.data())
@settings(max_examples=25)
def test_a_global_pool_is_one_list_of_all_layers(trace, order, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    stack = []
    for decision in run("lru", {"pool": "global", "lru_order": order}, shape, passes, capacity):
        start = decision.step.layer * shape.num_experts
        batch = [start + expert for expert in np.flatnonzero(decision.step.load).tolist()]
        hits, misses = ([n for n in batch if (n in stack) == hit] for hit in (True, False))
        assert (decision.hits + start).tolist() == hits
        assert (decision.plan.transfers + start).tolist() == misses
        touched = hits + misses if order == "hits_first" else misses + hits
        stack = [*(n for n in stack if n not in batch), *touched][-capacity * shape.num_layers :]
        assert np.flatnonzero(decision.plan.retained).tolist() == sorted(stack)


def test_a_global_pool_shares_slots_as_layers_use_them():
    # with 2 slots a layer, layer 0 uses 3 experts and layer 1 only one
    passes = [pass_of(np.array([[[0], [1], [2]], [[3], [3], [3]]]), i, iterations=[i]) for i in range(3)]
    hits = [hits_per_execution(run("lru", {"pool": pool}, shape_of(2, 5), passes, 2)) for pool in ("layer", "global")]
    assert hits == [[0, 0, 2, 1, 2, 1], [0, 0, 3, 1, 3, 1]]


@given(batches, st.integers(1, 6))
def test_in_id_order_a_larger_cache_holds_all_that_a_smaller_one_does(sets, capacity):
    smaller, larger = (
        residents_per_execution(run("lru", {"lru_order": "id"}, shape_of(1, 7), passes_of([*sets, {0}]), size))
        for size in (capacity, capacity + 1)
    )
    assert all(few <= many for few, many in zip(smaller, larger, strict=True))


def test_with_hits_first_a_larger_cache_may_lack_what_a_smaller_one_holds():
    passes = passes_of([{1, 2}, {0, 1, 2}, {0}])
    held = [residents_per_execution(run("lru", {}, shape_of(1, 3), passes, size))[-1] for size in (1, 2)]
    assert held == [{1}, {0, 2}]


def test_by_gates_the_lightest_leave_first():
    ids = np.array([[[0, 1], [2, 1]]])
    gates = np.array([[[0.3, 0.7], [0.6, 0.4]]])  # sums .3, 1.1, .6
    decisions = run("lru", {"lru_order": "gate"}, shape_of(1, 4, 2), [pass_of(ids, gates=gates)], 2)
    assert np.flatnonzero(decisions[0].plan.retained).tolist() == [1, 2]


def test_split_misses_admit_transfers_only_but_touch_all():
    shape, passes = random_passes(np.random.default_rng(5), num_layers=2)
    decisions = run("lru", {"misses": "oled"}, shape, passes, 6)
    assert any(len(decision.plan.on_cpu) for decision in decisions)
    last_touch = np.zeros((shape.num_layers, shape.num_experts), int)
    for decision in decisions:
        step, plan = decision.step, decision.plan
        held = decision.resident.copy()
        held[plan.transfers] = True
        assert not (plan.retained & ~held).any()
        last_touch[step.layer, step.load > 0] = step.forward + 1
        if plan.retained.sum() == 6:
            stays, leaves = last_touch[step.layer, plan.retained], last_touch[step.layer, held & ~plan.retained]
            assert stays.min() >= leaves.max(initial=0)


@given(traces(), st.data())
def test_oled_with_no_part_on_is_lru(trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    order = data.draw(st.sampled_from(ORDERS))
    off = {"priority": False, "layer_adapt": False, "coop": False, "lru_order": order}
    oled = run("oled", off, shape, passes, capacity)
    assert answers(oled) == answers(run("lru", {"lru_order": order}, shape, passes, capacity))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"lru_order": "age"}, "lru_order 'age': allowed are hits_first, misses_first, id, gate"),
        ({"pool": "shared"}, "pool 'shared': allowed are layer, global"),
        ({"misses": "gpu"}, "misses 'gpu': allowed are h2d, oled"),
        ({"misses": "cpu"}, "misses=cpu .* needs residents at the start, and there are none: allowed are h2d, oled"),
    ],
)
def test_refuses_other_values(knobs, message):
    with pytest.raises(PolicyError, match=message):
        Knobs(**knobs)


@pytest.mark.parametrize("slots", [0, 1, 13])
def test_refuses_a_layer_without_slots_or_with_more_than_experts(slots):
    with pytest.raises(PolicyError, match=f"{slots} slots for 2 layers of 6 experts: allowed are 1 to 6 a layer"):
        equal_capacity(shape_of(2, 6), slots)


def test_a_remainder_of_slots_goes_to_the_lower_layers():
    assert equal_capacity(shape_of(3, 6), 11).tolist() == [4, 4, 3]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2)), max_size=40),
    st.integers(0, 41),
)
def test_best_is_a_sort_by_both_keys_then_index(rows, count):
    table = np.array(rows, np.int64).reshape(-1, 3)
    candidates, first, second = table[:, 0] == 1, table[:, 1].copy(), table[:, 2].copy()
    ranked = sorted(np.flatnonzero(candidates), key=lambda i: (-first[i], -second[i], i))
    assert np.flatnonzero(best(candidates, count, first, second)).tolist() == sorted(ranked[:count])
