from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import shown
from scripted import (
    ESTIMATES,
    Script,
    forward_rows,
    layer_rows,
    make_costs,
    make_pass,
    make_shape,
    random_policy,
    scripted,
)
from strategies import random_passes

from policies.contract import Context, PlanError, Policy, PolicyError, View
from policies.profile import Costs, ProfileError, copy_ns, cpu_batch_ns, kernel_ns, layer_ns
from policies.registry import build_policy
from policies.steps import Steps, end_of, step_at
from simulator.des import simulate
from tracer.schema import ForwardKind, ModelShape, Pass, TraceError

TIMES = ("start_ns", "plan_ns", "hits_end_ns", "cpu_end_ns", "end_ns", "transfer_start_ns", "transfer_end_ns")


def run_layer(experts: Any, script: Script | None = None, *, staging: int = 8, **options: Any) -> dict[str, Any]:
    """The row of one layer execution of 16 experts, and nothing else."""
    costs = options.pop("costs", make_costs())
    options.setdefault("capacity", 2)
    shape = make_shape(1, 16)
    policy = scripted(shape, {(0, 0): script or Script()}, **options)
    log = list(simulate([make_pass(0, [experts])], policy, shape, 0, costs, ESTIMATES, staging_slots=staging))
    (row,) = layer_rows(log)
    return row


# Worked numbers


def test_worked_example() -> None:
    us = 1000
    costs = make_costs(
        n_a_ns=100.0 * us,
        g_a_ns=20.0 * us,
        g_b_ns=2.0 * us,
        h2d_latency_ns=126.0 * us,
        cpu_a_ns=50.0 * us,
        cpu_b0_ns=150.0 * us,
        cpu_b1_ns=5.0 * us,
        cpu_roundtrip_ns=30 * us,
    )
    loads = dict.fromkeys(range(7), 1) | {7: 1, 8: 2, 9: 3}
    row = run_layer(loads, Script(on_cpu=[7, 8, 9]), residents={0: [0, 1]}, costs=costs)
    assert row["plan_ns"] == 100 * us
    assert row["hits_end_ns"] == 124 * us
    assert row["transfer_end_ns"][3] == 604 * us
    assert row["transfer_end_ns"][4] == 730 * us
    assert row["cpu_end_ns"] == 660 * us
    assert row["end_ns"] == 752 * us
    assert (row["hits"], row["transfers"], row["on_cpu"]) == ([0, 1], [2, 3, 4, 5, 6], [7, 8, 9])
    assert (row["transfer_loads"], row["cpu_loads"], row["hit_tokens"]) == ([1] * 5, [1, 2, 3], 2)


@pytest.mark.parametrize(
    ("num_missed", "end_ns"),
    [
        (0, 100 + 20),
        (1, 100 + 50 + 20),  # hits are done at 120, long before the copy lands
        (4, 100 + 4 * 50 + 20),
        (5, 100 + 5 * 50 + 20),  # the first chunk runs while the fifth is copied
        (9, 100 + 9 * 50 + 20),
    ],
)
def test_misses_by_hand(num_missed: int, end_ns: int) -> None:
    row = run_layer(range(2 + num_missed), residents={0: [0, 1]})
    assert row["end_ns"] == end_ns
    assert row["transfer_start_ns"] == [100 + 50 * i for i in range(num_missed)]
    assert row["link_busy_ns"] == 50 * num_missed


def test_kernels_run_one_after_the_other() -> None:
    # hits until 400, though chunk 1 landed at 300 and chunk 2 at 350
    row = run_layer(range(6), residents={0: [0]}, costs=make_costs(g_a_ns=300.0))
    assert row["hits_end_ns"] == 400
    assert row["end_ns"] == 400 + 300 + 300


