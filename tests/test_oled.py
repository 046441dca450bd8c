import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, answers, built, context_of, hits_of, lru_residents, pass_of, run, sets_of, shape_of
from reference_oled import PlainOled, priorities
from strategies import change, random_passes, traces

from policies.contract import Context, PolicyError
from policies.lru import ORDERS
from policies.oled import Knobs, build, missed_load
from policies.registry import build_policy
from policies.residents import Residents
from policies.steps import Steps, end_of, step_at

OFF = {"priority": False, "layer_adapt": False, "coop": False}


def plain_of(shape, passes, slots_per_layer, **fields):
    """The plain OLED-MoE that was calibrated on its own trace, as `built` does."""
    decode = [pass_ for pass_ in passes if not pass_.is_prefill]
    tokens = sum(pass_.expert_ids.size for pass_ in decode)
    experts = sum(len(activated) for layer in range(shape.num_layers) for activated in sets_of(decode, layer))
    fields = {"nbar": tokens / experts, "average": (tokens, experts)} | fields
    return PlainOled(shape, slots_per_layer, ESTIMATES, **fields)


def plainly(shape, passes, slots_per_layer, **fields):
    return list(plain_of(shape, passes, slots_per_layer, **fields).run(passes))


def found(shape, passes, slots_per_layer, **knobs):
    """The decisions of the policy in the form of the plain one: ids instead of masks."""
    return [
        (
            decision.step.forward,
            decision.step.layer,
            decision.capacity,
            np.flatnonzero(decision.resident).tolist(),
            decision.plan.transfers.tolist(),
            decision.plan.on_cpu.tolist(),
            np.flatnonzero(decision.plan.retained).tolist(),
        )
        for decision in run("oled", knobs, shape, passes, slots_per_layer)
    ]


def draw_slots(data, shape):
    return data.draw(st.integers(shape.top_k, shape.num_experts), label="slots per layer")


# Every decision


@pytest.mark.parametrize(
    ("knobs", "fields"),
    [
        ({}, {}),
        ({"resize_every": 1}, {"resize_every": 1}),
        ({"coop": False}, {"coop": False}),
        ({"layer_adapt": False}, {"layer_adapt": False}),
        ({"priority": False, "resize_every": 2}, {"signal": "order", "resize_every": 2}),
        ({"priority": False, "layer_adapt": False}, {"signal": "order", "layer_adapt": False}),
        ({"priority": False, "coop": False}, {"signal": "order", "coop": False}),
        ({"priority_signal": "load"}, {"signal": "load"}),
        ({"priority_signal": "gate", "tie": "id"}, {"signal": "gate", "tie": "id"}),
        ({"resize_every": 2, "c_min": 1}, {"resize_every": 2, "c_min": 1}),
        ({"resize_every": 2, "prefill_updates": True}, {"resize_every": 2, "prefill_updates": True}),
        ({"resize_every": 1, "resize": "lazy"}, {"resize_every": 1, "lazy": True}),
        ({"conf_mode": "end_iter", "resize_every": 1}, {"conf_mode": "end_iter", "resize_every": 1}),
        ({"conf_mode": "same_iter_oracle"}, {"conf_mode": "same_iter_oracle"}),
        ({"nbar_online": True}, {"online": "activated"}),
    ],
    ids=str,
)
@settings(max_examples=6)
@given(traces(), st.data())
def test_equals_the_plain_policy(knobs, fields, trace, data):
    shape, passes = trace
    slots = draw_slots(data, shape)
    assert found(shape, passes, slots, **knobs) == plainly(shape, passes, slots, **fields)


@pytest.mark.parametrize("fields", [{}, {"conf_mode": "end_iter", "resize_every": 1}], ids=str)
@settings(max_examples=5)
@given(traces(signals=True), st.data())
def test_raw_gates_are_the_sigmoids_of_the_chosen(fields, trace, data):
    shape, passes = trace
    slots = draw_slots(data, shape)
    raw = []
    for pass_ in passes:
        is_it = pass_.expert_ids[..., None] == pass_.signals.score_ids[:, :, None, :]
        raw.append(change(pass_, gates=(pass_.signals.scores[:, :, None, :] * is_it).sum(axis=-1)))
    assert found(shape, passes, slots, gate_kind="raw", **fields) == plainly(shape, raw, slots, **fields)


