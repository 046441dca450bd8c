"""What the variants of policies without prefetch must keep to, decided without a clock, on traces of every form."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, answers, built, hits_per_execution, run, sets_of
from strategies import change, random_passes, traces

from policies.driver import drive
from policies.lru import ORDERS
from policies.registry import POLICIES
from tracer.schema import ForwardKind

OFF = {"priority": False, "layer_adapt": False, "coop": False}
VARIANTS = [
    ("full", {}),
    ("ondemand", {}),
    *(("lru", {"lru_order": order}) for order in ORDERS),
    ("lru", {"misses": "oled"}),
    ("lru", {"misses": "oled", "lru_order": "gate"}),
    ("lfu", {}),
    ("lfu", {"lfu_inc": "n_e"}),
    ("lfu", {"misses": "oled", "max_admit": 3}),
    ("lfu", {"pool": "global", "lfu_decay": 0.5}),
    ("prev_set", {}),
    ("oled", {}),
    ("oled", OFF),
    *(("oled", {**OFF, part: True}) for part in OFF),
    *(("oled", {"priority_signal": signal}) for signal in ("order", "load", "gate")),
    ("oled", {"conf_mode": "end_iter", "resize_every": 2}),
    ("oled", {"conf_mode": "same_iter_oracle"}),
    ("oled", {"conf_decoded": "one"}),
    ("oled", {"conf_decoded": "at_accept"}),
    ("oled", {"conf_flip_scale": 0.25}),
    ("oled", {"resize": "lazy", "resize_every": 1}),
    ("oled", {"smooth": "window5", "allow_move": True, "drift": 2}),
    ("ideal_free", {"misses": "h2d"}),
    ("ideal_free", {}),
    ("ideal_min", {"misses": "h2d"}),
    ("ideal_min", {}),
    ("ideal_min_global", {"misses": "h2d"}),
    ("ideal_min_global", {}),
]


def foresees(name, knobs):
    """Whether a policy's decisions may depend on what comes later in the run."""
    return name.startswith("ideal_min") or knobs.get("conf_mode") == "same_iter_oracle"


def each(variants):
    names = [" ".join([name, *(f"{k}={v}" for k, v in knobs.items())]) for name, knobs in variants]
    return pytest.mark.parametrize(("name", "knobs"), variants, ids=names)


each_policy = each(VARIANTS)


def draw_capacity(data, shape, name):
    # layer_adapt needs what one token activates in every layer
    return data.draw(st.integers(shape.top_k if name == "oled" else 1, shape.num_experts), label="slots per layer")


def decided(policy, shape, passes, capacity):
    return list(drive(policy, passes, shape, capacity * shape.num_layers, ESTIMATES))


def arrays_of(pass_):
    return {key: value for key, value in vars(pass_).items() if isinstance(value, np.ndarray)}


def test_numba_can_tell_the_records_of_policies_apart():
    shape, passes = random_passes(np.random.default_rng(0), signals=True)
    classes: dict[str, set[type]] = {}
    for name in POLICIES:
        policy = built(name, {}, shape, passes)
        for record in (policy.params, policy.init(policy.params, shape, 4 * shape.num_layers)[0]):
            classes.setdefault(numba.typeof(record).name, set()).add(type(record))
    assert {name for name, types in classes.items() if len(types) > 1} == set()


@each_policy
@settings(max_examples=4)
@given(traces(), st.data())
def test_plans_are_accepted_and_add_up(name, knobs, trace, data):
    shape, passes = trace
    before = [{key: array.copy() for key, array in arrays_of(pass_).items()} for pass_ in passes]
    policy = built(name, knobs, shape, passes)
    capacity = draw_capacity(data, shape, name)
    decisions = decided(policy, shape, passes, capacity)
    assert answers(decisions) == answers(decided(policy, shape, passes, capacity))
    assert len(decisions) == len(passes) * shape.num_layers
    for decision in decisions:
        step, plan = decision.step, decision.plan
        if policy.misses == "h2d" or step.kind == ForwardKind.PREFILL:
            assert len(plan.on_cpu) == 0
        served = [*decision.hits.tolist(), *plan.transfers.tolist(), *plan.on_cpu.tolist()]
        assert sorted(served) == np.flatnonzero(step.load).tolist()
        assert max(decision.resident.sum(), plan.retained.sum()) <= decision.capacity
        assert plan.on_cpu.tolist() == sorted(plan.on_cpu.tolist())
    if policy.sized and policy.pool == "layer":
        for forward in range(len(passes)):
            of_forward = decisions[forward * shape.num_layers : (forward + 1) * shape.num_layers]
            assert sum(decision.capacity for decision in of_forward) == capacity * shape.num_layers
    for pass_, copies in zip(passes, before, strict=True):
        for key, array in arrays_of(pass_).items():
            assert np.array_equal(array, copies[key], equal_nan=array.dtype.kind == "f")
    # one compilation serves every trace, since all arrays are of one kind; what is None makes another
    for function in filter(None, (policy.decide, policy.boundary, policy.place)):
        kinds = [("StepSignals" in str(types), "Readings" in str(types)) for types in function.signatures]
        assert len(kinds) == len(set(kinds))