def test_kernel_by_experts_and_tokens() -> None:
    costs = make_costs(
        n_a_ns=0.0, n_b_ns=2.0, n_c_ns=3.0, g_a_ns=1.0, g_b_ns=10.0, g_c_ns=100.0, gate_sync_ns=7, policy_ns=11
    )
    shape = make_shape(1, 16)
    policy = scripted(shape, capacity=2, residents={0: [0, 1]})
    log = simulate([make_pass(0, [{0: 3, 1: 2, 2: 4}], kv_len=5)], policy, shape, 0, costs, ESTIMATES)
    (row,) = layer_rows(log)
    assert row["plan_ns"] == 2 * 9 + 3 * 5 + 7 + 11
    assert row["hits_end_ns"] == row["plan_ns"] + 1 + 10 * 2 + 100 * 5
    assert row["end_ns"] == row["hits_end_ns"] + 1 + 10 + 100 * 4


def test_cpu_alone() -> None:
    costs = make_costs(cpu_a_ns=5.0, cpu_b0_ns=70.0, cpu_b1_ns=3.0, cpu_roundtrip_ns=11, cpu_slowdown=2.0)
    row = run_layer({0: 1, 4: 2, 6: 1}, Script(on_cpu=[6, 4]), residents={0: [0]}, costs=costs)
    assert row["cpu_end_ns"] == row["end_ns"] == 100 + 5 + 2 * 70 + 3 * 3 + 11  # no transfer, so not slowed
    assert row["on_cpu"] == [4, 6]


def test_nothing_to_wait_for() -> None:
    row = run_layer([3], Script(on_cpu=[3]), costs=make_costs(cpu_b0_ns=0.0))
    assert row["hits_end_ns"] == row["plan_ns"] == row["end_ns"] == 100


def test_which_copies_the_cpu_slows() -> None:
    costs = make_costs(h2d_slowdown=1.3, cpu_slowdown=1.5, cpu_roundtrip_ns=1000)
    row = run_layer(range(5), Script(on_cpu=[0]), costs=costs)
    # the batch runs from 100 to 100 + 70 * 1.5 = 205: of the copies, those that start before that are slowed
    assert row["cpu_end_ns"] == 205 + 1000
    assert row["transfer_start_ns"] == [100, 165, 230, 280]
    assert row["transfer_end_ns"] == [165, 230, 280, 330]


def test_a_copy_that_starts_as_the_batch_ends_is_not_slowed() -> None:
    costs = make_costs(h2d_slowdown=2.0, cpu_b0_ns=100.0)
    row = run_layer([0, 1, 2], Script(on_cpu=[0]), costs=costs)
    assert row["transfer_end_ns"] == [200, 250]


def test_costs_round_half_up_once() -> None:
    costs = make_costs(
        h2d_latency_ns=51.0, h2d_slowdown=1.5, cpu_b0_ns=71.0, cpu_slowdown=1.5, n_a_ns=99.5, g_a_ns=20.49
    )
    row = run_layer([0, 1, 2], Script(on_cpu=[2]), residents={0: [0]}, costs=costs)
    assert row["plan_ns"] == 100
    assert row["hits_end_ns"] == 120
    assert row["transfer_end_ns"] == [100 + 77]
    assert row["cpu_end_ns"] == 100 + 107


def test_the_tail_ends_the_forward() -> None:
    shape = make_shape(2, 4)
    policy = scripted(shape, capacity=4, residents={0: [0], 1: [1]})
    passes = [make_pass(i, [[0], [1]], request=i) for i in range(2)]
    log = list(simulate(passes, policy, shape, 0, make_costs(tail_ns=33), ESTIMATES))
    assert [row["end_ns"] for row in layer_rows(log)] == [120, 240, 393, 513]
    forwards = forward_rows(log)
    assert [(row["start_ns"], row["end_ns"]) for row in forwards] == [(0, 273), (273, 546)]
    assert [(row["requests"], row["accepted"]) for row in forwards] == [([0], [1]), ([1], [1])]


# Slots


def test_staging_of_one_chunk_makes_copies_wait() -> None:
    row = run_layer(range(5), Script(retained=[]), capacity=0, staging=2, costs=make_costs(transfer_chunk=2))
    # two slots: 0 and 1 land at 150 and 200, run until 220; 2 and 3 land at 270 and 320, run until 340; 4 at 390
    assert row["transfer_start_ns"] == [100, 150, 220, 270, 340]
    assert row["end_ns"] == 410


