"""The compiled clock against the reference engine: every column of the log, every copy, every error."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import columns_of
from numpy.typing import NDArray
from reference import built
from scripted import ESTIMATES, make_costs, make_pass, make_shape
from shipped import tiny
from strategies import traces
from test_compiled import PREFETCHING, check_equal
from test_policy_laws import VARIANTS, label

from policies.contract import Plan, PlanError, Policy, PolicyError
from policies.jit import jit
from policies.log import LogChunk
from policies.pool import number_in_pool, pool_of
from policies.profile import estimates_of
from simulator import compiled, des
from simulator.link import Copy

MOVING = [
    *((name, knobs) for name, knobs in VARIANTS if name in PREFETCHING or not knobs.get("swap_from_staging", True)),
    ("moe_infinity", {"mi_protect_predicted": True, "depth": 2}),
    ("finemoe", {"fm_target": "code_all_later", "fm_search_ms": 0.0002, "fm_freq_reset": "evict"}),
    ("finemoe", {"fm_pool": "mean_map", "pool": "layer"}),
]
each_policy = pytest.mark.parametrize(("name", "knobs"), MOVING, ids=[label(*variant) for variant in MOVING])


class Odds(NamedTuple):
    """What a random policy does, by chance."""

    seed: int
    cpu: float
    prefetch: float
    most_prefetches: int
    clear: float
    delay_ns: int  # of every third plan that prefetches; 0 of the others
    bad: int  # the plan that breaks the contract, counted over the run


class Scratch(NamedTuple):
    score: NDArray[np.float64]  # [L, E]
    targets: NDArray[np.int64]  # [L * E, 2] used again for each plan
    priority: NDArray[np.float64]  # [L * E, 2]
    retained: NDArray[np.bool_]  # [E] or [L * E]
    draws: NDArray[np.float64]  # [N] from 0 to 1, in order and over again
    counts: NDArray[np.int64]  # [2] plans, and draws that were used


@jit
def chance(state):
    state.counts[1] += 1
    return state.draws[state.counts[1] % state.draws.size]


@jit
def below(state, end):
    return int(chance(state) * end)


@jit
def shuffled(state, size):
    order = np.arange(size)
    for place in range(size - 1, 0, -1):
        other = below(state, place + 1)
        order[place], order[other] = order[other], order[place]
    return order


@jit
def decide(params, state, step, view):
    num_layers, num_experts = view.resident.shape
    layer, pool = step.layer, pool_of(view.capacity, step.layer)
    for at in range(state.score.size):
        if chance(state) < 0.2:
            state.score.ravel()[at] = below(state, 5)
    transfers, on_cpu = np.empty(num_experts, np.int64), np.empty(num_experts, np.int64)
    num_transfers = num_on_cpu = num_flying = 0
    retained = state.retained
    start = pool * num_experts
    resident = view.resident.ravel()[start : start + retained.size]
    in_flight = view.in_flight.ravel()[start : start + retained.size]
    stays = chance(state)
    for number in range(retained.size):
        retained[number] = resident[number] and chance(state) < stays
        num_flying += in_flight[number]
    for expert in shuffled(state, num_experts):
        if step.load[expert] == 0 or view.resident[layer, expert]:
            continue
        if chance(state) < params.cpu and not view.in_flight[layer, expert]:
            on_cpu[num_on_cpu] = expert
            num_on_cpu += 1
        else:
            transfers[num_transfers] = expert
            num_transfers += 1
            number = number_in_pool(view.capacity, num_experts, layer, expert)
            retained[number] = view.in_flight[layer, expert] or chance(state) < 0.7
    taken = 0
    for number in range(retained.size):
        taken += retained[number] or in_flight[number]
    for number in shuffled(state, retained.size):
        if taken > view.capacity[pool] and retained[number] and not in_flight[number]:
            retained[number] = False
            taken -= 1
    count = 0
    if chance(state) < params.prefetch:
        for at in shuffled(state, num_layers * num_experts):
            is_free = not view.resident.ravel()[at] and not view.in_flight.ravel()[at]
            if is_free and count < params.most_prefetches:
                state.targets[count, 0], state.targets[count, 1] = at // num_experts, at % num_experts
                state.priority[count, 0] = below(state, 3)
                state.priority[count, 1] = below(state, 2)
                count += 1
    state.counts[0] += 1
    if state.counts[0] == params.bad:
        retained[:] = True
    return Plan(
        transfers[:num_transfers],
        on_cpu[:num_on_cpu],
        retained,
        state.targets[:count],
        state.priority[:count],
        chance(state) < params.clear,
        params.delay_ns if count > 0 and chance(state) < 0.3 else 0,
    )


@jit
def boundary(params, state, end, view):
    capacity, evictions = view.capacity.copy(), np.zeros(view.resident.shape, np.bool_)
    num_layers, num_experts = evictions.shape
    if capacity.size > 1:
        giver, taker = below(state, num_layers), below(state, num_layers)
        if capacity[giver] > view.in_flight[giver].sum() and capacity[taker] < num_experts:
            capacity[giver] -= 1
            capacity[taker] += 1
    for layer in range(num_layers):
        for expert in range(num_experts):
            evictions[layer, expert] = view.resident[layer, expert] and chance(state) < 0.1
        room = capacity[layer] if capacity.size > 1 else num_experts
        taken = view.resident[layer].sum() - evictions[layer].sum() + view.in_flight[layer].sum()
        for expert in range(num_experts):
            if taken > room and view.resident[layer, expert] and not evictions[layer, expert]:
                evictions[layer, expert] = True
                taken -= 1
    return capacity, evictions


def build(odds: Odds, capacity: list[int], is_global: bool = False, **changes: Any) -> Policy:
    def init(params: Odds, shape: Any, slots: int) -> Any:
        size = (shape.num_layers, shape.num_experts)
        rng = np.random.default_rng(params.seed)
        resident = np.zeros(size, bool)
        for row, room in zip(resident.reshape(len(capacity), -1), capacity, strict=True):
            row[rng.permutation(row.size)[: rng.integers(0, room + 1)]] = True
        num_cells = resident.size
        state = Scratch(
            rng.integers(0, 5, size).astype(float),
            np.zeros((num_cells, 2), np.int64),
            np.zeros((num_cells, 2)),
            np.zeros(num_cells // len(capacity), bool),
            rng.random(1 << 12),
            np.zeros(2, np.int64),
        )
        return state, resident, np.array(capacity)

    options = {
        "boundary": boundary,
        "pool": "global" if is_global else "layer",
        "prefetches": True,
        "sized": False,
    } | changes
    return Policy("chance", odds, init, decide, **options)


def told(engine: Any, passes: Any, policy: Policy, shape: Any, costs: Any, **options: Any) -> Any:
    """All columns of the log, all copies, and the error that ended the run, as plain values."""
    copies: list[Copy] = []
    chunks: list[LogChunk] = []
    error = None
    stream = engine.simulate(passes, policy, shape, 0, costs, ESTIMATES, on_copy=copies.append, **options)
    try:
        chunks.extend(stream)
    except (PlanError, PolicyError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    seen = [(copy.layer, copy.expert, copy.is_prefetch, copy.start_ns, copy.end_ns) for copy in copies]
    return columns_of(chunks), seen, error


def check_same(passes: Any, policy: Policy, shape: Any, costs: Any, **options: Any) -> str | None:
    """Both engines tell the same of a run, of which this is the error."""
    options = {"chunk_forwards": 3} | options
    expected, found = (told(engine, passes, policy, shape, costs, **options) for engine in (des, compiled))
    for name, values in expected[0].items():
        assert found[0][name] == values, name
    assert found[2] == expected[2]
    if found[2] is None:  # with an error, what landed in its forward is told by the reference alone
        assert found[1] == expected[1]
    return found[2]


@st.composite
def costs_of(draw: st.DrawFn) -> Any:
    """Costs of any proportion; few distinct round numbers, so that much happens at one instant."""
    time = st.sampled_from([0.0, 10.0, 50.0, 120.0]) | st.floats(0, 300)
    return make_costs(
        n_a_ns=draw(time),
        n_b_ns=draw(st.sampled_from([0.0, 1.5])),
        g_a_ns=draw(time),
        g_b_ns=draw(st.sampled_from([0.0, 10.0, 7.3])),
        g_c_ns=draw(st.sampled_from([0.0, 1.0])),
        h2d_latency_ns=draw(time),
        cpu_a_ns=draw(st.sampled_from([0.0, 20.0])),
        cpu_b0_ns=draw(time),
        cpu_b1_ns=draw(st.sampled_from([0.0, 3.0])),
        cpu_roundtrip_ns=draw(st.sampled_from([0, 10, 31])),
        tail_ns=draw(st.sampled_from([0, 50, 333])),
        gate_sync_ns=draw(st.sampled_from([0, 10])),
        policy_ns=draw(st.sampled_from([0, 10, 45])),
        h2d_slowdown=draw(st.sampled_from([1.0, 1.3, 2.0])),
        cpu_slowdown=draw(st.sampled_from([1.0, 1.5])),
        transfer_chunk=draw(st.integers(1, 8)),
    )


@st.composite
def odds_of(draw: st.DrawFn) -> Odds:
    return Odds(
        seed=draw(st.integers(0, 2**30)),
        cpu=draw(st.sampled_from([0.0, 0.3, 1.0])),
        prefetch=draw(st.sampled_from([0.0, 0.5, 1.0])),
        most_prefetches=draw(st.sampled_from([1, 3, 1000])),
        clear=draw(st.sampled_from([0.0, 0.3, 1.0])),
        delay_ns=draw(st.sampled_from([1, 10, 100, 1000, 20_000])),
        bad=-1,
    )


def draw_run(data: st.DataObject, bad: int) -> str | None:
    shape, passes = data.draw(traces(max_layers=4))
    sizes = data.draw(st.lists(st.integers(0, shape.num_experts), min_size=shape.num_layers, max_size=shape.num_layers))
    is_global = data.draw(st.booleans())
    costs, odds = data.draw(costs_of()), data.draw(odds_of())._replace(bad=bad)
    policy = build(odds, [sum(sizes)] if is_global else sizes, is_global)
    return check_same(passes, policy, shape, costs, staging_slots=costs.transfer_chunk + data.draw(st.integers(0, 4)))


@settings(max_examples=300)
@given(st.data())
def test_random_plans(data: st.DataObject) -> None:
    assert draw_run(data, bad=-1) is None


@settings(max_examples=20)
@given(st.data(), st.integers(1, 9))
def test_a_plan_that_breaks_the_contract(data: st.DataObject, bad: int) -> None:
    error = draw_run(data, bad)
    assert error is None or "retained" in error


class Scoreless(NamedTuple):
    clock: NDArray[np.int64]


@jit
def decide_without_score(params, state, step, view):
    retained = view.resident[step.layer].copy()
    transfers = np.flatnonzero((step.load > 0) & ~retained)
    prefetches = np.full((step.forward, 2), 1)  # from the second forward on
    return Plan(transfers, np.empty(0, np.int64), retained, prefetches, np.zeros(prefetches.shape), False, 0)


def test_prefetching_needs_a_score() -> None:
    def init(params: Any, shape: Any, slots: int) -> Any:
        return Scoreless(np.zeros(1, np.int64)), np.zeros((2, 4), bool), np.ones(2, np.int64)

    policy = Policy("scoreless", None, init, decide_without_score, prefetches=True, sized=False)
    passes = [make_pass(i, [[0], [2]]) for i in range(2)]
    assert check_same(passes, policy, make_shape(2, 4), make_costs(), staging_slots=4) == (
        "PolicyError: scoreless prefetches, so its state needs a score, [L, E], to rank residents by"
    )


# Built-in policies


@each_policy
@settings(max_examples=8)
@given(traces(max_experts=10, max_requests=2, max_block=4, signals=True), st.data())
def test_every_policy_that_prefetches(name: str, knobs: dict[str, Any], trace: Any, data: st.DataObject) -> None:
    shape, passes = trace
    capacity = data.draw(st.integers(shape.top_k, shape.num_experts), label="slots per layer")
    costs = data.draw(costs_of())
    policy = built(name, knobs, shape, passes)
    check_equal(lambda: policy, passes, shape, capacity * shape.num_layers, costs, estimates_of(costs))


@each_policy
def test_a_shipped_trace(name: str, knobs: dict[str, Any]) -> None:
    shape, passes = tiny(1)
    policy = built(name, knobs, shape, passes)
    costs = make_costs(h2d_latency_ns=30.5, g_b_ns=2.0, g_c_ns=0.3, tail_ns=40)
    check_equal(lambda: policy, passes, shape, 14 * shape.num_layers, costs, estimates_of(costs))