@each_policy
def test_split_misses_are_all_copied_in_prefill(name, knobs):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3)
    num_on_cpu = dict.fromkeys((True, False), 0)
    for decision in run(name, knobs, shape, passes, 6):
        num_on_cpu[decision.pass_.is_prefill] += len(decision.plan.on_cpu)
    assert num_on_cpu[True] == 0
    assert (num_on_cpu[False] > 0) == (built(name, knobs, shape, passes).misses == "oled")


@each_policy
def test_what_is_built_from_the_run_says_so(name, knobs):
    shape, passes = random_passes(np.random.default_rng(3))
    reads_trace = foresees(name, knobs) or bool({"conf_decoded", "conf_flip_scale"} & knobs.keys())
    assert built(name, knobs, shape, passes).clairvoyant == reads_trace


@each([variant for variant in VARIANTS if not foresees(*variant)])
@settings(max_examples=6)
@given(traces(), st.data())
def test_nothing_is_known_of_what_comes_after_a_gate(name, knobs, trace, data):
    shape, passes = trace
    capacity = draw_capacity(data, shape, name)
    forward = data.draw(st.integers(0, len(passes) - 1), label="forward")
    layer = data.draw(st.integers(0, shape.num_layers - 1), label="layer")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    other = passes[:forward]
    for index, pass_ in enumerate(passes[forward:]):
        ids, gates = pass_.expert_ids.copy(), pass_.gates.copy()
        changed = slice(layer + 1 if index == 0 else 0, None)
        drawn = rng.permuted(
            np.broadcast_to(np.arange(shape.num_experts), (*ids.shape[:2], shape.num_experts)), axis=-1
        )
        ids[changed] = np.sort(drawn[..., : shape.top_k])[changed]
        gates[changed] = rng.dirichlet(np.ones(shape.top_k), ids.shape[:2])[changed]
        size = pass_.positions.size
        # at its gates a forward knows its own tokens
        inputs = {"is_masked_in": rng.random(size) < 0.5, "token_ids_in": rng.integers(0, 9, size)} if index else {}
        other.append(
            change(
                pass_,
                **inputs,
                expert_ids=ids,
                gates=gates,
                p_argmax=rng.random(size),
                p_current=rng.random(size),
                argmax_ids=rng.integers(0, 9, size),
                accepted=rng.random(size) < 0.5,
                edited=rng.random(size) < 0.5,
                num_accepted=rng.integers(0, 9, pass_.requests.size),
            )
        )
    known = forward * shape.num_layers + layer + 1
    # a reading of the trace is made of the altered one
    found, usual = (
        answers(decided(built(name, knobs, shape, trace, passes), shape, trace, capacity)) for trace in (other, passes)
    )
    assert found[:known] == usual[:known]


@each([variant for variant in VARIANTS if foresees(*variant)])
def test_what_foresees_decides_by_what_comes_later(name, knobs):
    shape, passes = random_passes(np.random.default_rng(3))
    forward, other = 3, [*passes]
    other[forward] = change(passes[forward], p_argmax=1 - passes[forward].p_argmax)
    other[forward + 1] = change(passes[forward + 1], expert_ids=15 - passes[forward + 1].expert_ids[..., ::-1])
    found, usual = (
        answers(decided(built(name, knobs, shape, trace, passes), shape, trace, 5)) for trace in (other, passes)
    )
    known = forward * shape.num_layers + 1
    assert found[: known - 1] == usual[: known - 1] or name.startswith("ideal_min")
    assert found[:known] != usual[:known]


