from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, context_of, pass_of, shape_of, shown
from scripted import layer_rows, make_costs
from strategies import change, random_passes, traces

from experiments import calibration
from policies.contract import MOST_REQUESTS, Context, PolicyError
from policies.registry import build_policy
from policies.sida import OVERFLOWS, Knobs
from policies.steps import Steps, count_load, step_at
from policies.unit_prediction import UNITS, add_up, begins, token_rows, true_rows
from simulator.des import simulate
from tracer.calibration_file import load as load_calibration
from tracer.schema import Calibration
from tracer.shipped import find_trace
from tracer.store import TraceReader

SHIPPED = find_trace("proxy-19x256-code").parent / "proxy-19x256.calibration.npz"
FATES = ("started", "dropped_begin", "dropped_flag", "dropped_victim")


def rows_of(policy, shape, passes, capacity, **costs):
    slots = capacity * shape.num_layers
    return layer_rows(simulate(passes, policy, shape, slots, make_costs(**costs), ESTIMATES))


def table_of(tokens, load, width=16):
    """A calibration that knows these tokens, {id: a layer's [(expert, share), ...] for each layer}."""
    num_layers, width = len(load), min(width, len(load[0]))
    experts = np.full((len(tokens), num_layers, width), -1)
    shares = np.zeros(experts.shape)
    for row, token in enumerate(sorted(tokens)):
        for layer, named in enumerate(tokens[token]):
            for rank, (expert, share) in enumerate(named):
                experts[row, layer, rank], shares[row, layer, rank] = expert, share
    nothing = np.zeros((0, 0, 0))
    ids = np.array(sorted(tokens), np.int64)
    load = np.array(load)
    return Calibration(
        "tests", 1, 1, load, load, load * 1.0, nothing, nothing, nothing, np.zeros((0, 0)), ids, experts, shares
    )


def policy_for(table, shape, **knobs):
    return build_policy("sida", knobs, Context(shape, calibrate=lambda: table))


def begun(unit, passes, shape):
    """Which passes begin a unit."""
    steps, members = Steps(shape), np.full(MOST_REQUESTS, -1)
    forwards = [steps.read(pass_) for pass_ in passes]
    return [begins(UNITS.index(unit), members, forward.request, forward.iteration) for forward in forwards]


# Units


def test_units_of_one_request_after_another():
    shape = shape_of(1, 2)
    ids = np.zeros((1, 2, 1), np.int64)
    forwards = [(0, -1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, -1, 0), (1, 0, 0)]  # request, block, iteration
    passes = [
        pass_of(ids, i, requests=(request,), blocks=(block,), iterations=(iteration,))
        for i, (request, block, iteration) in enumerate(forwards)
    ]
    assert begun("request", passes, shape) == [True, False, False, False, True, False]
    assert begun("block", passes, shape) == [True, True, False, True, True, True]
    assert begun("iter", passes, shape) == [True] * 6


def test_a_batch_begins_when_one_of_its_requests_does():
    shape = shape_of(1, 2)
    ids = np.zeros((1, 6, 1), np.int64)
    running = [((0, 1, 2), (0, 3, 4)), ((0, 1, 2), (1, 4, 5)), ((1, 2, 3), (5, 6, 0)), ((1, 3), (6, 1)), ((1,), (0,))]
    passes = [
        pass_of(ids, i, requests=requests, blocks=(0,) * len(requests), iterations=iterations)
        for i, (requests, iterations) in enumerate(running)
    ]
    assert begun("request", passes, shape) == [True, False, True, False, False]
    assert begun("block", passes, shape) == [True, False, True, False, True]


def test_a_pass_of_too_many_requests_is_refused():
    shape = shape_of(1, 2)
    for size in (MOST_REQUESTS, MOST_REQUESTS + 1):
        passes = [pass_of(np.zeros((1, size, 1), np.int64), requests=range(size), blocks=[0] * size)]
        if size == MOST_REQUESTS:
            assert begun("request", passes, shape) == [True]
        else:
            with pytest.raises(PolicyError, match="sida follows up to 256 requests in a pass, and there are more"):
                begun("request", passes, shape)


# Predictions


def predicted(rows, chosen, num_layers):
    """Summed weights of these rows, [L, E]."""
    sums = np.full((num_layers, rows.load.shape[1]), np.nan)
    for layer in range(num_layers):
        add_up(rows, np.array(chosen), layer, num_layers, sums[layer])
    return sums


