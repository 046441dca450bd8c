from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, answers, built, context_of, run
from scripted import layer_rows, make_costs, make_pass, make_shape
from strategies import change, random_passes, traces

from experiments import calibration
from policies.contract import Context, PolicyError
from policies.driver import drive
from policies.registry import build_policy
from policies.swapmoe import Knobs, swapped
from simulator.des import simulate
from tracer.schema import Signals
from tracer.shipped import find_trace
from tracer.store import TraceReader

SECOND_COPY = {"swap_from_staging": False}


def rows_of(policy, shape, passes, capacity, **costs):
    slots = capacity * shape.num_layers
    return layer_rows(simulate(passes, policy, shape, slots, make_costs(**costs), ESTIMATES))


def with_norms(pass_, norms):
    """A pass whose router inputs have these norms, [L, T]."""
    num_layers, num_tokens = norms.shape
    nothing = np.zeros((num_layers, num_tokens, 1))
    ahead = np.full((num_layers, 3, num_tokens, 1), -1)
    return change(pass_, signals=Signals(nothing.astype(int), nothing, norms, np.zeros((num_tokens, 16)), ahead))


class Plain:
    """What swapmoe must do, in dicts and sorted lists; checks every answer of the policy in the engine."""

    def __init__(self, policy, most, every, from_staging):
        self.policy, self.most, self.every, self.from_staging = policy, most, every, from_staging
        self.seen = {}  # forward of last activation

    def decide(self, params, state, step, view):
        layer = step.layer
        importance = dict.fromkeys(range(step.load.size), 0.0)
        norms = step.signals.input_norm
        for token, (ids, gates) in enumerate(zip(step.expert_ids.tolist(), step.gates.tolist(), strict=True)):
            for expert, gate in zip(ids, gates, strict=True):
                importance[expert] += (norms[token] if norms.size else 1.0) * gate
                self.seen[layer, expert] = step.forward
        resident = set(np.flatnonzero(view.resident[layer]).tolist())
        coming = set(np.flatnonzero(view.in_flight[layer]).tolist())
        missed = set(np.flatnonzero(step.load).tolist()) - resident
        after, entering, free = set(resident), [], view.free_slots
        if (step.forward + 1) % self.every == 0:
            for expert in sorted(missed - coming, key=lambda e: (-importance[e], e))[: self.most]:
                if free:
                    free -= 1
                else:
                    ranked = sorted(after, key=lambda e: (importance[e], self.seen.get((layer, e), -1), -e))
                    if not ranked or importance[ranked[0]] >= importance[expert]:
                        break
                    after.remove(ranked[0])
                after.add(expert)
                entering.append(expert)

        plan = self.policy.decide(params, state, step, view)
        assert plan.transfers.tolist() == sorted(missed)
        assert plan.on_cpu.size == 0
        retained = after if self.from_staging else resident | (coming & missed)
        assert set(np.flatnonzero(plan.retained).tolist()) == retained
        expected = [] if self.from_staging else [[layer, expert, 0, 0] for expert in entering]
        assert np.hstack([plan.prefetches, plan.prefetch_priority]).tolist() == expected
        assert state.score[layer].tolist() == [importance[expert] for expert in range(step.load.size)]
        assert (plan.clear_prefetches, plan.prefetch_delay_ns) == (False, 0)
        return plan