@given(traces(), st.integers(0, 3))
@settings(max_examples=6)
def test_only_the_best_so_many_transfers_enter(trace, limit):
    shape, passes = trace
    for decision in run("oled", {"max_admit": limit, "layer_adapt": False}, shape, passes, shape.top_k):
        step, plan = decision.step, decision.plan
        p = priorities(step.expert_ids.tolist(), step.gates.tolist(), step.confidence.tolist())
        entering = sorted(plan.transfers.tolist(), key=lambda e: (-p[e], e))[:limit]
        assert set(np.flatnonzero(plan.retained & ~decision.resident)) <= set(entering)
        held = decision.resident.sum() + len(entering)
        assert plan.retained.sum() == min(held, decision.capacity)


@pytest.mark.parametrize("online", [False, True])
def test_average_over_missed_experts(online):
    shape, passes = random_passes(np.random.default_rng(5), block_length=8)
    average = missed_load(passes, shape, 5 * shape.num_layers)
    fields = {"nbar": average[0] / average[1], "average": average, "online": "missed" if online else ""}
    assert found(shape, passes, 5, nbar="missed", nbar_online=online) == plainly(shape, passes, 5, **fields)
    policy = built("oled", {"nbar": "missed", "nbar_online": online}, shape, passes)
    state, _, _ = policy.init(policy.params, shape, 5 * shape.num_layers)
    assert state.average.tolist() == list(average)


def test_missed_load_counts_what_lru_misses_in_decode():
    shape, passes = random_passes(np.random.default_rng(8))
    tokens = experts = 0
    for layer in range(shape.num_layers):
        for pass_, resident in zip(passes, lru_residents(sets_of(passes, layer), 6), strict=True):
            if not pass_.is_prefill:
                missed = [e for e in pass_.expert_ids[layer].ravel().tolist() if e not in resident]
                tokens += len(missed)
                experts += len(set(missed))
    assert missed_load(passes, shape, 6 * shape.num_layers) == (tokens, experts)
    with pytest.raises(PolicyError, match="misses nothing"):
        missed_load(passes[:1], shape, 6 * shape.num_layers)


# Parts


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=5)
@given(traces(), st.data())
def test_without_parts_it_is_lru(order, trace, data):
    shape, passes = trace
    slots = data.draw(st.integers(1, shape.num_experts))
    lru = answers(run("lru", {"lru_order": order}, shape, passes, slots))
    assert answers(run("oled", {**OFF, "lru_order": order}, shape, passes, slots)) == lru
    ordered = {**OFF, "priority": True, "priority_signal": "order", "lru_order": order}
    assert answers(run("oled", ordered, shape, passes, slots)) == lru


def test_without_parts_it_has_the_hits_of_lru():
    batches = [{1, 2, 3}, {1, 2, 4}, {1, 3}, {2, 3}]
    passes = [pass_of(np.array([sorted(batch)])[..., None], i, iterations=[i]) for i, batch in enumerate(batches)]
    decisions = run("oled", OFF, shape_of(1, 5), passes, 2)
    hits = [len(decision.hits) for decision in decisions]
    assert hits == hits_of(batches, lru_residents(batches, 2)) == [0, 1, 1, 1]


@settings(max_examples=6)
@given(traces(), st.data())
def test_sure_tokens_make_confidence_the_gate_and_equal_gates_the_load(trace, data):
    shape, passes = trace
    slots = draw_slots(data, shape)
    sure = [change(p, p_argmax=np.ones_like(p.p_argmax), p_current=np.ones_like(p.p_current)) for p in passes]
    even = [change(p, gates=np.full(p.gates.shape, 1 / shape.top_k)) for p in sure]
    assert found(shape, sure, slots) == found(shape, sure, slots, priority_signal="gate")
    assert found(shape, even, slots) == found(shape, even, slots, priority_signal="load")