def test_a_token_has_its_experts_and_an_unknown_one_those_of_the_average():
    table = table_of({7: [[(2, 1.0), (0, 0.5)], [(1, 0.75)]]}, [[4, 0, 8, 2], [0, 0, 0, 7]])
    rows = token_rows(table, top_k=2)
    # 14 and 7 routes are of 7 and 3.5 tokens
    assert rows.offsets.tolist() == [0, 2, 3, 3, 3]
    assert rows.experts.tolist() == [2, 0, 1]
    assert rows.weights.tolist() == [1.0, 0.5, 0.75]
    assert rows.rests.tolist() == [0, 0, 1 / 7, 2 / 7]
    assert predicted(rows, [1], 2).tolist() == [[4 / 7, 0, 8 / 7, 2 / 7], [0, 0, 0, 2.0]]
    assert predicted(rows, [0, 1], 2)[0].tolist() == pytest.approx([4 / 7 + 0.5, 0, 8 / 7 + 1, 2 / 7])


def test_what_a_list_has_no_room_for_is_of_the_others_by_their_load():
    # of 3 experts a token, 2.5 are listed; the others are chosen 3 and 1 times, those listed 5 and 4
    table = table_of({7: [[(2, 1.0), (0, 1.5)]]}, [[4, 3, 5, 1, 0]], width=2)
    rows = token_rows(table, top_k=3)
    assert predicted(rows, [0], 1)[0].tolist() == pytest.approx([1.5, 0.375, 1.0, 0.125, 0])
    assert predicted(rows, [0, 0, 1], 1)[0].tolist() == pytest.approx(
        [3 + 12 / 13, 0.75 + 9 / 13, 2 + 15 / 13, 0.25 + 3 / 13, 0]
    )
    # a list with room left is all that the token chose
    table = table_of({7: [[(2, 1.0)]]}, [[4, 3, 5, 1, 0]], width=2)
    assert predicted(token_rows(table, top_k=3), [0], 1)[0].tolist() == [0, 0, 1.0, 0, 0]


def test_every_token_of_the_shipped_record_chooses_as_many_as_it_is_routed_to():
    shipped = load_calibration(SHIPPED)
    rows, num_layers = token_rows(shipped, 8), shipped.load.shape[0]
    for row in range(0, shipped.token_ids.size + 1, 48):
        expected = predicted(rows, [row], num_layers)
        assert (expected > -1e-12).all()
        assert expected.sum(axis=1) == pytest.approx(np.full(num_layers, 8), abs=0.1)  # shares are 255ths


@pytest.mark.parametrize("over", OVERFLOWS)
@pytest.mark.parametrize("tokens", [[0], [1, 1, 5], [999]])
def test_a_set_fills_the_slots_where_load_allows_it(over, tokens):
    shipped = load_calibration(SHIPPED)
    shape = shape_of(*shipped.load.shape)  # of passes; the policy is of one that chooses 8
    policy = policy_for(shipped, shape_of(*shipped.load.shape, top_k=8), sida_over=over)
    tokens = [shipped.token_ids[token] if token < 999 else -1 for token in tokens]
    longest = (shipped.token_experts >= 0).all(axis=2).all(axis=1)
    tokens = [*tokens, shipped.token_ids[longest][0]]
    for slots in (8, 40, 256):
        _, state = ask(policy, shape, tokens, slots * shape.num_layers)
        assert ((state.order >= 0).sum(axis=1) == slots).all()


@given(traces(), st.sampled_from(UNITS), st.integers(0, 99))
@settings(max_examples=25)
def test_without_noise_the_future_is_known(trace, unit, seed):
    shape, passes = trace
    rows = true_rows(passes, shape, UNITS.index(unit), 0.0, seed)
    loads = []
    for pass_, is_first in zip(passes, begun(unit, passes, shape), strict=True):
        if is_first:
            loads.append(np.zeros((shape.num_layers, shape.num_experts)))
        loads[-1] += count_load(pass_.expert_ids, shape.num_experts)
    for place, load in enumerate(np.concatenate(loads)):
        here = slice(rows.offsets[place], rows.offsets[place + 1])
        expected = sorted(np.flatnonzero(load), key=lambda expert: (-load[expert], expert))
        assert rows.experts[here].tolist() == expected
        assert rows.weights[here].tolist() == load[expected].tolist()
    assert rows.offsets.size == len(loads) * shape.num_layers + 1


