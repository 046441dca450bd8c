"""Laws of every registered policy in the engine, prefetching or not: a new one is covered without another line."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import built, run
from scripted import layer_rows, make_costs
from shipped import tiny
from strategies import change, random_passes, traces
from watched import WatchedSlots, check_laws

from policies.contract import Estimates
from policies.registry import POLICIES
from policies.residents import Residents
from policies.retention import equal_capacity
from simulator import des
from simulator.des import simulate
from simulator.loop import functions_of
from tracer.schema import ForwardKind, ModelShape, Pass, Signals

H2D = {"misses": "h2d"}
# beside the defaults, knobs that change what kind of policy it is
VARIANTS = [
    *((name, {}) for name in POLICIES),
    ("lru", {"misses": "oled", "max_admit": 2}),
    ("lru", {"pool": "global", "max_admit": 2}),
    ("lfu", {"pool": "global", "lfu_decay": 0.5}),
    ("oled", {"gate_kind": "raw", "coop": False}),
    ("oled", {"layer_adapt": False, "max_admit": 1}),
    ("gate_ahead", {"depth": 3, "max_admit": 1}),
    ("moe_infinity", {"mi_mode": "request_only"}),
    ("moe_infinity", {"pool": "layer"}),
    ("finemoe", {"fm_store": "online"}),
    ("hybrimoe", H2D),
    ("ktransformers", {"kt_dyn": "prefill"}),
    ("ktransformers", {"kt_place": "frequency_global"}),
    ("fiddler", {"fd_obj": "max"}),
    ("swapmoe", {"swap_from_staging": False}),
    ("sida", {"sida_unit": "block"}),
    ("sida", {"sida_unit": "iter"}),
    ("sida", {"sida_unit": "block", "oracle_noise": 0.25}),
    ("ideal_min_global", H2D),
    ("ideal_prefetch", H2D),
]
# these do not keep what they could, by design
FORGETFUL = {"ondemand", "prev_set", "swapmoe", "sida"}
# copies take about as long as layers, so that prefetches are in time, late and dropped
COSTS = make_costs(h2d_latency_ns=30.0, g_b_ns=2.0, cpu_b0_ns=50.0, cpu_b1_ns=5.0, tail_ns=40, policy_ns=3)
ESTIMATES = Estimates(h2d_ns=30, cpu_b0_ns=50, cpu_b1_ns=5)
DECISIONS = ("hits", "transfers", "on_cpu", "retained", "prefetch_layers", "prefetch_experts", "capacity", "plan_ns")


def label(name, knobs):
    return " ".join([name, *(f"{k}={v}" for k, v in knobs.items())])


each_policy = pytest.mark.parametrize(("name", "knobs"), VARIANTS, ids=[label(*variant) for variant in VARIANTS])
some_traces = traces(max_experts=10, max_requests=2, max_block=4, signals=True)


def draw_capacity(data, shape):
    # what one token activates is what every layer of an adaptive policy must be able to hold
    return data.draw(st.integers(shape.top_k, shape.num_experts), label="slots per layer")


def watched(policy, shape, passes, capacity):
    """The log's rows of a run whose slots are watched all the time, and whose copies and counts add up."""
    copies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(des, "Slots", WatchedSlots)
        chunks = simulate(passes, policy, shape, capacity * shape.num_layers, COSTS, ESTIMATES, on_copy=copies.append)
        rows = layer_rows(chunks)
    check_laws(rows, copies, COSTS.policy_ns)
    return rows


def compilations(policy):
    functions = filter(None, (policy.decide, policy.boundary, policy.place))
    return {(function.py_func.__name__, types) for function in functions for types in function.signatures}


def hits_of(rows):
    return sum(len(row["hits"]) for row in rows)


