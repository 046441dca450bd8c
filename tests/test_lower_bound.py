"""The bound on time: its misses are the fewest, and no policy is sooner on any machine."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import built, run
from scripted import make_costs, make_pass, make_shape
from strategies import random_passes, traces
from test_policy_laws import VARIANTS, label

from experiments import metrics
from experiments.lower_bound import LowerBound, miss_ns
from experiments.results import ForwardTable
from experiments.run import simulate as simulate_run
from policies.profile import estimates_of
from simulator.des import simulate
from simulator.fewest_misses import FewestMisses


def chunks_of(name, knobs, shape, passes, capacity, costs, staging=8):
    policy = built(name, knobs, shape, passes)
    slots = capacity * shape.num_layers
    chunks = simulate(passes, policy, shape, slots, costs, estimates_of(costs), staging_slots=staging, chunk_forwards=3)
    return policy, list(chunks)


def bounded(name, knobs, shape, passes, capacity, costs, warmup, staging=8):
    """Time per token of a run, and the bound of it."""
    policy, chunks = chunks_of(name, knobs, shape, passes, capacity, costs, staging)
    sizes = shape.num_layers, shape.num_experts, warmup
    table = ForwardTable(*sizes, costs.policy_ns, policy.pool == "global")
    bound = LowerBound(policy, *sizes, costs, staging)
    for chunk in chunks:
        table.add(chunk)
        bound.add(chunk)
    sums = metrics.sums(table.frame())
    return metrics.tpot_ms(sums), bound.tpot_ms(sums["num_accepted"])


def fewest(chunks, shape, slots, counted):
    """Misses that remain, where these forwards are counted."""
    packed, first = FewestMisses(shape.num_layers, shape.num_experts, slots), 0
    for chunk in chunks:
        end = first + len(chunk.forwards)
        packed.add(chunk.layers, np.repeat(counted[first:end], shape.num_layers))
        first = end
    return packed.num_misses


@settings(max_examples=40)
@given(traces(max_experts=10), st.data())
def test_with_all_forwards_counted_the_fewest_misses_are_those_of_the_clairvoyant_pool(trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(shape.top_k, shape.num_experts))
    _, chunks = chunks_of("ondemand", {}, shape, passes, capacity, make_costs())
    missed = sum(
        len(decision.plan.transfers) for decision in run("ideal_min_global", {"misses": "h2d"}, shape, passes, capacity)
    )
    assert fewest(chunks, shape, capacity * shape.num_layers, np.ones(len(passes), bool)) == missed


def least_by_trying(sets, counted, slots):
    """Fewest counted misses over every way to use the slots; what is held when counting begins is free."""
    keys = sorted(set().union(*sets))

    def choices(held):
        return {frozenset(some) for size in range(slots + 1) for some in combinations(sorted(held), size)}

    cost = {frozenset(): 0}
    for index, (activated, counts) in enumerate(zip(sets, counted, strict=True)):
        if counts and index and not counted[index - 1]:
            cost = dict.fromkeys(choices(keys), min(cost.values()))
        after = {}
        for held, missed in cost.items():
            total = missed + counts * len(activated - held)
            for kept in choices(held | activated):
                after[kept] = min(after.get(kept, total), total)
        cost = after
    return min(cost.values())


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=7),
    st.integers(1, 3),
)
def test_no_way_to_use_the_slots_has_fewer_counted_misses(forwards, slots):
    shape = make_shape(1, 5)
    sets, counted = [set(activated) for activated, _ in forwards], [counts for _, counts in forwards]
    passes = [make_pass(index, [sorted(activated)]) for index, activated in enumerate(sets)]
    _, chunks = chunks_of("ondemand", {}, shape, passes, 1, make_costs())
    assert fewest(chunks, shape, slots, np.array(counted)) == least_by_trying(sets, counted, slots)


def test_numbers_worked_out_by_hand():
    shape = make_shape(1, 8)
    passes = [make_pass(i, [activated]) for i, activated in enumerate([[0, 1], [2, 3], [0, 1], [2, 3]])]
    costs = make_costs(cpu_b0_ns=50.0, cpu_b1_ns=100.0, g_b_ns=1.0, policy_ns=7, tail_ns=11)
    assert miss_ns(costs) == pytest.approx(37.5)  # a copy of 50 beside the CPU's 150
    # a slot and one of staging hold 0 and 1, so 6 of 8 miss: 6 * 37.5 = 225 ns
    # with all experts resident 100 + 7 + 20 + 2 a layer, and 11 a forward: 4 * 140 = 560 ns
    policy, chunks = chunks_of("lru", {}, shape, passes, 1, costs._replace(transfer_chunk=1), staging=1)
    bound = LowerBound(policy, 1, 8, 0, costs, 1)
    for chunk in chunks:
        bound.add(chunk)
    assert bound.num_misses == 6
    assert bound.tpot_ms(2) == pytest.approx(560 / 2 / 1e6)
    slow = LowerBound(policy, 1, 8, 0, costs._replace(h2d_latency_ns=300.0, cpu_b0_ns=200.0), 1)
    for chunk in chunks:
        slow.add(chunk)
    assert slow.tpot_ms(2) == pytest.approx(6 * 150 / 2 / 1e6)
    assert slow.tpot_ms(0) is None


def test_what_runs_on_the_cpu_can_be_sooner_than_on_the_gpu():
    # ten experts, 10 ns each on the GPU; on the CPU 30 ns and 10 for each: 6.5 beside 3.5 would take 65 ns, not 100
    shape = make_shape(1, 10)
    passes = [make_pass(i, [list(range(10))]) for i in range(2)]
    costs = make_costs(g_a_ns=0.0, g_b_ns=10.0, h2d_latency_ns=1.0, cpu_a_ns=30.0, cpu_b0_ns=10.0)
    for copied, expected in ((True, 200.0), (False, 165.0)):
        policy, chunks = chunks_of("lru", {} if copied else {"misses": "oled"}, shape, passes, 5, costs)
        bound = LowerBound(policy, 1, 10, 0, costs, 8)
        for chunk in chunks:
            bound.add(chunk)
        assert bound.tpot_ms(1) == pytest.approx(2 * expected / 1e6)


@pytest.mark.parametrize(("name", "knobs"), VARIANTS, ids=[label(*variant) for variant in VARIANTS])
@settings(max_examples=6)
@given(traces(max_experts=10, max_requests=3, max_block=4, signals=True), st.data())
def test_no_policy_is_sooner(name, knobs, trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(shape.top_k, shape.num_experts), label="slots per layer")
    warmup = data.draw(st.integers(0, 1), label="warm-up requests")

    def cost(most, least=0):
        return float(data.draw(st.integers(least, most)))

    # whole numbers, so that nothing is rounded
    costs = make_costs(
        n_a_ns=cost(50),
        n_b_ns=cost(2),
        g_a_ns=cost(20),
        g_b_ns=cost(20),
        g_c_ns=cost(4),
        h2d_latency_ns=cost(200),
        cpu_a_ns=cost(30),
        cpu_b0_ns=cost(100),
        cpu_b1_ns=cost(20),
        cpu_roundtrip_ns=int(cost(20)),
        tail_ns=int(cost(20)),
        gate_sync_ns=int(cost(5)),
        policy_ns=int(cost(5)),
        h2d_slowdown=cost(2, 1),
        cpu_slowdown=cost(2, 1),
        transfer_chunk=int(cost(4, 1)),
    )
    tpot, least = bounded(name, knobs, shape, passes, capacity, costs, warmup, int(cost(8, 4)))
    if least is not None:
        assert tpot >= least * (1 - 1e-12)


@pytest.mark.parametrize("name", ["full", "ideal_free", "ktransformers", "fiddler", "swapmoe"])
def test_residents_at_time_0_have_no_bound(name):
    shape, passes = random_passes(np.random.default_rng(0))
    tpot, least = bounded(name, {}, shape, passes, 4, make_costs(), 1)
    assert tpot is not None
    assert least is None


def test_the_summary_says_how_far_a_run_is_above_it():
    found = {
        name: simulate_run("proxy-tiny", name, 24, shape="llada2.0-mini").summary for name in ("lru", "gate_ahead")
    }
    for summary in found.values():
        gap = summary["tpot_ms"] / summary["lower_bound_tpot_ms"] - 1
        assert summary["gap_to_lower_bound_ratio"] == gap > 0
    assert found["lru"]["lower_bound_tpot_ms"] == found["gate_ahead"]["lower_bound_tpot_ms"]
    fast = simulate_run("proxy-tiny", "lru", 64, shape="llada2.0-mini").summary["lower_bound_tpot_ms"]
    full = simulate_run("proxy-tiny", "full", shape="llada2.0-mini").summary["tpot_ms"]
    assert fast == pytest.approx(full, rel=1e-9)


def test_a_prefill_before_decoding_may_bring_any_experts():
    shape = make_shape(1, 8)
    passes = [make_pass(i, [activated]) for i, activated in enumerate([[7], [0, 1], [2, 3], [0, 1]])]
    _, chunks = chunks_of("ondemand", {}, shape, passes, 1, make_costs())
    assert fewest(chunks, shape, 2, np.array([False, True, True, True])) == 2
    assert fewest(chunks, shape, 4, np.array([False, True, True, True])) == 0
    assert fewest(chunks, shape, 4, np.ones(4, bool)) == 5