@given(
    traces(signals=None),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 3.0, 40.0, 170.0]),
    st.data(),
)
@settings(max_examples=50, deadline=None)
def test_equals_the_plain_policy(trace, most, every, from_staging, copy_ns, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    knobs = {"swap_m": most, "swap_f": every, "swap_from_staging": from_staging}
    policy = built("swapmoe", knobs, shape, passes)
    checked = replace(policy, decide=Plain(policy, most, every, from_staging).decide)
    rows = rows_of(checked, shape, passes, capacity, h2d_latency_ns=copy_ns)
    for row in rows:
        assert len(row["prefetch_experts"]) <= most
        assert set(row["prefetch_layers"]) <= {row["layer"]}
        assert len(row["hits"]) + len(row["transfers"]) == row["num_activated"]
        assert row["num_resident"] <= capacity
    # what was issued has started or was dropped, but for the last forward's
    left = sum(row["prefetch_issued"] for row in rows[-shape.num_layers :])
    fates = ("started", "dropped_begin", "dropped_flag", "dropped_victim")
    gone = sum(row[f"prefetch_{fate}"] for row in rows for fate in fates)
    assert 0 <= sum(row["prefetch_issued"] for row in rows) - gone <= left


@given(traces(), st.integers(0, 3), st.data())
@settings(max_examples=25)
def test_a_forward_changes_few_residents_of_a_layer(trace, most, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    for decision in run("swapmoe", {"swap_m": most}, shape, passes, capacity):
        entered = decision.plan.retained & ~decision.resident
        assert entered.sum() == (decision.resident & ~decision.plan.retained).sum() <= most
        assert decision.plan.retained.sum() == capacity


@pytest.mark.parametrize("knobs", [{"swap_m": 0}, {"swap_m": 0, **SECOND_COPY}])
def test_without_swaps_residents_stay(knobs):
    shape, passes = random_passes(np.random.default_rng(2))
    policy = built("swapmoe", knobs, shape, passes)
    _, resident, _ = policy.init(policy.params, shape, 18)
    for row in rows_of(policy, shape, passes, 6):
        assert row["retained"] == np.flatnonzero(resident[row["layer"]]).tolist()
        assert not row["prefetch_experts"]


def test_swaps_every_so_many_forwards():
    shape, passes = random_passes(np.random.default_rng(2))
    changed = {
        decision.step.forward
        for decision in run("swapmoe", {"swap_f": 3}, shape, passes, 6)
        if (decision.plan.retained != decision.resident).any()
    }
    assert changed
    assert {forward % 3 for forward in changed} == {2}


@given(traces(), st.data())
@settings(max_examples=20)
def test_with_equal_gates_the_load_decides(trace, data):
    shape, passes = trace
    passes = [change(item, gates=np.full(item.gates.shape, 1 / shape.top_k)) for item in passes]
    capacity = data.draw(st.integers(1, shape.num_experts))
    for decision in run("swapmoe", {"swap_m": 2}, shape, passes, capacity):
        load = decision.step.load
        missed = np.flatnonzero((load > 0) & ~decision.resident)
        ranked = sorted(missed.tolist(), key=lambda expert: (-load[expert], expert))
        entered = np.flatnonzero(decision.plan.retained & ~decision.resident).tolist()
        assert sorted(ranked[: len(entered)]) == entered


@given(traces(signals=True), st.integers(0, 5), st.data())
@settings(max_examples=20, deadline=None)
def test_the_scale_of_importance_changes_nothing(trace, most, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    doubled = [change(p, signals=replace(p.signals, input_norm=2 * p.signals.input_norm)) for p in passes]
    found = [run("swapmoe", {"swap_m": most}, shape, trace, capacity) for trace in (passes, doubled)]
    assert answers(found[0]) == answers(found[1])


@pytest.mark.parametrize("most", [0, 1, 8, 100])
def test_without_norms_it_retains_as_oled_by_gates_does(most):
    shape, passes = random_passes(np.random.default_rng(4), num_requests=3, num_experts=24)
    alone = {"priority": True, "layer_adapt": False, "coop": False, "priority_signal": "gate"}
    oled = built("oled", {**alone, "max_admit": most}, shape, passes)
    state, _, _ = oled.init(oled.params, shape, 24)
    policy = built("swapmoe", {"swap_m": most}, shape, passes)

    def decide(params, own, step, view):
        plan = policy.decide(params, own, step, view)
        assert (plan.retained == oled.decide(oled.params, state, step._replace(signals=None), view).retained).all()
        return plan

    assert list(drive(replace(policy, decide=decide), passes, shape, 24, ESTIMATES))


def test_free_slots_fill_first_and_the_least_important_leave_one_by_one():
    importance = np.array([0.3, 0.0, 0.0, 0.3, 0.5, 0.1, 0.9, 0.4])
    recency = np.array([1, 1, 1, 1, 1, 1, 1, 1])
    for num_free, entered, left in ((0, [6, 4], [1, 2]), (1, [6, 4, 7], [1, 2]), (9, [6, 4, 7, 5], [])):
        resident = np.array([1, 1, 1, 1, 0, 0, 0, 0], bool)
        candidates = ~resident
        found = swapped(candidates, resident, num_free, 9 if num_free else 2, importance, recency)
        assert found.tolist() == entered
        assert set(np.flatnonzero(resident)) == {0, 1, 2, 3, *entered} - set(left)
    # 7 is above both of 0 and 3, of which 3 has the higher id; 5 is above neither
    resident = np.array([1, 0, 0, 1, 0, 0, 0, 0], bool)
    candidates = np.array([0, 0, 0, 0, 0, 1, 0, 1], bool)
    assert swapped(candidates, resident, 0, 9, importance, recency).tolist() == [7]
    assert np.flatnonzero(resident).tolist() == [0, 7]


def test_norms_weigh_tokens():
    # by gates alone 1 would come for 0; the norm of its token makes it 2
    shape = make_shape(1, 4)
    first, second = make_pass(0, [{0: 3}]), make_pass(1, [{1: 2, 2: 1}])
    passes = [with_norms(first, np.ones((1, 3))), with_norms(second, np.array([[1.0, 1.0, 3.0]]))]
    for trace, entered in ((passes, 2), ([change(p, signals=None) for p in passes], 1)):
        decision = list(drive(built("swapmoe", {"swap_m": 1}, shape, trace, [first]), trace, shape, 1, ESTIMATES))[1]
        assert np.flatnonzero(decision.plan.retained).tolist() == [entered]


def test_the_most_important_of_calibration_start():
    shape, passes = random_passes(np.random.default_rng(3), signals=True)
    importance = np.zeros((shape.num_layers, shape.num_experts))
    for pass_ in passes:
        for layer in range(shape.num_layers if not pass_.is_prefill else 0):
            weights = pass_.gates[layer] * pass_.signals.input_norm[layer][:, None]
            np.add.at(importance[layer], pass_.expert_ids[layer], weights)
    policy = built("swapmoe", {}, shape, passes)
    _, resident, capacity = policy.init(policy.params, shape, 16)
    assert capacity.tolist() == [6, 5, 5]
    for layer, row in enumerate(resident):
        assert set(np.flatnonzero(row)) == set(np.argsort(-importance[layer])[: capacity[layer]])
    policy = built("swapmoe", {"swap_plan": "given", "swap_slots": [2, 4, 10]}, shape, passes)
    _, resident, capacity = policy.init(policy.params, shape, 16)
    assert capacity.tolist() == resident.sum(axis=1).tolist() == [2, 4, 10]
    with pytest.raises(PolicyError, match=r"^swapmoe: swap_slots add up to 16: must be 18, the slots of all layers"):
        policy.init(policy.params, shape, 18)


# In time. A layer takes 100 to its gate, a copy 50, a kernel 20; 0 is resident and forward 0 activates 1.


def test_a_swap_from_staging_takes_no_second_copy():
    shape, passes = make_shape(1, 4), [make_pass(0, [[1]]), make_pass(1, [[1]])]
    first, second = rows_of(built("swapmoe", {}, shape, passes, [make_pass(0, [[0]])]), shape, passes, 1)
    assert (first["transfers"], first["retained"], first["end_ns"]) == ([1], [1], 170)
    assert (second["hits"], second["link_busy_ns"], second["end_ns"]) == ([1], 0, 290)


def test_a_second_copy_runs_beside_the_next_layer():
    # the miss lands at 150; the second copy takes 150 to 200 and evicts 0, of importance 0, when it starts
    shape, passes = make_shape(1, 4), [make_pass(0, [[1]]), make_pass(1, [[1]])]
    policy = built("swapmoe", SECOND_COPY, shape, passes, [make_pass(0, [[0]])])
    first, second = rows_of(policy, shape, passes, 1)
    assert (first["transfers"], first["retained"], first["end_ns"]) == ([1], [0], 170)
    assert (first["prefetch_issued"], first["prefetch_started"], first["link_busy_ns"]) == (1, 1, 50)
    assert (second["hits"], second["prefetch_landed"], second["link_busy_ns"]) == ([1], 1, 50)


def test_a_second_copy_that_is_late_is_promoted():
    # the second copy takes 270 to 440, the gate of forward 1 is read at 390
    shape, passes = make_shape(1, 4), [make_pass(0, [[1]]), make_pass(1, [[1]])]
    policy = built("swapmoe", SECOND_COPY, shape, passes, [make_pass(0, [[0]])])
    first, second = rows_of(policy, shape, passes, 1, h2d_latency_ns=170)
    assert (first["retained"], first["end_ns"]) == ([0], 290)
    assert (second["transfers"], second["num_promoted"], second["prefetch_experts"]) == ([1], 1, [])
    assert (second["retained"], second["transfer_start_ns"], second["end_ns"]) == ([1], [270], 460)


@pytest.mark.parametrize("knobs", [{}, SECOND_COPY])
def test_laws_hold_on_the_shipped_trace(knobs):
    reader = TraceReader(find_trace("proxy-tiny"))
    shape = reader.metadata.shape
    context, _ = calibration.context_of(reader, 1)
    policy = build_policy("swapmoe", knobs, context)
    assert not policy.warnings
    passes = [item for item in reader.passes(signals=True) if item.requests[0] < 3]
    rows = rows_of(policy, shape, passes, 16)
    copies = sum(row["link_busy_ns"] for row in rows) // 50
    assert copies == sum(len(row["transfers"]) - row["num_promoted"] + row["prefetch_landed"] for row in rows)
    assert (sum(row["prefetch_landed"] for row in rows) > 0) == bool(knobs)
    for before, after in zip(rows, rows[shape.num_layers :], strict=False):
        assert len(set(after["retained"]) - set(before["retained"])) <= (8 if not knobs else 9)  # one in progress
        assert not before["on_cpu"]


def test_what_it_is_built_from():
    shape, passes = random_passes(np.random.default_rng(0))
    policy = built("swapmoe", {}, shape, passes)
    assert (policy.prefetches, policy.reads_signals, policy.clairvoyant) == (False, True, False)
    assert policy.warnings == ("the trace has no norms of the router input: importance counts gates alone",)
    assert built("swapmoe", SECOND_COPY, shape, passes).prefetches
    with pytest.raises(PolicyError, match="swapmoe needs calibration, and there is none"):
        build_policy("swapmoe", {}, Context(shape))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"swap_m": -1}, "swap_m is -1: must be at least 0"),
        ({"swap_f": 0}, "swap_f is 0: must be at least 1"),
        ({"swap_plan": "search"}, "swap_plan 'search': allowed are uniform, given"),
        ({"swap_plan": "given"}, "^swapmoe: swap_slots must be given with swap_plan=given, and only then"),
        ({"swap_slots": (1, 2)}, "^swapmoe: swap_slots must be given with swap_plan=given, and only then"),
    ],
)
def test_knobs_that_are_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        Knobs(**knobs)


@pytest.mark.parametrize("slots", [(1, 2), (1, 2, 17), (0, 2, 3)])
def test_slots_that_are_refused(slots):
    shape, passes = random_passes(np.random.default_rng(0))
    with pytest.raises(PolicyError, match=r"^swapmoe: swap_slots are .* must be 3, one for each layer, of 1 to 16"):
        build_policy("swapmoe", {"swap_plan": "given", "swap_slots": slots}, context_of(shape, passes))