def test_noise_replaces_its_share_by_what_is_not_activated():
    shape, passes = random_passes(np.random.default_rng(1), num_experts=64, num_requests=4)
    true, half, more, wrong = (true_rows(passes, shape, 2, noise, 3) for noise in (0.0, 0.5, 0.7, 1.0))
    kept = {}
    for name, rows in {"half": half, "more": more, "wrong": wrong}.items():
        assert rows.offsets.tolist() == true.offsets.tolist()
        assert rows.weights.tolist() == true.weights.tolist()
        kept[name] = rows.experts == true.experts
        for start, end in zip(rows.offsets, rows.offsets[1:], strict=False):
            new = rows.experts[start:end][~kept[name][start:end]]
            assert not set(new) & set(true.experts[start:end])
            assert len(set(rows.experts[start:end])) == end - start
    assert not kept["wrong"].any()
    assert 0.45 < kept["half"].mean() < 0.55
    assert (kept["more"] <= kept["half"]).all()
    assert (true_rows(passes, shape, 2, 0.5, 4).experts != half.experts).any()


def test_what_activates_everything_cannot_be_mistaken():
    passes = [pass_of(np.arange(4).reshape(1, 4, 1))]
    assert sorted(true_rows(passes, shape_of(1, 4), 0, 1.0, 0).experts) == [0, 1, 2, 3]


# Decisions


def ask(policy, shape, token_ids, slots, *, layer=0, resident=(), in_flight=(), experts=0):
    """Plan and state at one gate of a first forward of these tokens."""
    state, residents, capacity = policy.init(policy.params, shape, slots)
    flying = np.zeros_like(residents)
    for cell in resident:
        residents[cell] = True
    for cell in in_flight:
        flying[cell] = True
    ids = np.full((shape.num_layers, len(token_ids), 1), experts)
    forward = Steps(shape, reads_signals=True).read(pass_of(ids, token_ids_in=token_ids))
    view = shown(residents, flying, capacity)
    for gate in range(layer + 1):
        plan = policy.decide(policy.params, state, step_at(forward, gate), view)
    return plan, state


TOKENS = {
    3: [[(1, 1.0), (2, 0.5)], [(4, 0.5), (0, 0.25)]],
    5: [[(2, 0.75), (3, 0.25)], [(0, 1.0)]],
}
TABLE = table_of(TOKENS, [[0, 0, 0, 0, 6, 0], [0, 0, 0, 0, 0, 6]])


def test_worked_example():
    # layer 0: expert 2 .5 + .75, 1 1.0, 3 .25; layer 1: 0 .25 + 1.0, 4 .5
    shape = shape_of(2, 6)
    plan, state = ask(policy_for(TABLE, shape), shape, [3, 5], 6)
    assert state.score.tolist() == [[0, 1.0, 1.25, 0.25, 0, 0], [1.25, 0, 0, 0, 0.5, 0]]
    assert plan.prefetches.tolist() == [[1, 0], [1, 4], [0, 2], [0, 1], [0, 3]]
    assert plan.prefetch_priority.tolist() == [[1, -1.25], [1, -0.5], [2, -1.25], [2, -1], [2, -0.25]]
    assert plan.clear_prefetches
    assert (plan.transfers.tolist(), plan.on_cpu.tolist(), plan.retained.any()) == ([0], [], False)
    # at layer 1, layer 0 comes first; what is there or coming is left out, and what is promoted stays
    plan, _ = ask(policy_for(TABLE, shape), shape, [3, 5], 6, layer=1, resident=[(0, 1)], in_flight=[(1, 0)])
    assert plan.prefetches.tolist() == [[0, 2], [0, 3], [1, 4]]
    assert np.flatnonzero(plan.retained).tolist() == plan.transfers.tolist() == [0]


def test_an_unknown_token_is_an_average_one():
    shape = shape_of(2, 6)
    for token in (0, 4, 9):
        plan, state = ask(policy_for(TABLE, shape), shape, [3, token], 6)
        assert plan.prefetches.tolist() == [[1, 5], [1, 4], [1, 0], [0, 1], [0, 4], [0, 2]]
        assert state.score[0].tolist() == [0, 1, 0.5, 0, 1, 0]