def check_rows(policy, shape, passes, capacity, rows):
    """What a policy says about itself, and what any must keep to."""
    assert len(rows) == len(passes) * shape.num_layers
    assert policy.prefetches or not any(row["prefetch_issued"] for row in rows)
    brought = set()  # (layer, expert) that were on the GPU once
    for row, (pass_, layer) in zip(rows, ((p, n) for p in passes for n in range(shape.num_layers)), strict=True):
        activated = set(pass_.expert_ids[layer].ravel().tolist())
        assert {*row["hits"], *row["transfers"], *row["on_cpu"]} == activated
        assert row["num_activated"] == len(activated)
        assert len(row["retained"]) <= row["capacity"]
        if policy.misses == "h2d" or (policy.misses == "oled" and pass_.kind == ForwardKind.PREFILL):
            assert row["on_cpu"] == []
        if policy.misses == "cpu" and (pass_.blocks >= 0).all():  # no prompt among its requests
            assert row["transfers"] == []
        if capacity == shape.num_experts and policy.name not in FORGETFUL and "max_admit" not in policy.variant:
            assert not brought & {(layer, expert) for expert in activated - set(row["hits"])}
            brought |= {(layer, expert) for expert in [*row["hits"], *row["transfers"]]}
    if policy.sized:
        of_forward = np.array([row["capacity"] for row in rows]).reshape(len(passes), shape.num_layers)
        total = of_forward[:, 0] if policy.pool == "global" else of_forward.sum(axis=1)
        assert (total == capacity * shape.num_layers).all()
        assert policy.resizes or (of_forward == of_forward[0]).all()


def check_bounds(policy, shape, passes, capacity, rows):
    """No policy finds more experts resident than the bound on its kind does, from the cold start."""
    _, resident, sizes = policy.init(policy.params, shape, capacity * shape.num_layers)
    if not policy.sized or policy.place is not None:
        return
    is_equal = (
        policy.pool == "layer"
        and not policy.resizes
        and (sizes == equal_capacity(shape, capacity * shape.num_layers)).all()
    )
    reached = hits_of(rows)

    def bound(name):
        return sum(len(decision.hits) for decision in run(name, H2D, shape, passes, capacity))

    if is_equal:
        assert reached <= bound("ideal_free")
    if not policy.prefetches and not resident.any():
        assert reached <= bound("ideal_min_global")
        if is_equal:
            assert reached <= bound("ideal_min")


@each_policy
@settings(max_examples=8)
@given(some_traces, st.data())
def test_laws(name, knobs, trace, data):
    shape, passes = trace
    capacity = draw_capacity(data, shape)
    policy = built(name, knobs, shape, passes)
    functions_of(policy, Residents(policy, shape, capacity * shape.num_layers, ESTIMATES), shape)
    compiled = compilations(policy)
    rows = watched(policy, shape, passes, capacity)
    check_rows(policy, shape, passes, capacity, rows)
    check_bounds(policy, shape, passes, capacity, rows)
    assert watched(policy, shape, passes, capacity) == rows
    # what compiled loops call serves every trace from Python as well, since all arrays are of one kind
    assert compilations(policy) == compiled


@each_policy
def test_laws_on_a_shipped_trace(name, knobs):
    shape, passes = tiny(2)
    policy = built(name, knobs, shape, passes)
    rows = watched(policy, shape, passes, 16)
    check_rows(policy, shape, passes, 16, rows)
    check_bounds(policy, shape, passes, 16, rows)
    assert policy.misses != "oled" or any(row["on_cpu"] for row in rows)
    assert not policy.prefetches or any(row["prefetch_landed"] for row in rows)


KEEPING = [(name, knobs) for name, knobs in VARIANTS if name not in FORGETFUL and "max_admit" not in knobs]


@pytest.mark.parametrize(("name", "knobs"), KEEPING, ids=[label(*variant) for variant in KEEPING])
@pytest.mark.parametrize("batch", [1, 3])
def test_with_a_slot_for_every_expert_only_first_uses_are_missed(name, knobs, batch):
    shape, passes = random_passes(np.random.default_rng(batch), num_requests=4, batch=batch, signals=True)
    policy = built(name, knobs, shape, passes)
    rows = watched(policy, shape, passes, shape.num_experts)
    check_rows(policy, shape, passes, shape.num_experts, rows)
    used = sum(len({e for row in rows[layer :: shape.num_layers] for e in used_by(row)}) for layer in range(3))
    missed = sum(len(row["transfers"]) + len(row["on_cpu"]) for row in rows)
    assert used > 0.8 * shape.num_layers * shape.num_experts
    if name in ("full", "ktransformers", "fiddler", "ideal_free"):
        assert missed == 0
    elif policy.misses == "h2d":
        assert 0 < missed <= used if policy.prefetches else missed == used
    else:
        assert 0 < sum(len(row["transfers"]) for row in rows) <= used