def test_misses_is_another_name_for_coop():
    assert (Knobs().coop, Knobs(misses="oled").coop, Knobs(misses="h2d").coop) == (True, True, False)
    shape, passes = random_passes(np.random.default_rng(2))
    for knobs, misses in (({}, "oled"), ({"misses": "h2d"}, "h2d"), ({"coop": False}, "h2d")):
        policy = built("oled", knobs, shape, passes)
        assert (policy.misses, policy.reads_estimates) == (misses, misses == "oled")
    assert found(shape, passes, 6, misses="h2d") == found(shape, passes, 6, coop=False)


# Retention


@settings(max_examples=8)
@given(traces(), st.data())
def test_what_is_retained(trace, data):
    shape, passes = trace
    slots = draw_slots(data, shape)
    for _, _, capacity, resident, transfers, on_cpu, retained in found(shape, passes, slots, resize_every=2):
        held = set(resident) | set(transfers)
        assert set(retained) <= held
        assert len(retained) == min(capacity, len(held))
        assert not set(retained) & set(on_cpu)


def test_confident_tokens_keep_their_experts():
    # two tokens with an expert each; after the first forward the second token is the sure one
    passes = [
        pass_of(np.array([[[0], [1]]]), i, iterations=[i], p_argmax=np.array([0.2, 0.9]), p_current=np.full(2, np.nan))
        for i in range(2)
    ]
    alone = {**OFF, "priority": True}
    decisions = found(shape_of(1, 4), passes, 1, **alone)
    assert [decision[-1] for decision in decisions] == [[0], [1]]  # all tokens are equal at first: the lower id
    assert decisions[1][4] == [1]
    assert [d[-1] for d in found(shape_of(1, 4), passes, 1, **alone, priority_signal="gate")] == [[0], [0]]


def test_of_what_is_not_activated_the_last_activated_stays():
    batches = [{3}, {1}, {2}, {0}]
    passes = [pass_of(np.array([sorted(batch)])[..., None], i, iterations=[i]) for i, batch in enumerate(batches)]
    alone = {**OFF, "priority": True}
    assert found(shape_of(1, 4), passes, 3, **alone)[-1][-1] == [0, 1, 2]
    assert found(shape_of(1, 4), passes, 2, **alone)[-1][-1] == [0, 2]
    assert found(shape_of(1, 4), passes, 2, **alone, tie="id")[-1][-1] == [0, 1]


def test_prefill_copies_every_miss():
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3)
    decisions = found(shape, passes, 6)
    prefill = {index for index, pass_ in enumerate(passes) if pass_.is_prefill}
    assert len(prefill) == 3
    assert all(not on_cpu for forward, *_, on_cpu, _ in decisions if forward in prefill)
    assert any(on_cpu for *_, on_cpu, _ in decisions)


# Layers


def capacities(decisions, num_layers):
    rows = [decision[2] for decision in decisions]
    return [rows[i : i + num_layers] for i in range(0, len(rows), num_layers)]


def test_slots_are_divided_after_every_fifth_decode_forward():
    shape, passes = random_passes(np.random.default_rng(4), num_requests=3, num_blocks=3)
    sizes = capacities(found(shape, passes, 6), shape.num_layers)
    num_decoded, changed = 0, []
    for before, after, pass_ in zip(sizes, sizes[1:], passes, strict=False):
        num_decoded += not pass_.is_prefill
        assert before == after or (num_decoded % 5 == 0 and not pass_.is_prefill)
        changed += [num_decoded] if before != after else []
    assert sizes[0] == [6, 6, 6]
    assert len(changed) >= 3
    assert all(sum(row) == 18 and min(row) >= shape.top_k for row in sizes)


@pytest.mark.parametrize("resize", ["boundary", "lazy"])
def test_residents_never_exceed_all_slots_and_growth_stays_empty(resize):
    shape, passes = random_passes(np.random.default_rng(4), num_requests=3, num_blocks=3)
    policy = built("oled", {"resize": resize, "resize_every": 1}, shape, passes)
    residents, steps = Residents(policy, shape, 18, ESTIMATES), Steps(shape)
    num_shrunk = 0
    for pass_ in passes:
        forward = steps.read(pass_)
        for layer in range(shape.num_layers):
            gate = residents.resident[layer].copy()
            residents.settle(layer, gate, residents.decide(step_at(forward, layer)))
            assert residents.resident.sum() <= 18
        before, sizes = residents.resident.copy(), residents.capacity.copy()
        residents.boundary(end_of(forward))
        left = (before & ~residents.resident).sum(axis=1)
        assert not (residents.resident & ~before).any()
        assert not left[residents.capacity >= sizes].any()
        assert (residents.resident.sum(axis=1) <= residents.capacity).all()
        num_shrunk += left.any()
    assert (num_shrunk > 0) == (resize == "boundary")