@pytest.mark.parametrize(
    ("over", "first", "second"), [("topC", [2, 1], [0]), ("fifo", [2, 3], [0])]
)  # in the order of tokens 1, 2, 3 come for layer 0, and 4, 0
def test_of_more_than_fits_some_are_placed(over, first, second):
    shape = shape_of(2, 6)
    _, state = ask(policy_for(TABLE, shape, sida_over=over), shape, [3, 5], 3)
    assert [[e for e in row if e >= 0] for row in state.order.tolist()] == [first, second]
    outside = state.score == 0
    assert outside.sum() == 9
    assert not outside[0, first].any()


class Plain:
    """What sida must do, in dicts and deques; checks every answer of the policy in the engine."""

    def __init__(self, policy, unit, over, table, top_k):
        self.policy, self.unit, self.over, self.table, self.top_k = policy, unit, over, table, top_k
        self.requests, self.sets = set(), None
        self.row_of = {token: row for row, token in enumerate(table.token_ids.tolist())}

    def row(self, token, layer):
        """Experts that the token lists with their shares, and its rest for a token of load."""
        load, row = self.table.load[layer], self.row_of.get(token)
        if row is None:
            return [], self.top_k / max(load.sum(), 1)
        pairs = zip(self.table.token_experts[row, layer].tolist(), self.table.token_shares[row, layer], strict=True)
        pairs = [(expert, share) for expert, share in pairs if expert >= 0]
        others = load.sum() - sum(load[expert] for expert, _ in pairs)
        if len(pairs) < self.table.token_experts.shape[2] or others == 0:
            return pairs, 0.0
        return pairs, max(self.top_k - self.table.token_shares[row, layer].sum(), 0.0) / others

    def predict(self, tokens, capacity):
        self.sets = []
        for layer, slots in enumerate(capacity.tolist()):
            rows, queue = [self.row(token, layer) for token in tokens], deque()
            load, rest = self.table.load[layer], 0.0
            for _, share in rows:
                rest += share
            sums = dict(enumerate((rest * load).tolist()))
            for pairs, share_of_load in rows:
                for expert, share in pairs:
                    sums[expert] += share - share_of_load * load[expert]
                    if expert not in queue:
                        queue.append(expert)
                        if len(queue) > slots:
                            queue.popleft()
            ranked = sorted((e for e in sums if sums[e] > 0), key=lambda e: (-sums[e], e))
            kept = ranked[:slots]
            if self.over == "fifo":
                others = [expert for expert in ranked if expert not in queue][: slots - len(queue)]
                kept = [expert for expert in ranked if expert in queue or expert in others]
            self.sets.append({expert: sums[expert] for expert in kept})

    def decide(self, params, state, step, view):
        layer, num_layers = step.layer, len(view.resident)
        if layer == 0:
            requests = set(step.request.tolist())
            is_new = bool(requests - self.requests)
            if self.unit == "iter" or is_new or (self.unit == "block" and (step.iteration == 0).any()):
                self.predict(step.signals.token_ids.tolist(), view.capacity)
            self.requests = requests
        resident, flying = view.resident[layer], view.in_flight[layer]
        missed = (step.load > 0) & ~resident
        expected = []
        for ahead in range(1, num_layers + 1):
            target = (layer + ahead) % num_layers
            for expert, share in self.sets[target].items():
                if not view.resident[target, expert] and not view.in_flight[target, expert]:
                    expected.append([target, expert, ahead, -share])

        plan = self.policy.decide(params, state, step, view)
        assert plan.transfers.tolist() == np.flatnonzero(missed).tolist()
        assert plan.on_cpu.size == 0
        assert (plan.retained == (resident | missed & flying)).all()
        assert np.hstack([plan.prefetches, plan.prefetch_priority]).tolist() == expected
        scores = {(row, expert): value for (row, expert), value in np.ndenumerate(state.score) if value}
        assert scores == {(row, expert): v for row, one in enumerate(self.sets) for expert, v in one.items()}
        assert (plan.clear_prefetches, plan.prefetch_delay_ns) == (True, 0)
        return plan