def test_one_slot_more_hides_part_of_the_wait() -> None:
    row = run_layer(range(5), Script(retained=[]), capacity=0, staging=3, costs=make_costs(transfer_chunk=2))
    assert row["transfer_start_ns"] == [100, 150, 200, 250, 300]
    assert row["end_ns"] == 370


def test_a_hit_keeps_its_slot_until_it_was_used() -> None:
    costs = make_costs(g_a_ns=200.0, transfer_chunk=1)
    row = run_layer([0, 1, 2], Script(retained=[1]), capacity=1, residents={0: [0]}, staging=1, costs=costs)
    # copy 1 takes the staging slot and stays; copy 2 waits for the slot of 0, in use until 300
    assert row["transfer_start_ns"] == [100, 300]
    assert row["end_ns"] == 300 + 200 + 200


def test_a_resident_that_was_not_hit_leaves_at_once() -> None:
    costs = make_costs(g_a_ns=200.0, transfer_chunk=1)
    row = run_layer([1, 2], Script(retained=[1]), capacity=1, residents={0: [5]}, staging=1, costs=costs)
    assert row["transfer_start_ns"] == [100, 150]


def test_empty_slots_of_other_layers_take_demand_copies() -> None:
    shape = make_shape(2, 8)
    policy = scripted(shape, capacity=[0, 3])
    log = simulate(
        [make_pass(0, [range(5), [0]])], policy, shape, 0, make_costs(transfer_chunk=2), ESTIMATES, staging_slots=2
    )
    assert layer_rows(log)[0]["transfer_start_ns"] == [100, 150, 200, 250, 300]


def test_transfers_enter_and_residents_leave_as_planned() -> None:
    shape = make_shape(1, 8)
    seen: list[View] = []
    plans = {(0, 0): Script(retained=[0, 3]), (1, 0): Script(retained=[0])}
    policy = scripted(shape, plans, capacity=2, residents={0: [0, 1]}, seen=seen)
    passes = [make_pass(0, [[1, 2, 3]]), make_pass(1, [[0, 3]]), make_pass(2, [[0]])]
    rows = layer_rows(simulate(passes, policy, shape, 0, make_costs(), ESTIMATES))
    assert [np.flatnonzero(view.resident[0]).tolist() for view in seen] == [[0, 1], [0, 3], [0]]
    assert [view.free_slots for view in seen] == [0, 0, 1]
    assert [row["hits"] for row in rows] == [[1], [0, 3], [0]]
    assert [row["num_resident"] for row in rows] == [2, 2, 1]
    assert [row["retained"] for row in rows] == [[0, 3], [0], [0]]


def test_a_global_pool_is_one_capacity_for_all_layers() -> None:
    shape = make_shape(2, 4)
    seen: list[View] = []
    # layer 0 keeps its transfer 3 and lets expert 1 of layer 1, number 5, go
    plans = {(0, 0): Script(retained=[0, 3, 6])}
    policy = scripted(shape, plans, capacity=3, residents={0: [0], 1: [1, 2]}, pool="global", seen=seen)
    rows = layer_rows(simulate([make_pass(0, [[0, 3], [1, 2]])], policy, shape, 0, make_costs(), ESTIMATES))
    assert np.argwhere(seen[1].resident).tolist() == [[0, 0], [0, 3], [1, 2]]
    assert [row["capacity"] for row in rows] == [3, 3]
    assert [row["num_resident"] for row in rows] == [1, 1]
    assert rows[1]["hits"] == [2]
    assert rows[1]["transfers"] == [1]


def test_full_never_misses() -> None:
    shape = make_shape(2, 4)
    policy = build_policy("full", {}, Context(shape=shape))
    rows = layer_rows(simulate([make_pass(0, [[0, 1], [2, 3]])] * 3, policy, shape, 2, make_costs(), ESTIMATES))
    assert all(row["transfers"] == [] and row["end_ns"] - row["start_ns"] == 120 for row in rows)