def test_confidence_acts_one_forward_later():
    rng = np.random.default_rng(6)
    shape, passes = random_passes(rng, num_requests=1, block_length=8, accept_ratio=0.0, prompt_length=0)
    policy = built("oled", {}, shape, passes)
    usual = answers(decided(policy, shape, passes, 5))
    for forward in (1, 4):
        size = passes[forward].positions.size
        unsure = [*passes]
        unsure[forward] = change(passes[forward], p_argmax=rng.random(size) ** 4, p_current=rng.random(size) ** 4)
        found = answers(decided(policy, shape, unsure, 5))
        known = (forward + 1) * shape.num_layers
        assert found[:known] == usual[:known]
        assert found[known : known + shape.num_layers] != usual[known : known + shape.num_layers]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        (n, k)
        for n, k in VARIANTS
        if n in ("lru", "lfu", "oled", "ideal_min") and k.get("misses", n) in ("lru", "lfu", "h2d")
    ]
    + [("oled", {"coop": False}), ("oled", OFF)],
)
def test_with_a_slot_for_every_expert_only_first_touches_miss(name, knobs):
    shape, passes = random_passes(np.random.default_rng(11), batch=2)
    missed = sum(len(decision.plan.transfers) for decision in run(name, knobs, shape, passes, shape.num_experts))
    assert missed == sum(len(set().union(*sets_of(passes, layer))) for layer in range(shape.num_layers))


def renamed(passes, names):
    """The same passes with the experts of every layer renamed, `names` [L, E]."""
    layers = np.arange(names.shape[0])[:, None, None]
    return [change(pass_, expert_ids=names[layers, pass_.expert_ids]) for pass_ in passes]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("ondemand", {}),
        ("lru", {"lru_order": "gate"}),
        ("lru", {"lru_order": "gate", "misses": "oled"}),
        ("lfu", {"lru_order": "gate"}),
        ("lfu", {"lru_order": "gate", "misses": "oled"}),
        ("prev_set", {"lru_order": "gate"}),
        ("oled", {}),
        ("oled", {**OFF, "lru_order": "gate"}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_renaming_experts_renames_the_plans_where_nothing_ties(name, knobs, seed):
    rng = np.random.default_rng(seed)
    shape, passes = random_passes(rng, num_experts=12, top_k=3)
    names = rng.permuted(np.tile(np.arange(12), (shape.num_layers, 1)), axis=1)
    usual, other = run(name, knobs, shape, passes, 5), run(name, knobs, shape, renamed(passes, names), 5)
    for one, two in zip(usual, other, strict=True):
        new = names[one.step.layer]
        assert set(new[one.hits]) == set(two.hits)
        assert set(new[one.plan.transfers]) == set(two.plan.transfers)
        assert set(new[one.plan.on_cpu]) == set(two.plan.on_cpu)
        assert set(new[np.flatnonzero(one.plan.retained)]) == set(np.flatnonzero(two.plan.retained))


@pytest.mark.parametrize("name", ["ideal_min", "ideal_min_global", "ideal_free"])
def test_renaming_experts_leaves_the_hits_of_bounds(name):
    rng = np.random.default_rng(9)
    shape, passes = random_passes(rng)
    names = rng.permuted(np.tile(np.arange(16), (shape.num_layers, 1)), axis=1)
    usual, other = (
        sum(hits_per_execution(run(name, {"misses": "h2d"}, shape, trace, 5)))
        for trace in (passes, renamed(passes, names))
    )
    assert usual == other


@given(traces(), st.data())
@settings(max_examples=12)
def test_signals_of_priority_agree_where_they_say_the_same(trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    sure = [change(p, p_argmax=np.ones_like(p.p_argmax), p_current=np.ones_like(p.p_current)) for p in passes]
    even = [change(p, gates=np.full(p.gates.shape, 1 / shape.top_k)) for p in sure]
    alone = {**OFF, "priority": True}

    def answer(signal, passes):
        return answers(run("oled", {**alone, "priority_signal": signal}, shape, passes, capacity))

    assert answer("order", passes) == answers(run("lru", {}, shape, passes, capacity))
    assert answer("confidence", sure) == answer("gate", sure)
    assert answer("gate", even) == answer("load", even)


def test_decisions_that_read_no_estimates_hold_for_any():
    shape, passes = random_passes(np.random.default_rng(13))
    slow = ESTIMATES._replace(h2d_ns=9_000, cpu_b0_ns=1)
    for name, knobs in VARIANTS:
        policy = built(name, knobs, shape, passes)
        decisions = [
            answers(drive(policy, passes, shape, 6 * shape.num_layers, estimates)) for estimates in (ESTIMATES, slow)
        ]
        if not policy.reads_estimates:
            assert decisions[0] == decisions[1]
        elif policy.misses == "oled":
            assert decisions[0] != decisions[1]