@given(
    traces(), st.sampled_from(UNITS), st.sampled_from(OVERFLOWS), st.sampled_from([0.0, 3.0, 40.0, 170.0]), st.data()
)
@settings(max_examples=50, deadline=None)
def test_equals_the_plain_policy_and_loses_no_prefetch(trace, unit, over, copy_ns, data):
    shape, passes = trace
    passes = [change(item, token_ids_in=item.token_ids_in % 7) for item in passes]  # so that most are known
    capacity = data.draw(st.integers(1, shape.num_experts))
    table, width = context_of(shape, passes).calibration, data.draw(st.integers(1, shape.num_experts), label="width")
    table = replace(table, token_experts=table.token_experts[..., :width], token_shares=table.token_shares[..., :width])
    policy = policy_for(table, shape, sida_unit=unit, sida_over=over)
    checked = replace(policy, decide=Plain(policy, unit, over, table, shape.top_k).decide)
    rows = rows_of(checked, shape, passes, capacity, h2d_latency_ns=copy_ns)
    total = sum(row[f"prefetch_{fate}"] for row in rows for fate in FATES)
    issued = sum(row["prefetch_issued"] for row in rows)
    assert 0 <= issued - total <= rows[-1]["prefetch_issued"]  # what the last gate queued may never start
    for row in rows:
        assert len(row["hits"]) + len(row["transfers"]) == row["num_activated"]
        assert row["num_resident"] <= capacity


