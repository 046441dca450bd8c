from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, answers, built, context_of, pass_of, run, shown
from scripted import layer_rows, make_costs, make_pass, make_shape
from strategies import change, random_passes, traces

from policies.contract import PolicyError
from policies.gate_ahead import Knobs
from policies.registry import build_policy
from policies.steps import Steps, step_at
from simulator.des import simulate
from tracer.schema import Signals

EVENTS = ("dropped_begin", "dropped_flag", "dropped_victim")


def with_ahead(pass_, ahead_ids):
    """A pass whose gates name these experts, [L, 3, T, W]."""
    num_layers, num_tokens, _ = pass_.expert_ids.shape
    nothing = np.zeros((num_layers, num_tokens, 1))
    signals = Signals(nothing.astype(int), nothing, nothing[..., 0], np.zeros((num_tokens, 16)), ahead_ids)
    return change(pass_, signals=signals)


def foreseeing(passes):
    """The same passes with gates that name exactly what the next layers will activate."""
    told = []
    for pass_ in passes:
        num_layers, num_tokens, top_k = pass_.expert_ids.shape
        ahead = np.full((num_layers, 3, num_tokens, top_k), -1)
        for depth in (1, 2, 3):
            ahead[: max(num_layers - depth, 0), depth - 1] = pass_.expert_ids[depth:]
        told.append(with_ahead(pass_, ahead))
    return told


def rows_of(policy, shape, passes, capacity, **costs):
    slots = capacity * shape.num_layers
    return layer_rows(simulate(passes, policy, shape, slots, make_costs(**costs), ESTIMATES))


def total(rows, event):
    return sum(row[f"prefetch_{event}"] for row in rows)


# Decisions


def test_worked_example():
    shape = make_shape(2, 10, 2)
    ahead = np.full((2, 3, 2, 4), -1)
    ahead[0, 0] = [[3, 5, 7, 1], [5, 9, 3, 2]]
    passes = [with_ahead(pass_of(np.array([[[0, 1], [0, 2]], [[3, 5], [5, 9]]])), ahead)]
    policy = built("gate_ahead", {}, shape, passes)
    state, resident, capacity = policy.init(policy.params, shape, 8)
    resident[1, 9] = True
    forward = Steps(shape, reads_signals=True).read(passes[0])
    view = shown(resident, np.zeros_like(resident), capacity, 4)
    plan = policy.decide(policy.params, state, step_at(forward, 0), view)
    assert plan.prefetches.tolist() == [[1, 5], [1, 3]]
    assert plan.prefetch_priority.tolist() == [[1, -2], [1, -1]]
    assert plan.clear_prefetches
    # the three misses were touched one by one, then all that was named at once, what is resident too
    assert state.score.tolist() == [[1, 2, 3, *[0] * 7], [0, 0, 0, 4, 0, 4, 0, 0, 0, 4]]
    last = policy.decide(policy.params, state, step_at(forward, 1), view)
    assert last.prefetches.size == 0
    assert last.clear_prefetches


class Plain:
    """What gate_ahead must do, in dicts and lists; checks every answer of the policy in the engine."""

    def __init__(self, policy, depth):
        self.policy, self.depth, self.clock = policy, depth, 0
        self.touches, self.scores = Counter(), Counter()

    def decide(self, params, state, step, view):
        layer, load = step.layer, step.load
        activated = set(np.flatnonzero(load).tolist())
        resident = set(np.flatnonzero(view.resident[layer]).tolist())
        coming = set(np.flatnonzero(view.in_flight[layer]).tolist())
        for expert in [*sorted(activated - resident), *sorted(activated & resident)]:
            self.clock += 1
            self.touches[layer, expert] = self.scores[layer, expert] = self.clock
        held = (resident | activated) - coming
        room = int(view.capacity[layer]) - len(coming)
        retained = set(sorted(held, key=lambda e: (-self.touches[layer, e], e))[:room]) | (coming & activated)
        self.clock += 1
        prefetches = []
        for ahead in range(1, self.depth + 1):
            target = layer + ahead
            if target >= len(view.resident):
                break
            named = step.signals.ahead_ids[ahead - 1, :, : step.expert_ids.shape[1]].ravel().tolist()
            votes = Counter(named)
            for expert in sorted(votes, key=lambda e: (-votes[e], e)):
                self.scores[target, expert] = self.clock
                if not view.resident[target, expert] and not view.in_flight[target, expert]:
                    prefetches.append([target, expert, ahead, -votes[expert]])

        plan = self.policy.decide(params, state, step, view)
        assert plan.transfers.tolist() == sorted(activated - resident)
        assert plan.on_cpu.size == 0
        assert np.flatnonzero(plan.retained).tolist() == sorted(retained)
        assert np.hstack([plan.prefetches, plan.prefetch_priority]).tolist() == prefetches
        assert {key: value for key, value in np.ndenumerate(state.score) if value} == self.scores
        assert (plan.clear_prefetches, plan.prefetch_delay_ns) == (True, 0)
        assert (plan.prefetches[:, 0] > layer).all()
        return plan


