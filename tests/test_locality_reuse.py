"""Heat, working sets and reuse distances, by hand, against plain loops, and against the LRU policy itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import ESTIMATES, built, pass_of, passes_of, shape_of

from policies.driver import drive
from tracer.locality import decode_sets
from tracer.locality_reuse import hottest_share, layer_heat, reuse_distances, working_sets
from tracer.schema import ForwardKind

NUM_EXPERTS = 8
batches = st.lists(st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1), min_size=1, max_size=12)


def test_heat_is_the_share_of_forwards():
    heat = layer_heat(decode_sets(passes_of([{0, 1}, {0, 2}, {0, 1, 3}, {0}]), 4))
    assert heat.tolist() == [[1, 0.5, 0.25, 0.25]]
    assert layer_heat([]).size == 0


def test_the_hottest_part_is_rounded_up():
    heat = np.array([[0.1, 0.5, 0.2, 0.2], [0.3, 0.3, 0.3, 0.3]])
    assert hottest_share(heat, 0.25) == pytest.approx([0.5, 0.25])
    assert hottest_share(heat, 0.3) == pytest.approx([0.7, 0.5])


def test_working_sets_of_windows():
    forwards = list(decode_sets(passes_of([{0, 1}, {1, 2}, {2}, {0, 5, 6}]), NUM_EXPERTS))
    assert working_sets(forwards, 1).tolist() == [[2], [2], [1], [3]]
    assert working_sets(forwards, 2).tolist() == [[3], [2], [4]]
    assert working_sets(forwards, 4).tolist() == [[5]]
    assert working_sets(forwards, 5).size == 0


def test_a_working_set_crosses_blocks_and_stays_within_a_request():
    ids = [[0, 1], [2, 3], [4, 5], [4, 6]]
    places = [(0, 0), (0, 1), (1, 0), (1, 0)]
    passes = [
        pass_of(np.array([[i]]), n, requests=(request,), blocks=(block,))
        for n, (i, (request, block)) in enumerate(zip(ids, places, strict=True))
    ]
    assert working_sets(decode_sets(passes, NUM_EXPERTS), 2).tolist() == [[4], [3]]


@given(batches, st.integers(1, 6))
def test_working_sets_are_unions(sets, window):
    found = working_sets(decode_sets(passes_of(sets), NUM_EXPERTS), window)
    wanted = [[len(set.union(*sets[i : i + window]))] for i in range(len(sets) - window + 1)]
    assert found.tolist() == wanted


def test_reuse_distances_by_hand():
    found = reuse_distances(passes_of([{0, 1, 2}, {1, 3}, {0, 1}, {0}]), 4)
    # others between: 1 again, 0 to 2; in the third pass 0, 2 to 3, and 1, 0 to 1; in the last 0, 0 to 1
    assert found.least.tolist() == [[3, 0, 1, 0]]
    assert found.most.tolist() == [[0, 2, 1, 1]]
    assert found.num_first.tolist() == [4]
    low, high = found.lru_hits()
    assert low == pytest.approx([0, 0, 2 / 8, 3 / 8, 4 / 8])
    assert high == pytest.approx([0, 3 / 8, 3 / 8, 4 / 8, 4 / 8])


def test_prefill_is_a_use_but_is_not_counted():
    passes = passes_of([{0, 1}, {1}])
    passes[0] = pass_of(passes[0].expert_ids, 0, kind=ForwardKind.PREFILL, blocks=(-1,))
    found = reuse_distances(passes, 4)
    assert found.least.tolist() == [[1, 0, 0, 0]]
    assert found.most.tolist() == [[0, 1, 0, 0]]
    assert found.num_first.tolist() == [0]


@given(batches)
def test_reuse_distances_are_counts_of_distinct_experts(sets):
    least, most = np.zeros((2, NUM_EXPERTS), int)
    num_first = 0
    for i, used in enumerate(sets):
        for expert in used:
            before = [j for j in range(i) if expert in sets[j]]
            if not before:
                num_first += 1
                continue
            least[len(set().union(*sets[before[-1] + 1 : i]))] += 1
            most[len(set().union(*sets[before[-1] : i]) - {expert})] += 1
    found = reuse_distances(passes_of(sets), NUM_EXPERTS)
    assert found.least.tolist() == [least.tolist()]
    assert found.most.tolist() == [most.tolist()]
    assert found.num_first.tolist() == [num_first]


@given(batches, st.integers(1, NUM_EXPERTS), st.sampled_from(["hits_first", "misses_first", "id"]))
def test_lru_in_any_order_is_between_the_two(sets, slots, order):
    passes, shape = passes_of(sets), shape_of(1, NUM_EXPERTS)
    low, high = reuse_distances(passes, NUM_EXPERTS).lru_hits()
    lru = built("lru", {"lru_order": order}, shape, passes)
    num_hits = sum(len(decision.hits) for decision in drive(lru, passes, shape, slots, ESTIMATES))
    num_uses = sum(map(len, sets))
    assert low[slots] * num_uses - 1e-9 <= num_hits <= high[slots] * num_uses + 1e-9