def used_by(row):
    return [*row["hits"], *row["transfers"], *row["on_cpu"]]


def shuffled_signals(rng, signals, known):
    """Other signals of a pass, but for its first `known` layers; with 0, of its tokens too."""
    changed = {}
    for name, values in vars(signals).items():
        of_tokens = name == "sketch"
        order = rng.permutation(values.shape[0 if of_tokens else -1])
        if of_tokens:
            changed[name] = values if known else values[order]
        elif name == "ahead_ids":  # -1 stays where there is no layer ahead
            changed[name] = np.concatenate([values[:known], values[known:, ..., order]])
        else:
            changed[name] = np.concatenate([values[:known], rng.permuted(values[known:], axis=-1)])
    return Signals(**changed)


def other_future(rng, shape: ModelShape, passes: list[Pass], forward: int, layer: int) -> list[Pass]:
    """The same passes as far as they are known at the gate of a layer, and others from then on."""
    other = passes[:forward]
    for index, pass_ in enumerate(passes[forward:]):
        known = layer + 1 if index == 0 else 0
        ids, gates = pass_.expert_ids.copy(), pass_.gates.copy()
        drawn = rng.permuted(
            np.broadcast_to(np.arange(shape.num_experts), (*ids.shape[:2], shape.num_experts)), axis=-1
        )
        ids[known:] = np.sort(drawn[..., : shape.top_k])[known:]
        gates[known:] = rng.dirichlet(np.ones(shape.top_k), ids.shape[:2])[known:]
        size = pass_.positions.size
        inputs = {"is_masked_in": rng.random(size) < 0.5, "token_ids_in": rng.integers(0, 9, size)} if index else {}
        other.append(
            change(
                pass_,
                **inputs,
                expert_ids=ids,
                gates=gates,
                signals=shuffled_signals(rng, pass_.signals, known),
                p_argmax=rng.random(size),
                p_current=rng.random(size),
                argmax_ids=rng.integers(0, 9, size),
                accepted=rng.random(size) < 0.5,
                edited=rng.random(size) < 0.5,
                num_accepted=rng.integers(0, 9, pass_.requests.size),
            )
        )
    return other


@each_policy
@settings(max_examples=12)
@given(some_traces, st.data())
def test_nothing_is_known_of_what_comes_after_a_gate(name, knobs, trace, data):
    shape, passes = trace
    policy = built(name, knobs, shape, passes)
    assert policy.clairvoyant == ((name.startswith("ideal_") and name != "ideal_free") or "oracle_noise" in knobs)
    if policy.clairvoyant:
        return
    capacity = draw_capacity(data, shape)
    forward = data.draw(st.integers(0, len(passes) - 1), label="forward")
    layer = data.draw(st.integers(0, shape.num_layers - 1), label="layer")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    other = other_future(rng, shape, passes, forward, layer)
    # what was learned beforehand stays the same
    found, usual = (
        watched(built(name, knobs, shape, trace, passes), shape, trace, capacity) for trace in (other, passes)
    )
    known = forward * shape.num_layers + layer
    assert found[:known] == usual[:known]
    assert all(found[known][column] == usual[known][column] for column in DECISIONS)


@pytest.mark.parametrize("name", [name for name in POLICIES if not name.startswith("ideal_")])
def test_a_policy_is_not_shown_signals_that_it_does_not_read(name):
    shape, passes = tiny(1)
    policy = built(name, {}, shape, passes)
    seen = []

    def decide(params, state, step, view):
        seen.append(step.signals is not None)
        return policy.decide(params, state, step, view)

    layer_rows(simulate(passes, replace(policy, decide=decide), shape, 16 * shape.num_layers, COSTS, ESTIMATES))
    assert set(seen) == {policy.reads_signals}