@given(traces(signals=True), st.integers(1, 3), st.sampled_from([0.0, 3.0, 40.0, 170.0]), st.data())
@settings(max_examples=40, deadline=None)
def test_equals_the_plain_policy_and_loses_no_prefetch(trace, depth, copy_ns, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    policy = built("gate_ahead", {"depth": depth}, shape, passes)
    checked = replace(policy, decide=Plain(policy, depth).decide)
    rows = rows_of(checked, shape, passes, capacity, h2d_latency_ns=copy_ns)
    # every gate clears the queue and the last layer's names nothing, so nothing is queued when the run ends
    assert total(rows, "issued") == total(rows, "started") + sum(total(rows, event) for event in EVENTS)
    assert 0 <= total(rows, "started") - total(rows, "landed") <= 1
    assert total(rows, "unserved") <= total(rows, "dropped_begin")
    assert total(rows, "late") == sum(row["num_promoted"] for row in rows)
    assert total(rows, "late") + total(rows, "unused") <= total(rows, "started")
    for row in rows:
        assert len(row["hits"]) + len(row["transfers"]) == row["num_activated"]
        assert all(layer > row["layer"] for layer in row["prefetch_layers"])


@given(traces(signals=None), st.data())
@settings(max_examples=15)
def test_without_depth_it_is_lru(trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    lru = run("lru", {"lru_order": "misses_first"}, shape, passes, capacity)
    assert answers(run("gate_ahead", {"depth": 0}, shape, passes, capacity)) == answers(lru)


# In time. A layer takes 100 to its gate; without misses 20 more for its hits.


def timed(named, activated, capacity=2, **costs):
    """Rows of one forward of two layers: layer 0 activates expert 0 and its gate names these for layer 1."""
    shape = make_shape(2, 8)
    pass_ = make_pass(0, [[0], activated])
    size = pass_.positions.size
    ahead = np.full((2, 3, size, 1), -1)
    ahead[0, 0, :, 0] = [*named, *[named[0]] * (size - len(named))]
    passes = [with_ahead(pass_, ahead)]
    return rows_of(built("gate_ahead", {}, shape, passes), shape, passes, capacity, **costs)


def test_what_lands_before_the_gate_is_a_hit():
    # demand 100 to 150, then the prefetch 150 to 200; layer 0 ends at 170, layer 1's gate is read at 270
    first, second = timed([1], [1])
    assert (first["transfer_start_ns"], first["transfer_end_ns"], first["end_ns"]) == ([100], [150], 170)
    assert (second["hits"], second["transfers"], second["end_ns"]) == ([1], [], 290)
    assert [(row["prefetch_issued"], row["prefetch_started"], row["prefetch_landed"]) for row in (first, second)] == [
        (1, 1, 0),
        (0, 0, 1),
    ]
    assert [row["link_busy_ns"] for row in (first, second)] == [50, 50]


def test_what_is_under_way_at_the_gate_is_promoted():
    # demand 100 to 250, prefetch 250 to 400; layer 1's gate is read at 370, its kernel runs when the copy has landed
    first, second = timed([1], [1], h2d_latency_ns=150)
    assert first["end_ns"] == 270
    assert (second["hits"], second["transfers"], second["num_promoted"], second["prefetch_late"]) == ([], [1], 1, 1)
    assert (second["transfer_start_ns"], second["transfer_end_ns"], second["end_ns"]) == ([250], [400], 420)
    assert second["retained"] == [1]


def test_what_has_not_started_when_its_layer_begins_is_demanded():
    # demand 100 to 400, prefetch of 1 from 400; that of 2 is dropped when layer 1 begins at 420
    first, second = timed([1, 2], [1, 2], h2d_latency_ns=300)
    assert (first["prefetch_issued"], first["prefetch_started"]) == (2, 1)
    assert (second["prefetch_dropped_begin"], second["prefetch_unserved"], second["prefetch_late"]) == (1, 1, 1)
    assert (second["transfers"], second["transfer_start_ns"], second["transfer_end_ns"]) == (
        [1, 2],
        [400, 700],
        [700, 1000],
    )


def test_what_is_named_finds_a_victim_in_a_full_layer():
    # layer 1 is full of 1 and 2; the second forward names 3, which was never touched before
    shape = make_shape(2, 8)
    passes = [make_pass(0, [[0], [1, 2]]), make_pass(1, [[0], [1, 3]])]
    ahead = np.full((2, 2, 3, 2, 1), -1)
    ahead[0, 0, 0, :, 0], ahead[1, 0, 0, :, 0] = [1, 2], [1, 3]
    passes = [with_ahead(pass_, ids) for pass_, ids in zip(passes, ahead, strict=True)]
    rows = rows_of(built("gate_ahead", {}, shape, passes), shape, passes, 2)
    assert rows[2]["prefetch_experts"] == [3]
    assert [row["prefetch_dropped_victim"] for row in rows] == [0, 0, 0, 0]
    assert rows[3]["hits"] == [1, 3]  # 2 left: 1 was named as well


@given(traces(signals=False), st.data())
@settings(max_examples=20, deadline=None)
def test_with_true_names_and_a_free_link_only_first_layers_miss(trace, data):
    shape, passes = trace
    widest = max(np.unique(ids).size for pass_ in passes for ids in pass_.expert_ids)
    passes = foreseeing(passes)
    capacity = data.draw(st.integers(widest, shape.num_experts))
    policy = built("gate_ahead", {"depth": data.draw(st.integers(1, 3))}, shape, passes)
    for row in rows_of(policy, shape, passes, capacity, h2d_latency_ns=0.0):
        assert not row["transfers"] or row["layer"] == 0


def test_a_trace_without_signals_is_refused():
    shape, passes = random_passes(np.random.default_rng(0))
    message = "^gate_ahead needs ahead_ids of the table signals, which this trace lacks: proxy-19x256-signals has them$"
    with pytest.raises(PolicyError, match=message):
        build_policy("gate_ahead", {}, context_of(shape, passes))


@pytest.mark.parametrize("depth", [-1, 4])
def test_other_depths_are_refused(depth):
    with pytest.raises(PolicyError, match=f"^gate_ahead: depth is {depth}: allowed are 0 to 3"):
        Knobs(depth=depth)
