from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from reference import ESTIMATES, built, context_of, passes_of, run, shape_of
from scripted import make_costs
from strategies import random_passes

from policies.contract import Context, End, Plan, PlanError, Policy, PolicyError
from policies.driver import drive
from policies.registry import POLICIES, build_policy
from policies.residents import Residents
from simulator.des import simulate

SHAPE = shape_of(2, 6)


class State(NamedTuple):
    seen: list


def plan(transfers=(), on_cpu=(), retained=(), size=6, **rest):
    kept = np.isin(np.arange(size), list(retained))
    fields = {
        "prefetches": np.empty((0, 2), np.int64),
        "prefetch_priority": np.empty((0, 2)),
        "clear_prefetches": False,
        "prefetch_delay_ns": 0,
    }
    return Plan(np.array(transfers, np.int64), np.array(on_cpu, np.int64), kept, **{**fields, **rest})


def toy(resident=(), capacity=(3, 3), pool="layer", **functions):
    """A policy in plain Python that starts with these residents, (layer, expert) pairs."""

    def init(params, shape, slots):
        held = np.zeros((2, 6), bool)
        for layer, expert in resident:
            held[layer, expert] = True
        return State([]), held, np.array(capacity, np.int64)

    def decide(params, state, step, view):
        missed = np.flatnonzero((step.load > 0) & ~view.resident[step.layer])
        return plan(missed, retained=(), size=12 if pool == "global" else 6)

    return Policy("toy", (), init, functions.pop("decide", decide), pool=pool, **functions)


def run_all(engine, policy, shape, passes):
    slots = 6 * shape.num_layers
    if engine == "driver":
        return list(drive(policy, passes, shape, slots, ESTIMATES))
    return list(simulate(passes, policy, shape, slots, make_costs(), ESTIMATES))


def residents_of(policy, slots=6):
    return Residents(policy, SHAPE, slots, ESTIMATES)


def ids(mask):
    return [tuple(pair) for pair in np.argwhere(mask).tolist()]


# Residents


def test_settle_lets_go_of_what_is_not_retained_and_admits_retained_transfers():
    residents = residents_of(toy([(0, 1), (0, 2), (1, 1)]))
    residents.settle(0, residents.resident[0].copy(), plan([4, 5], [3], retained=[2, 5]))
    assert ids(residents.resident) == [(0, 2), (0, 5), (1, 1)]


def test_settle_leaves_alone_what_happened_since_the_gate():
    residents = residents_of(toy([(0, 1), (0, 2)]))
    at_gate = residents.resident[0].copy()
    residents.resident[0, 1] = False  # made room for a prefetch
    residents.resident[0, 3] = True  # which has landed
    residents.settle(0, at_gate, plan([4], retained=[1, 4]))
    assert ids(residents.resident) == [(0, 3), (0, 4)]


def test_settle_covers_the_whole_pool_where_it_is_global():
    residents = residents_of(toy([(0, 1), (0, 2), (1, 1)], [6], "global"))
    at_gate = residents.of_pool(1, residents.resident).copy()
    residents.settle(1, at_gate, plan([2, 3], retained=[1, 7, 8], size=12))
    assert ids(residents.resident) == [(0, 1), (1, 1), (1, 2)]


def test_the_view_counts_free_slots_of_the_pool():
    apart = residents_of(toy([(0, 1), (0, 2), (1, 1)]))
    shared = residents_of(toy([(0, 1), (0, 2), (1, 1)], [6], "global"))
    for residents, expected in ((apart, [0, 2]), (shared, [2, 2])):
        residents.in_flight[0, 5] = True
        assert [residents.view(layer).free_slots for layer in (0, 1)] == expected
        assert [residents.capacity_of(layer) for layer in (0, 1)] == ([3, 3] if residents is apart else [6, 6])


def test_the_view_cannot_be_written_to():
    view = residents_of(toy()).view(0)
    for array in (view.resident, view.in_flight, view.capacity):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_arrays_of_init_stay_the_policy_s_own():
    policy = toy()
    held, capacity = np.zeros((2, 6), bool), np.array([3, 3])
    residents = residents_of(replace(policy, init=lambda *_: (State([]), held, capacity)))
    held[0, 0] = True
    capacity[0] = 9
    assert not residents.resident.any()
    assert residents.capacity.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (toy([(1, 0), (1, 1), (1, 2), (1, 3)]), "toy: starts with 4 residents in layer 1, its capacity is 3"),
        (toy(capacity=(3, 2)), r"toy: starts with capacity \[3, 2\], must be at least 0 each and 6 in all"),
        (toy(capacity=(7, -1)), r"toy: starts with capacity \[7, -1\]"),
        (toy(capacity=(6,)), r"toy: capacity is int64 of shape \(1,\), must be int64 of \(2\), at the start"),
        (toy(capacity=(3, 3), pool="global"), r"must be int64 of \(1\)"),
        (toy(pool="both"), "toy: pool 'both': allowed are layer, global"),
        (replace(toy(), init=lambda *_: (State([]), np.zeros(6, bool), np.array([3, 3]))), "toy: residents is bool"),
    ],
)
def test_refuses_a_start_that_does_not_fit(policy, message):
    with pytest.raises(PolicyError, match=message):
        residents_of(policy)


