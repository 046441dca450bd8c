from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, answers, built, context_of, run, sets_of, shown
from scripted import layer_rows, make_costs, make_pass, make_shape
from strategies import random_passes, traces

from policies.contract import PolicyError
from policies.registry import build_policy
from policies.steps import Steps, count_load, step_at
from simulator.des import simulate
from tracer.schema import ForwardKind

H2D = {"misses": "h2d"}


def rows_of(policy, shape, passes, capacity, **costs):
    slots = capacity * shape.num_layers
    return layer_rows(simulate(passes, policy, shape, slots, make_costs(**costs), ESTIMATES))


def hits_of(rows):
    return sum(len(row["hits"]) for row in rows)


class Plain:
    """What ideal_prefetch must do by a search through the run; checks every answer of the policy in the engine."""

    def __init__(self, policy, depth, shape, passes):
        self.policy, self.depth = policy, depth
        self.loads = np.stack([count_load(pass_.expert_ids, shape.num_experts) for pass_ in passes])  # [F, L, E]

    def next_use(self, forward, layer, expert):
        later = np.flatnonzero(self.loads[forward + 1 :, layer, expert])
        return forward + 1 + int(later[0]) if later.size else np.inf

    def decide(self, params, state, step, view):
        plan = self.policy.decide(params, state, step, view)
        forward, layer = step.forward, step.layer
        num_forwards, num_layers = self.loads.shape[:2]
        activated, resident, flying = step.load > 0, view.resident[layer], view.in_flight[layer]
        missed = set(np.flatnonzero(activated & ~resident).tolist())
        coming = missed & set(np.flatnonzero(flying).tolist())
        assert set(plan.transfers.tolist()) | set(plan.on_cpu.tolist()) == missed
        assert coming <= set(plan.transfers.tolist())
        if self.policy.misses == "h2d" or step.kind == ForwardKind.PREFILL:
            assert set(plan.transfers.tolist()) == missed
        held = (set(np.flatnonzero(resident).tolist()) | set(plan.transfers.tolist())) - set(np.flatnonzero(flying))
        room = int(view.capacity[layer] - flying.sum())
        kept = set(sorted(held, key=lambda e: (self.next_use(forward, layer, e), e))[:room]) | coming
        assert set(np.flatnonzero(plan.retained).tolist()) == kept
        prefetches = []
        for ahead in range(1, self.depth + 1):
            then, target = divmod(forward * num_layers + layer + ahead, num_layers)
            if then == num_forwards:
                break
            load = self.loads[then, target]
            for expert in sorted(np.flatnonzero(load).tolist(), key=lambda e: (-load[e], e)):
                is_held = view.resident[target, expert] or (target == layer and expert in kept)
                if not is_held and not view.in_flight[target, expert]:
                    prefetches.append([target, expert, ahead, -load[expert]])
        assert np.hstack([plan.prefetches, plan.prefetch_priority]).tolist() == prefetches
        assert plan.clear_prefetches == bool(prefetches)
        for (row, expert), score in np.ndenumerate(state.score):
            expected = self.next_use(forward if row <= layer else forward - 1, row, expert)
            assert score == -min(expected, np.iinfo(np.int32).max)
        return plan


@given(traces(max_experts=8, max_requests=2), st.sampled_from([H2D, {}]), st.sampled_from([0.0, 3.0, 90.0]), st.data())
@settings(max_examples=25, deadline=None)
def test_equals_the_plain_policy(trace, knobs, copy_ns, data):
    shape, passes = trace
    depth, capacity = data.draw(st.integers(0, shape.num_layers)), data.draw(st.integers(1, shape.num_experts))
    policy = built("ideal_prefetch", {**knobs, "depth": depth}, shape, passes)
    checked = replace(policy, decide=Plain(policy, depth, shape, passes).decide)
    rows = rows_of(checked, shape, passes, capacity, h2d_latency_ns=copy_ns)
    # no prefetch is for nothing: its execution activates it, so what has landed is used unless it made room before
    issued = [
        (row["forward"], row["layer"], *pair)
        for row in rows
        for pair in zip(row["prefetch_layers"], row["prefetch_experts"], strict=True)
    ]
    for forward, layer, target, expert in issued:
        then = forward + (target <= layer)
        assert expert in passes[then].expert_ids[target]
    assert hits_of(rows) <= hits_of(rows_of(built("ideal_free", H2D, shape, passes), shape, passes, capacity))