def test_placing_is_free() -> None:
    shape = make_shape(2, 8)

    def place(params: Any, state: Any, step: Any) -> Any:
        return (step.load > 0) & (np.arange(8) < 5)

    policy = scripted(shape, capacity=3, residents={0: [7]}, place=place)
    rows = layer_rows(simulate([make_pass(0, [[0, 4, 6], [1, 2, 3]])], policy, shape, 0, make_costs(), ESTIMATES))
    assert [(row["hits"], row["transfers"]) for row in rows] == [([0, 4], [6]), ([1, 2, 3], [])]
    assert rows[1]["end_ns"] - rows[1]["start_ns"] == 120


def test_capacity_moves_between_forwards() -> None:
    shape = make_shape(2, 4)
    seen: list[View] = []
    ends = []

    def boundary(params: Any, state: Any, end: Any, view: View) -> Any:
        ends.append(end.forward)
        evictions = np.zeros((2, 4), bool)
        evictions[0, 1] = end.forward == 0
        return np.array([1, 3]), evictions

    policy = scripted(shape, capacity=[2, 2], residents={0: [0, 1]}, seen=seen, boundary=boundary)
    rows = layer_rows(
        simulate([make_pass(i, [[0, 1], [0]]) for i in range(2)], policy, shape, 0, make_costs(), ESTIMATES)
    )
    assert ends == [0, 1]
    assert [row["capacity"] for row in rows] == [2, 2, 1, 3]
    assert [row["hits"] for row in rows] == [[0, 1], [], [0], []]
    assert [view.free_slots for view in seen] == [0, 2, 0, 3]


# The stream and its errors


def test_the_log_is_streamed() -> None:
    shape = make_shape(2, 4)
    read = []

    def passes() -> Any:
        for i in range(7):
            read.append(i)
            yield make_pass(i, [[0], [1]])

    stream = simulate(passes(), scripted(shape, capacity=1), shape, 0, make_costs(), ESTIMATES, chunk_forwards=3)
    first = next(stream)
    assert len(read) == 3
    rest = list(stream)
    assert [(len(chunk.forwards), len(chunk.layers)) for chunk in [first, *rest]] == [(3, 6), (3, 6), (1, 2)]
    assert list(simulate([], scripted(shape, capacity=1), shape, 0, make_costs(), ESTIMATES)) == []


def test_too_little_staging_is_refused_before_anything_runs() -> None:
    shape = make_shape(1, 4)
    with pytest.raises(ProfileError, match="staging_slots is 3, must be at least 4"):
        simulate([], scripted(shape, capacity=1), shape, 0, make_costs(), ESTIMATES, staging_slots=3)


def test_bad_plans_and_traces_are_refused() -> None:
    shape = make_shape(1, 4)
    with pytest.raises(PlanError, match="request 0, forward 0, layer 0"):
        run_layer([0, 1], Script(transfers=[0]))
    with pytest.raises(PlanError, match="capacity is 1"):
        run_layer([0, 1], Script(retained=[0, 1]), capacity=1)
    with pytest.raises(PolicyError, match="scripted"):
        run_layer([0, 1], capacity=1, residents={0: [0, 1]})
    with pytest.raises(TraceError, match="pass 0"):
        list(simulate([make_pass(0, [[0], [1]])], scripted(shape, capacity=1), shape, 0, make_costs(), ESTIMATES))


# Laws