# Driving


def test_decisions_show_the_gate_and_the_plan():
    decisions = run("lru", {}, shape_of(1, 4), passes_of([{1, 2}, {2, 3}]), 2)
    first, second = decisions
    assert (first.step.forward, second.step.forward, second.step.layer) == (0, 1, 0)
    assert [d.pass_.pass_id for d in decisions] == [0, 1]
    assert (first.hits.tolist(), second.hits.tolist()) == ([], [2])
    assert np.flatnonzero(second.resident).tolist() == [1, 2]
    assert second.capacity == 2
    assert second.plan.transfers.tolist() == [3]


def test_utilization_and_hit_ratio_of_the_worked_example():
    policy = toy([(0, 1), (0, 2), (0, 3), (0, 4)], (4, 4))
    policy = replace(policy, init=lambda *_: (State([]), np.isin(np.arange(9), [1, 2, 3, 4])[None], np.array([4])))
    policy = replace(policy, decide=lambda p, s, step, view: plan([5, 6, 7, 8], size=9))
    (decision,) = drive(policy, passes_of([{2, 4, 5, 6, 7, 8}]), shape_of(1, 9), 4, ESTIMATES)
    assert len(decision.hits) / decision.capacity == 0.5
    assert len(decision.hits) / np.count_nonzero(decision.step.load) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("num_activated", "utilization"), [(60, 0.234), (90, 0.352)])
def test_utilization_of_residents_that_are_blind_to_routing(num_activated, utilization):
    # any residents, and activated sets that hold every expert equally often: the expectation itself
    held = np.random.default_rng(1).permuted(np.arange(256) < 40)

    def decide(params, state, step, view):
        return plan(np.flatnonzero((step.load > 0) & ~held), retained=np.flatnonzero(held), size=256)

    blind = toy(decide=decide)
    blind = replace(blind, init=lambda *_: (State([]), held[None], np.array([40])))
    passes = passes_of([(np.arange(num_activated) + first) % 256 for first in range(256)])
    decisions = drive(blind, passes, shape_of(1, 256), 40, ESTIMATES)
    assert round(np.mean([len(d.hits) / d.capacity for d in decisions]), 3) == utilization


def test_full_never_misses_and_ondemand_never_hits():
    shape, passes = random_passes(np.random.default_rng(1))
    for decision in drive(built("full", {}, shape, passes), passes, shape, 1, ESTIMATES):
        assert decision.capacity == shape.num_experts
        assert len(decision.plan.transfers) == len(decision.plan.on_cpu) == 0
    for decision in drive(built("ondemand", {}, shape, passes), passes, shape, 1, ESTIMATES):
        assert decision.capacity == 0
        assert len(decision.hits) == 0
        assert decision.plan.transfers.tolist() == np.flatnonzero(decision.step.load).tolist()


def test_boundary_comes_after_each_forward_and_moves_slots():
    ends: list[End] = []

    def boundary(params, state, end, view):
        ends.append(end)
        capacity = np.array([2, 4] if len(ends) == 1 else view.capacity, np.int64)
        evictions = np.zeros((2, 6), bool)
        evictions[0, 2] = len(ends) == 1
        return capacity, evictions

    def decide(params, state, step, view):
        return plan([], retained=np.flatnonzero(view.resident[step.layer]))

    shape, passes = SHAPE, [replace(p, expert_ids=np.repeat(p.expert_ids, 2, 0)) for p in passes_of([{0}, {0}])]
    passes = [replace(p, gates=np.ones((2, 1, 1))) for p in passes]
    policy = toy([(0, 0), (0, 1), (0, 2), (1, 0)], boundary=boundary, decide=decide)
    decisions = list(drive(policy, passes, shape, 6, ESTIMATES))
    assert [d.capacity for d in decisions] == [3, 3, 2, 4]
    assert [np.flatnonzero(d.resident).tolist() for d in decisions] == [[0, 1, 2], [0], [0, 1], [0]]
    assert [end.forward for end in ends] == [0, 1]
    assert ends[0].confidence.tolist() == [0.5]