def test_without_any_use_the_slots_stay():
    passes = [pass_of(np.array([[[i]], [[i]]]), i, iterations=[i]) for i in range(8)]
    sizes = capacities(found(shape_of(2, 8), passes, 2, resize_every=1), 2)
    assert sizes == [[2, 2]] * 8  # nothing is ever hit


def test_used_layers_gain_slots():
    # layer 0 activates the same two experts in every forward, layer 1 other ones each time
    passes = [pass_of(np.array([[[0], [1]], [[2 * i], [2 * i + 1]]]), i, iterations=[i]) for i in range(6)]
    sizes = capacities(found(shape_of(2, 12), passes, 4), 2)
    assert sizes == [[4, 4]] * 5 + [[7, 1]]


def test_shrinking_takes_the_lowest_priority():
    shape = shape_of(2, 12)
    passes = [pass_of(np.array([[[0], [1], [2]], [[3 * (i % 2)], [3], [3]]]), i, iterations=[i]) for i in range(5)]
    policy = built("oled", {"coop": False, "resize_every": 5}, shape, passes)
    residents, steps = Residents(policy, shape, 6, ESTIMATES), Steps(shape)
    for pass_ in passes:
        forward = steps.read(pass_)
        for layer in range(2):
            gate = residents.resident[layer].copy()
            residents.settle(layer, gate, residents.decide(step_at(forward, layer)))
        residents.boundary(end_of(forward))
    # three experts, all of them used, against one or two: layer 1 keeps the expert that most tokens have
    assert residents.capacity.tolist() == [5, 1]
    assert np.flatnonzero(residents.resident[1]).tolist() == [3]


# Confidence