@given(traces(), st.sampled_from(UNITS), st.data())
@settings(max_examples=25, deadline=None)
def test_residents_stay_once_the_set_has_landed(trace, unit, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    policy = built("sida", {"sida_unit": unit}, shape, passes)
    landed = {}  # what a layer held when all its set was there

    def decide(params, state, step, view):
        before = state.score.copy()
        plan = policy.decide(params, state, step, view)
        layer = step.layer
        if (state.score != before).any():
            landed.clear()
        if not (plan.prefetches[:, 0] == layer).any() and not view.in_flight[layer].any():
            resident = view.resident[layer].copy()
            assert (landed.setdefault(layer, resident) == resident).all()
            assert (plan.retained == resident).all()
        else:
            assert layer not in landed
        return plan

    rows_of(replace(policy, decide=decide), shape, passes, capacity)


@given(traces(), st.sampled_from(UNITS), st.sampled_from([0.0, 3.0, 60.0]), st.data())
@settings(max_examples=25, deadline=None)
def test_a_predictor_that_never_errs_has_no_misses_once_the_set_has_landed(trace, unit, copy_ns, data):
    shape, passes = trace
    rows = true_rows(passes, shape, UNITS.index(unit), 0.0, 0)
    capacity = data.draw(st.integers(int(np.diff(rows.offsets).max()), shape.num_experts))
    is_first = begun(unit, passes, shape)
    policy = built("sida", {"sida_unit": unit, "oracle_noise": 0.0}, shape, passes)
    num_landed = 0

    def decide(params, state, step, view):
        nonlocal num_landed
        plan = policy.decide(params, state, step, view)
        if (view.resident | (state.score == 0))[step.layer].all():
            num_landed += 1
            assert plan.transfers.size == 0
        if copy_ns == 0 and (step.layer > 0 or not is_first[step.forward]):
            assert plan.transfers.size == 0
        return plan

    rows_of(replace(policy, decide=decide), shape, passes, capacity, h2d_latency_ns=copy_ns)
    assert num_landed > 0 or copy_ns > 0 or shape.num_layers == 1


@pytest.mark.parametrize("unit", UNITS)
def test_the_sets_depend_on_input_tokens_alone(unit):
    shape, passes = random_passes(np.random.default_rng(5), num_requests=3, batch=2)
    other = [change(item, expert_ids=15 - item.expert_ids[..., ::-1]) for item in passes]
    cut = 6
    other[cut:] = [change(item, token_ids_in=item.token_ids_in[::-1]) for item in other[cut:]]
    context = context_of(shape, passes)
    seen = []
    for trace in (passes, other):
        policy, scores = build_policy("sida", {"sida_unit": unit}, context), []

        def decide(params, state, step, view, policy=policy, scores=scores):
            plan = policy.decide(params, state, step, view)
            scores.append(state.score.tolist())
            return plan

        rows_of(replace(policy, decide=decide), shape, trace, 6)
        seen.append(scores[: cut * shape.num_layers])
    assert seen[0] == seen[1]


def test_more_noise_hits_less():
    shape, passes = random_passes(np.random.default_rng(8), num_layers=4, num_experts=32, num_requests=3)
    hits = []
    for noise in (0.0, 0.5, 1.0):
        policy = built("sida", {"sida_unit": "block", "oracle_noise": noise}, shape, passes)
        assert policy.clairvoyant
        hits.append(sum(len(row["hits"]) for row in rows_of(policy, shape, passes, 12, h2d_latency_ns=1.0)))
    assert hits[0] > hits[1] > hits[2]


# In time: N 100 to a gate, copies 50, kernels 20


def test_the_set_lands_beside_the_layers():
    # layer 0 misses 0 (copy 100 to 150, not admitted), then 1 comes for layer 1 (150 to 200) and 2 for layer 0 (250)
    shape = shape_of(2, 6)
    table = table_of({0: [[(2, 1.0)], [(1, 1.0)]]}, [[1] * 6] * 2)
    passes = [pass_of(np.array([[[0]], [[1]]])), pass_of(np.array([[[2]], [[1]]]), 1, iterations=(1,))]
    rows = rows_of(policy_for(table, shape), shape, passes, 1)
    assert [(row["hits"], row["transfers"], row["num_resident"], row["end_ns"]) for row in rows] == [
        ([], [0], 0, 170),
        ([1], [], 1, 290),
        ([2], [], 1, 410),
        ([1], [], 1, 530),
    ]
    assert [row["prefetch_issued"] for row in rows] == [2, 0, 0, 0]
    assert rows[0]["retained"] == []


@pytest.mark.parametrize("unit", UNITS)
def test_laws_hold_on_the_shipped_trace(unit):
    reader = TraceReader(find_trace("proxy-tiny"))
    shape = reader.metadata.shape
    context, _ = calibration.context_of(reader, 1)
    policy = build_policy("sida", {"sida_unit": unit}, context)
    assert not policy.warnings
    passes = [item for item in reader.passes() if item.requests[0] < 3]
    rows = rows_of(policy, shape, passes, 16)
    copies = sum(row["link_busy_ns"] for row in rows) // 50
    assert copies == sum(len(row["transfers"]) - row["num_promoted"] + row["prefetch_landed"] for row in rows)
    assert sum(row["prefetch_landed"] for row in rows) > 0
    assert sum(len(row["hits"]) for row in rows) > 0
    for row in rows:
        assert len(row["hits"]) + len(row["transfers"]) == row["num_activated"]
        assert not row["on_cpu"]


def test_what_it_is_built_from():
    shape, passes = random_passes(np.random.default_rng(0))
    policy = built("sida", {}, shape, passes)
    assert (policy.prefetches, policy.reads_signals, policy.clairvoyant) == (True, True, False)
    with pytest.raises(PolicyError, match="sida needs calibration, and there is none"):
        build_policy("sida", {}, Context(shape))
    with pytest.raises(PolicyError, match="sida needs the passes of the run, and there are none"):
        build_policy("sida", {"oracle_noise": 0.0}, Context(shape))
    assert built("sida", {"oracle_noise": 0.0}, shape, passes).warnings == (
        "oracle_noise=0.0 predicts from the run itself, which no running system can",
    )
    unknown = policy_for(table_of({}, [[1] * 16] * 3), shape)
    assert unknown.warnings == ("calibration knows no input token: all are predicted as average ones",)
    shorter = built("sida", {"oracle_noise": 0.0, "sida_unit": "iter"}, shape, passes[:-1])
    with pytest.raises(PolicyError, match="a clairvoyant policy ran on more forwards than it was built from"):
        rows_of(shorter, shape, passes, 6)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"sida_unit": "forward"}, "sida_unit 'forward': allowed are request, block, iter"),
        ({"sida_over": "lru"}, "sida_over 'lru': allowed are topC, fifo"),
        ({"oracle_noise": -0.1}, "oracle_noise is -0.1: must be from 0 to 1, or null for the token table"),
        ({"oracle_noise": 1.5}, "oracle_noise is 1.5: must be from 0 to 1"),
    ],
)
def test_knobs_that_are_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        Knobs(**knobs)