@given(traces(), st.sampled_from([H2D, {}]), st.data())
@settings(max_examples=15)
def test_without_depth_it_is_ideal_min(trace, knobs, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    found = run("ideal_prefetch", {**knobs, "depth": 0}, shape, passes, capacity)
    assert answers(found) == answers(run("ideal_min", knobs, shape, passes, capacity))


def test_what_comes_next_wraps_into_the_next_forward_and_request():
    shape = make_shape(4, 6)
    passes = [make_pass(0, [[0], [1], [2], {3: 2, 4: 1, 5: 2}]), make_pass(1, [[4], [5], [0], [1]], request=1)]
    policy = built("ideal_prefetch", H2D, shape, passes)
    state, resident, capacity = policy.init(policy.params, shape, 8)
    steps = Steps(shape)
    first, last = steps.read(passes[0]), steps.read(passes[1])
    view = shown(resident, np.zeros_like(resident), capacity, 2)
    plan = policy.decide(policy.params, state, step_at(first, 2), view)
    assert plan.prefetches.tolist() == [[3, 3], [3, 5], [3, 4], [0, 4], [1, 5]]
    assert plan.prefetch_priority.tolist() == [[1, -2], [1, -2], [1, -1], [2, -1], [3, -1]]
    plan = policy.decide(policy.params, state, step_at(last, 2), view)
    assert plan.prefetches.tolist() == [[3, 1]]  # after the run's last forward, nothing
    assert policy.decide(policy.params, state, step_at(last, 3), view).prefetches.size == 0


@given(traces(), st.sampled_from([H2D, {}]), st.data())
@settings(max_examples=20, deadline=None)
def test_over_a_free_link_all_that_fits_is_there_from_the_second_layer_on(trace, knobs, data):
    shape, passes = trace
    if shape.num_layers == 1:
        return
    capacity = data.draw(st.integers(1, shape.num_experts))
    depth = data.draw(st.integers(1, shape.num_layers - 1))
    policy = built("ideal_prefetch", {**knobs, "depth": depth}, shape, passes)
    rows = rows_of(policy, shape, passes, capacity, h2d_latency_ns=0.0)
    for row in rows[1:]:
        assert len(row["hits"]) == min(row["num_activated"], capacity)


def test_a_copy_in_flight_is_no_part_of_the_split():
    # layer 1 activates 1 to 4, all missed; 2 is in flight, so the split is over three
    shape = make_shape(2, 6)
    passes = [make_pass(0, [[0], [1, 2, 3, 4]])]
    policy = built("ideal_prefetch", {}, shape, passes)
    state, resident, capacity = policy.init(policy.params, shape, 8)
    in_flight = np.zeros_like(resident)
    view = shown(resident, in_flight, capacity, 4)
    step = step_at(Steps(shape).read(passes[0]), 1)
    alone = policy.decide(policy.params, state, step, view)
    # experts of 8 / 5 tokens take 88 on the CPU, 120 to copy: 88 / 208 of four is 1.7, of three 1.3
    assert (len(alone.transfers), len(alone.on_cpu)) == (2, 2)
    in_flight[1, 2] = True
    plan = policy.decide(policy.params, state, step, view)
    assert plan.transfers.tolist() == [2, 1]
    assert plan.on_cpu.tolist() == [3, 4]
    assert np.flatnonzero(plan.retained).tolist() == [1, 2]


def test_the_default_depth_is_three_or_all_layers():
    for num_layers, depth in ((5, 3), (2, 2)):
        shape, passes = random_passes(np.random.default_rng(0), num_layers=num_layers)
        assert built("ideal_prefetch", {}, shape, passes).params.depth == depth
    with pytest.raises(PolicyError, match=r"^ideal_prefetch: depth is 3: allowed are 0 to 2, the layers of the trace"):
        built("ideal_prefetch", {"depth": 3}, shape, passes)
    with pytest.raises(PolicyError, match="ideal_prefetch needs the passes of the run, and there are none"):
        build_policy("ideal_prefetch", {}, context_of(shape, [], passes))


def test_it_can_beat_what_no_policy_without_prefetch_can():
    shape, passes = random_passes(np.random.default_rng(2), num_layers=4)
    hits = [
        hits_of(rows_of(built(name, H2D, shape, passes), shape, passes, 6, h2d_latency_ns=1.0))
        for name in ("ideal_min", "ideal_prefetch", "ideal_free")
    ]
    assert hits[0] < hits[1] <= hits[2]
    assert hits[2] == sum(min(len(batch), 6) for layer in range(4) for batch in sets_of(passes, layer))