@settings(max_examples=8)
@given(traces(), st.data())
def test_confidences_of_a_forward_never_reach_its_own_gates(trace, data):
    shape, passes = trace
    slots = draw_slots(data, shape)
    mode = data.draw(st.sampled_from(["lag1", "end_iter"]))
    forward = data.draw(st.integers(0, len(passes) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    other = passes[:forward] + [
        change(pass_, p_argmax=rng.random(pass_.positions.size), p_current=rng.random(pass_.positions.size))
        for pass_ in passes[forward:]
    ]
    known = (forward + 1) * shape.num_layers
    knobs = {"conf_mode": mode, "resize_every": 1}
    assert found(shape, other, slots, **knobs)[:known] == found(shape, passes, slots, **knobs)[:known]


def test_each_reading_of_confidence_decides_otherwise():
    shape, passes = random_passes(np.random.default_rng(17), num_requests=3, block_length=8)
    readings = [
        {},
        {"conf_mode": "end_iter"},
        {"conf_mode": "same_iter_oracle"},
        {"conf_decoded": "one"},
        {"conf_decoded": "at_accept"},
        {"conf_flip_scale": 0.25},
    ]
    runs = [found(shape, passes, 6, resize_every=1, **knobs) for knobs in readings]
    assert all(one != two for i, one in enumerate(runs) for two in runs[:i])


def test_readings_of_the_trace_are_said_to_be():
    shape, passes = random_passes(np.random.default_rng(17))
    assert not built("oled", {"conf_mode": "end_iter"}, shape, passes).clairvoyant
    for knobs in ({"conf_decoded": "one"}, {"conf_flip_scale": 0.5}):
        assert built("oled", knobs, shape, passes).clairvoyant
    oracle = built("oled", {"conf_mode": "same_iter_oracle"}, shape, passes)
    assert oracle.clairvoyant
    assert any("no running system" in warning for warning in oracle.warnings)


def test_end_iter_says_when_it_cannot_act():
    shape, passes = random_passes(np.random.default_rng(17))
    for knobs in ({"layer_adapt": False}, {"resize": "lazy"}, {"priority_signal": "gate"}):
        idle = {**knobs, "conf_mode": "end_iter"}
        assert any("decides as lag1" in warning for warning in built("oled", idle, shape, passes).warnings)
        assert found(shape, passes, 6, **idle) == found(shape, passes, 6, **knobs)
    assert not built("oled", {"conf_mode": "end_iter"}, shape, passes).warnings
    with pytest.raises(PolicyError, match="end_iter_tokens"):
        run("oled", {"conf_mode": "end_iter", "end_iter_tokens": 3}, shape, passes, 6)


def test_unknown_confidence_matters_only_to_priorities():
    shape, passes = random_passes(np.random.default_rng(1))
    blind = [change(pass_, p_argmax=np.full_like(pass_.p_argmax, np.nan)) for pass_ in passes]
    assert found(shape, blind, 6, **OFF) == found(shape, passes, 6, **OFF)
    with pytest.raises(PolicyError, match="does not know the confidence"):
        run("oled", {}, shape, blind, 6)


# Refusals


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"misses": "cpu"}, "misses=cpu needs residents at the start"),
        ({"misses": "gpu"}, "misses 'gpu': allowed are oled, h2d"),
        ({"misses": "oled", "coop": False}, "contradicts coop=false"),
        ({"priority_signal": "lru"}, "priority_signal 'lru': allowed are order, load, gate, confidence"),
        ({"lru_order": "last"}, "lru_order 'last': allowed are hits_first"),
        ({"tie": "load"}, "tie 'load': allowed are recent, id"),
        ({"conf_mode": "now"}, "conf_mode 'now': allowed are lag1, end_iter, same_iter_oracle"),
        ({"conf_decoded": "zero"}, "conf_decoded 'zero': allowed are prob, one, at_accept"),
        ({"conf_mode": "end_iter", "conf_decoded": "one"}, "end_iter .* needs conf_decoded=prob"),
        ({"conf_flip_scale": -1.0}, "conf_flip_scale is -1.0"),
        ({"gate_kind": "sigmoid"}, "gate_kind 'sigmoid': allowed are normalised, raw"),
        ({"max_admit": -1}, "max_admit is -1: must be at least 0, or null for no limit"),
        ({"nbar": "lru"}, "nbar 'lru': allowed are calibration, missed"),
        ({"smooth": "mean"}, "smooth 'mean': allowed are ema, window5"),
        ({"resize": "now"}, "resize 'now': allowed are boundary, lazy"),
        ({"ema": 0.0}, "ema is 0.0: must be above 0 and at most 1"),
        ({"resize_every": 0}, "resize_every is 0: must be at least 1"),
        ({"kappa": -1.0}, "kappa is -1.0"),
    ],
)
def test_impossible_knobs_are_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        Knobs(**knobs)


def test_what_cannot_be_built_or_begun():
    shape, passes = random_passes(np.random.default_rng(1))
    with pytest.raises(PolicyError, match=r"^oled needs calibration, and there is none"):
        build_policy("oled", {}, Context(shape))
    with pytest.raises(
        PolicyError, match=r"oled: nbar=missed needs the passes that it calibrates from, .*calibration=warmup"
    ):
        built("oled", {"nbar": "missed"}, shape, passes, []).init(None, shape, 12)
    assert build(Knobs(coop=False), Context(shape)).misses == "h2d"
    with pytest.raises(PolicyError, match=r"^oled: gate_kind=raw needs scores .*: proxy-19x256-signals has them"):
        build(Knobs(gate_kind="raw"), context_of(shape, passes))
    with pytest.raises(PolicyError, match="c_min is 17: allowed are 1 to 16"):
        build(Knobs(c_min=17), context_of(shape, passes))
    with pytest.raises(PolicyError, match="there are no passes"):
        build(Knobs(conf_mode="same_iter_oracle"), context_of(shape, [], passes))
    with pytest.raises(PolicyError, match="9 slots for 3 layers: layer_adapt with c_min=4 needs 12"):
        run("oled", {}, shape, passes, 3)
    assert run("oled", {"layer_adapt": False}, shape, passes, 3)
    assert run("oled", {"c_min": 1}, shape, passes, 3)
