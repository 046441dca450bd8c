import json
from collections import Counter

import numpy as np
import pytest
from commands import command
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, hits_per_execution, lfu_residents, pass_of, passes_of, run, shape_of
from strategies import random_passes, traces

from experiments.simulate_command import main
from policies.contract import PolicyError
from policies.driver import drive
from policies.lfu import Knobs


def passes_with_loads(loads):
    """One layer whose forwards send so many tokens to each expert."""
    routes = [np.repeat(list(load), list(load.values())) for load in loads]
    return [pass_of(ids[None, :, None], i, iterations=[i]) for i, ids in enumerate(routes)]


@given(
    st.lists(st.dictionaries(st.integers(0, 6), st.integers(1, 3), min_size=1), min_size=1, max_size=10),
    st.integers(1, 7),
    st.sampled_from(["1", "n_e"]),
)
def test_equals_a_sort_by_activity_count_and_last_touch(loads, capacity, increment):
    decisions = run("lfu", {"lfu_inc": increment}, shape_of(1, 7), passes_with_loads(loads), capacity)
    found = [set(np.flatnonzero(decision.resident).tolist()) for decision in decisions]
    assert found == lfu_residents(loads, capacity, increment == "n_e")


def test_counts_survive_eviction():
    # 0 was used twice, then made room; it comes back ahead of 3, which was used once
    passes = passes_of([{0}, {0}, {1, 2}, {0, 3}, {1}, {0}])
    assert hits_per_execution(run("lfu", {}, shape_of(1, 4), passes, 2)) == [0, 1, 0, 0, 0, 1]


def test_what_is_activated_now_stays_before_what_was_used_more_often():
    passes = passes_of([{0}, {0}, {0}, {1}])
    last = run("lfu", {}, shape_of(1, 2), passes, 1)[-1]
    assert np.flatnonzero(last.plan.retained).tolist() == [1]


def test_counting_by_load_can_change_who_stays():
    passes = passes_with_loads([{0: 1, 1: 3}, {0: 1}, {2: 1}])
    held = [
        np.flatnonzero(run("lfu", {"lfu_inc": inc}, shape_of(1, 3), passes, 2)[-1].plan.retained)
        for inc in ("1", "n_e")
    ]
    assert [ids.tolist() for ids in held] == [[0, 2], [1, 2]]


def test_counts_age_whenever_their_layer_runs():
    # 0 was used three times long ago, 1 twice of late: 0.5 ** 3 + 0.5 ** 2 + 0.5 < 1 + 0.5, two forwards on
    passes = passes_of([{0}, {0}, {0}, {1}, {1}, {2}])
    held = [
        np.flatnonzero(run("lfu", {"lfu_decay": decay}, shape_of(1, 3), passes, 2)[-1].plan.retained).tolist()
        for decay in (1.0, 0.5)
    ]
    assert held == [[0, 2], [1, 2]]


@pytest.mark.parametrize("decay", [0.0, 1.5, float("nan")])
def test_impossible_decay_is_refused(decay):
    with pytest.raises(PolicyError, match=r"lfu_decay is .*: must be above 0 and at most 1"):
        Knobs(lfu_decay=decay)


@given(traces(), st.data())
@settings(max_examples=25)
def test_a_global_pool_ranks_all_layers_alike(trace, data):
    shape, passes = trace
    slots = data.draw(st.integers(1, shape.num_experts)) * shape.num_layers
    count, touched, resident, time = Counter(), {}, set(), 0
    for decision in drive(built("lfu", {"pool": "global"}, shape, passes), passes, shape, slots, ESTIMATES):
        layer = decision.step.layer
        batch = {(layer, expert) for expert in np.flatnonzero(decision.step.load).tolist()}
        assert set(decision.hits.tolist()) == {expert for _, expert in batch & resident}
        for key in [*sorted(batch & resident), *sorted(batch - resident)]:
            time += 1
            touched[key] = time
            count[key] += 1
        ranked = sorted(resident | batch, key=lambda key: (key in batch, count[key], touched[key]), reverse=True)
        resident = set(ranked[:slots])
        numbers = {layer * shape.num_experts + expert for layer, expert in resident}
        assert numbers == set(np.flatnonzero(decision.plan.retained).tolist())


def test_previous_set_keeps_exactly_what_was_activated():
    shape, passes = random_passes(np.random.default_rng(3))
    for decision in run("prev_set", {}, shape, passes, shape.num_experts):
        assert (decision.plan.retained == (decision.step.load > 0)).all()
        assert (
            decision.plan.transfers.tolist() == np.flatnonzero((decision.step.load > 0) & ~decision.resident).tolist()
        )


def test_of_more_than_fits_previous_set_keeps_the_last_touched():
    passes = passes_of([{1, 2, 3}, {1, 2, 4}, {1, 3}, {2}])
    decisions = run("prev_set", {}, shape_of(1, 5), passes, 2)
    assert [np.flatnonzero(d.plan.retained).tolist() for d in decisions] == [[2, 3], [1, 4], [1, 3], [2]]


def test_an_increment_of_one_may_be_a_number():
    assert Knobs(lfu_inc=1) == Knobs(lfu_inc="1") == Knobs()


@pytest.mark.parametrize(("increment", "variant"), [("1", ""), ("n_e", "lfu_inc=n_e")])
def test_increments_have_these_names_on_the_command_line(increment, variant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("trace=proxy-tiny", "cache.slots_per_layer=24", "output.dir=out")
    finished = command(main, "policy=lfu", f"policy.lfu_inc={increment}", *options)
    assert finished.code == 0, finished.err
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["variant"] == variant


@pytest.mark.parametrize("knobs", [{"lfu_inc": "load"}, {"lfu_inc": True}, {"misses": "cpu"}, {"lru_order": ""}])
def test_refuses_other_values(knobs):
    with pytest.raises(PolicyError, match="allowed are"):
        Knobs(**knobs)