@pytest.mark.parametrize(
    ("capacity", "evicted", "message"),
    [
        ([4, 3], [], r"capacity \[4, 3\], must be at least 0 each and 6 in all"),
        ([7, -1], [], r"capacity \[7, -1\]"),
        ([3, 3], [(1, 4)], "evicts expert 4 of layer 1, which is not resident"),
        ([1, 5], [(0, 1)], "residents and copies in flight of layer 0 need 2 slots, its capacity is 1"),
        ([6], [], r"capacity is int64 of shape \(1,\)"),
    ],
)
def test_refuses_a_boundary_that_does_not_add_up(capacity, evicted, message):
    evictions = np.zeros((2, 6), bool)
    for pair in evicted:
        evictions[pair] = True
    policy = toy([(0, 0), (0, 1), (0, 2)], boundary=lambda *_: (np.array(capacity), evictions))
    end = End(8, 1, np.array([3]), np.array([0]), np.array([0.5]))
    with pytest.raises(PlanError, match=f"request 3, forward 8, after the last layer: {message}"):
        residents_of(policy).boundary(end)


def test_refuses_to_place_more_than_fits():
    policy = replace(built("ideal_free", {"misses": "h2d"}, SHAPE, passes_of([{0}])), place=lambda *_: np.ones(6, bool))
    passes = [replace(passes_of([{0}])[0], expert_ids=np.zeros((2, 1, 1), int), gates=np.ones((2, 1, 1)))]
    with pytest.raises(PlanError, match="request 0, forward 0, layer 0: places 6 experts, the capacity is 3"):
        list(drive(policy, passes, SHAPE, 6, ESTIMATES))


def test_prefetches_need_a_clock():
    def decide(params, state, step, view):
        return plan([0], prefetches=np.array([[1, 3]]), prefetch_priority=np.zeros((1, 2)))

    passes = [replace(passes_of([{0}])[0], expert_ids=np.zeros((2, 1, 1), int), gates=np.ones((2, 1, 1)))]
    with pytest.raises(PolicyError, match="toy prefetches, so its decisions need an engine with a clock"):
        list(drive(toy(decide=decide), passes, SHAPE, 6, ESTIMATES))


@pytest.mark.parametrize("engine", ["driver", "events"])
def test_what_a_policy_cannot_decide_is_refused_with_its_place(engine):
    shape, passes = random_passes(np.random.default_rng(1), prompt_length=0)
    forward, request = 7, int(passes[7].requests[0])
    blind = [*passes]
    blind[6] = replace(passes[6], p_argmax=np.full_like(passes[6].p_argmax, np.nan))
    place = f"^request {request}, forward {forward}, layer 0: the trace does not know the confidence"
    assert passes[6].blocks.tolist() == passes[7].blocks.tolist()  # its confidences reach the next gates
    policy = built("oled", {}, shape, passes)
    with pytest.raises(PolicyError, match=place):
        run_all(engine, policy, shape, blind)
    foresight = built("ideal_min", {"misses": "h2d"}, shape, passes[:7])
    with pytest.raises(PolicyError, match=f"^request {request}, forward {forward}, layer 0: .* more forwards than"):
        run_all(engine, foresight, shape, passes)


@pytest.mark.parametrize("engine", ["driver", "events"])
def test_what_a_policy_cannot_decide_after_a_forward_is_refused_with_its_place(engine):
    def boundary(params, state, end, view):
        raise PolicyError("too late")

    shape, passes = random_passes(np.random.default_rng(1))
    policy = replace(built("lru", {}, shape, passes), boundary=boundary)
    with pytest.raises(PolicyError, match=r"^request 0, forward 0, after the last layer: too late"):
        run_all(engine, policy, shape, passes)


# The registry


def test_every_policy_has_the_name_it_is_registered_under():
    shape, passes = random_passes(np.random.default_rng(0), signals=True)
    for name, module in POLICIES.items():
        policy = build_policy(name, module.Knobs(), context_of(shape, passes))
        assert (policy.name, policy.variant) == (name, "")


def test_variant_names_the_knobs_that_were_changed():
    shape, passes = random_passes(np.random.default_rng(0))
    context = context_of(shape, passes)
    assert build_policy("lru", {"misses": "oled", "lru_order": "id"}, context).variant == "lru_order=id, misses=oled"
    assert build_policy("oled", {"coop": False}, context).variant == "coop=false"


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("lur", {}, r"no policy 'lur'; did you mean lru\? allowed: full, ondemand, lru,"),
        (
            "lru",
            {"lru_ordr": "id"},
            r"lru has no knob 'lru_ordr'; did you mean lru_order\? allowed: lru_order, pool, misses, max_admit",
        ),
        ("oled", {"max_swaps": 10**30}, r"max_swaps is 1e\+30, must be within 1e\+15"),
        ("full", {"misses": "h2d"}, "full has no knob 'misses'; allowed: none"),
        ("lru", POLICIES["lfu"].Knobs(), "lru was given Knobs, needs its own Knobs or a mapping"),
    ],
)
def test_refuses_an_unknown_policy_or_knob(name, knobs, message):
    with pytest.raises(PolicyError, match=message):
        build_policy(name, knobs, Context(SHAPE))