def draw_costs(rng: np.random.Generator, slowdowns: bool = True) -> Costs:
    """Costs of any proportion to each other; a third of them are round numbers, so that events coincide."""

    def draw(high: float) -> float:
        return float(rng.integers(0, int(high / 10) + 1) * 10) if rng.random() < 1 / 3 else float(rng.random() * high)

    return make_costs(
        n_a_ns=draw(100),
        n_b_ns=draw(5),
        n_c_ns=draw(1),
        g_a_ns=draw(200),
        g_b_ns=draw(20),
        g_c_ns=draw(5),
        h2d_latency_ns=draw(100),
        h2d_bytes_per_s=1e9 * (0.1 + rng.random()),
        expert_bytes=int(rng.integers(1, 100)),
        cpu_a_ns=draw(50),
        cpu_b0_ns=draw(300),
        cpu_b1_ns=draw(20),
        cpu_roundtrip_ns=int(rng.integers(0, 50)),
        tail_ns=int(rng.integers(0, 200)),
        gate_sync_ns=int(rng.integers(0, 20)),
        policy_ns=int(rng.integers(0, 20)),
        h2d_slowdown=float(rng.choice([1.0, 1.5, 1 + rng.random()])) if slowdowns else 1.0,
        cpu_slowdown=float(rng.choice([1.0, 1.5, 1 + rng.random()])) if slowdowns else 1.0,
        transfer_chunk=int(rng.integers(1, 6)),
    )


def draw_case(seed: int, *, slowdowns: bool = True) -> tuple[Callable[[], Policy], list[Pass], ModelShape, Costs, int]:
    """A random trace with random plans without prefetches, costs and staging slots."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts = int(rng.integers(1, 4)), int(rng.integers(2, 13))
    shape, passes = random_passes(
        rng,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=int(rng.integers(1, min(num_experts, 5) + 1)),
        num_requests=1,
        num_blocks=1,
        batch=2,
        drift=0.1,
    )
    costs = draw_costs(rng, slowdowns)
    pool = str(rng.choice(["layer", "global"]))
    sizes = rng.integers(0, num_experts + 1, num_layers)
    capacity = [int(sizes.sum())] if pool == "global" else sizes.tolist()
    cpu_ratio, moves = float(rng.choice([0.0, 0.3, 1.0])), bool(rng.random() < 0.5)
    staging = costs.transfer_chunk + int(rng.integers(0, 4))

    def build() -> Policy:
        return random_policy(shape, seed, capacity=capacity, pool=pool, cpu_ratio=cpu_ratio, moves_slots=moves)

    return build, passes, shape, costs, staging


def closed_form(
    policy: Policy, passes: list[Pass], shape: ModelShape, costs: Costs, staging: int
) -> list[dict[str, Any]]:
    """Times of plans without prefetches straight from the rules, without events."""
    state, resident, capacity = policy.init(None, shape, 0)
    num_experts, is_global = shape.num_experts, policy.pool == "global"
    num_slots = int(capacity.sum()) + staging
    steps = Steps(shape)
    rows, now = [], 0
    for pass_ in passes:
        forward = steps.read(pass_)
        for layer in range(shape.num_layers):
            step = step_at(forward, layer)
            load = step.load.tolist()
            row: dict[str, Any] = {"start_ns": now, "capacity": int(capacity[0 if is_global else layer])}
            num_tokens, kv_len = int(pass_.num_tokens.sum()), int(pass_.kv_lens.sum())
            plan_ns = now + layer_ns(costs, num_tokens, kv_len) + costs.gate_sync_ns + costs.policy_ns
            pool = resident.reshape(-1) if is_global else resident[layer]
            free = row["capacity"] - int(pool.sum())
            view = shown(resident.copy(), np.zeros_like(resident), capacity.copy(), free)
            plan = policy.decide(None, state, step, view)
            base = layer * num_experts if is_global else 0

            hits = [e for e in range(num_experts) if load[e] and resident[layer, e]]
            gpu = hits_end = plan_ns + kernel_ns(costs, len(hits), sum(load[e] for e in hits))
            transfers, on_cpu = plan.transfers.tolist(), plan.on_cpu.tolist()
            batch = cpu_batch_ns(costs, len(on_cpu), sum(load[e] for e in on_cpu), bool(transfers))
            cpu_end = plan_ns + batch + (costs.cpu_roundtrip_ns if on_cpu else 0)

            leaving = [n for n in range(pool.size) if pool[n] and not plan.retained[n]]
            leaving_hits = [n for n in leaving if n - base in hits]
            free_at = [plan_ns] * (num_slots - int(resident.sum()) + len(leaving) - len(leaving_hits))
            free_at += [hits_end] * len(leaving_hits)
            link, starts, ends, open_chunk = plan_ns, [], [], []
            for expert in transfers:
                free_at.sort()
                start = max(link, free_at.pop(0))
                link = start + copy_ns(costs, plan_ns <= start < plan_ns + batch)
                starts.append(start)
                ends.append(link)
                open_chunk.append(expert)
                if len(open_chunk) == costs.transfer_chunk or len(starts) == len(transfers):
                    gpu = max(gpu, link) + kernel_ns(costs, len(open_chunk), sum(load[e] for e in open_chunk))
                    free_at += [gpu for e in open_chunk if not plan.retained[base + e]]
                    open_chunk = []
            now = max(gpu, cpu_end)

            pool[leaving] = False
            pool[[base + e for e in transfers if plan.retained[base + e]]] = True
            row |= {"plan_ns": plan_ns, "hits_end_ns": hits_end, "cpu_end_ns": cpu_end, "end_ns": now, "hits": hits}
            row |= {
                "transfers": transfers,
                "transfer_start_ns": starts,
                "transfer_end_ns": ends,
                "on_cpu": sorted(on_cpu),
            }
            rows.append(row)
        now += costs.tail_ns
        if policy.boundary:
            view = shown(resident.copy(), np.zeros_like(resident), capacity.copy())
            capacity, evictions = policy.boundary(None, state, end_of(forward), view)
            resident &= ~evictions
    return rows


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_engine_equals_the_closed_form(seed: int) -> None:
    build, passes, shape, costs, staging = draw_case(seed)
    expected = closed_form(build(), passes, shape, costs, staging)
    rows = layer_rows(simulate(passes, build(), shape, 0, costs, ESTIMATES, staging_slots=staging))
    assert [{key: row[key] for key in expected[0]} for row in rows] == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_laws_of_one_run(seed: int) -> None:
    build, passes, shape, costs, staging = draw_case(seed)
    log = list(simulate(passes, build(), shape, 0, costs, ESTIMATES, staging_slots=staging, chunk_forwards=2))
    rows, forwards = layer_rows(log), forward_rows(log)
    copies = sorted(chain(*(zip(row["transfer_start_ns"], row["transfer_end_ns"], strict=True) for row in rows)))
    assert all(end <= start for (_, end), (start, _) in zip(copies, copies[1:], strict=False))
    assert sum(end - start for start, end in copies) <= forwards[-1]["end_ns"]
    for row in rows:
        served = [*row["hits"], *row["transfers"], *row["on_cpu"]]
        assert len(set(served)) == len(served) == row["num_activated"]
        assert row["start_ns"] <= row["plan_ns"] <= row["hits_end_ns"] <= row["end_ns"]
        assert row["hit_tokens"] + sum(row["transfer_loads"]) + sum(row["cpu_loads"]) == row["num_tokens"] * shape.top_k
        assert row["num_resident"] <= row["capacity"]
    assert [row["pass_id"] for row in forwards] == [pass_.pass_id for pass_ in passes]
    assert [row["start_ns"] for row in forwards[1:]] == [row["end_ns"] for row in forwards[:-1]]
    assert {row["kind"] for row in rows} <= {int(kind) for kind in ForwardKind}
    # what is handed on together does not matter
    again = list(simulate(passes, build(), shape, 0, costs, ESTIMATES, staging_slots=staging))
    assert layer_rows(again) == rows
    assert forward_rows(again) == forwards


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1.0, 10.0))
def test_a_faster_link_is_never_slower(seed: int, factor: float) -> None:
    build, passes, shape, costs, staging = draw_case(seed, slowdowns=False)
    faster = costs._replace(h2d_bytes_per_s=costs.h2d_bytes_per_s * factor)
    slow, fast = (
        layer_rows(simulate(passes, build(), shape, 0, charged, ESTIMATES, staging_slots=staging))
        for charged in (costs, faster)
    )
    for before, after in zip(slow, fast, strict=True):
        assert before["transfers"] == after["transfers"]
        assert all(np.max(after[name], initial=0) <= np.max(before[name], initial=0) for name in TIMES)
