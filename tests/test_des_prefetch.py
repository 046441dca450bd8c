from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ESTIMATES, Script, layer_rows, make_costs, make_pass, make_shape, random_policy, scripted
from strategies import random_passes
from watched import WatchedSlots, check_laws

from policies.contract import Plan, PolicyError, View
from simulator import des
from simulator.des import simulate
from simulator.link import Copy

# By default a layer without misses takes 120 ns: its gate is read, and its plan acts, at 100, and its hits are done
# at 120. A copy takes 50. Layer 0 has expert 0 resident and routes to it, so its plan acts at 100.


class Run:
    """Rows, views and copies of a scripted run."""

    def __init__(
        self,
        passes: Sequence[Sequence[Sequence[int]]],
        plans: Mapping[tuple[int, int], Script],
        *,
        capacity: int | Sequence[int],
        copy: float = 50.0,
        staging: int = 8,
        requests: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        names = {name: options.pop(name) for name in list(options) if name in make_costs()._fields}
        shape = make_shape(len(passes[0]), 16)
        self.views: list[View] = []
        policy = scripted(shape, plans, capacity=capacity, seen=self.views, **options)
        trace = [make_pass(i, layers, request=(requests or [0] * 99)[i]) for i, layers in enumerate(passes)]
        costs = make_costs(h2d_latency_ns=copy, **names)
        self.copies: list[Copy] = []
        self.rows = layer_rows(
            simulate(trace, policy, shape, 0, costs, ESTIMATES, staging_slots=staging, on_copy=self.copies.append)
        )

    def resident(self, index: int, layer: int) -> list[int]:
        """Residents of a layer in the view of a layer execution."""
        return np.flatnonzero(self.views[index].resident[layer]).tolist()

    @property
    def prefetches(self) -> list[tuple[int, int, int, int]]:
        """Layer, expert, start and end of every landed copy that started as a prefetch."""
        return [(c.layer, c.expert, c.start_ns, c.end_ns) for c in self.copies if c.is_prefetch]

    def count(self, event: str) -> list[int]:
        return [row[f"prefetch_{event}"] for row in self.rows]


# Start and landing


@pytest.mark.parametrize(("copy", "late"), [(50, 0), (120, 0), (121, 1)])
def test_starts_when_the_plan_acts_and_is_resident_on_landing(copy: float, late: int) -> None:
    # layer 1 begins at 120 and its gate is read at 220; what lands at that instant is there
    run = Run([[[0], [1]]], {(0, 0): Script(prefetches=[(1, 1)])}, capacity=1, residents={0: [0]}, copy=copy)
    assert run.prefetches == [(1, 1, 100, 100 + copy)]
    assert run.rows[1]["hits"] == ([] if late else [1])
    assert run.count("late") == [0, late]
    assert run.count("issued") == run.count("started") == [1, 0]
    assert run.count("landed") == [0, 1]
    assert (run.rows[0]["prefetch_layers"], run.rows[0]["prefetch_experts"]) == ([1], [1])


def test_order_by_priority_pair_then_issue() -> None:
    prefetches = [(1, 1, 1, 0), (1, 2, 0, 1), (1, 3, 0, 0), (1, 4, 0, 1), (1, 5, -0.5, 7)]
    run = Run([[[0], [0]]], {(0, 0): Script(prefetches=prefetches)}, capacity=5, residents={0: [0]}, copy=4)
    assert [expert for _, expert, _, _ in run.prefetches] == [5, 3, 2, 4, 1]


def test_later_plans_enter_by_priority() -> None:
    plans = {
        (0, 0): Script(prefetches=[(2, 1, 1), (2, 2, 2), (2, 3, 3)]),
        (0, 1): Script(prefetches=[(2, 4, 2), (2, 5, 1)]),
    }
    run = Run([[[0], [0], [0]]], plans, capacity=8, residents={0: [0], 1: [0]}, copy=125, n_a_ns=100)
    # 1 until 225; at 220 the second plan acts; layer 2 begins at 240, when only 5 has started
    assert [(expert, start) for _, expert, start, _ in run.prefetches] == [(1, 100), (5, 225)]
    assert run.count("dropped_begin") == [0, 0, 3]


def test_no_start_while_demand_is_queued() -> None:
    run = Run([[[0, 2], [1]]], {(0, 0): Script(prefetches=[(1, 1)])}, capacity=2, residents={0: [0]}, copy=200)
    assert run.prefetches == [(1, 1, 300, 500)]
    assert run.rows[0]["transfer_start_ns"] == [100]


def test_no_start_while_demand_waits_for_a_slot() -> None:
    # one slot in all: copy 2 waits for the kernel over copy 1, from 150 to 350, and the prefetch for copy 2
    plans = {(0, 0): Script(on_cpu=[0], retained=[], prefetches=[(1, 1)])}
    costs = {"g_a_ns": 200.0, "transfer_chunk": 1}
    run = Run([[[0, 1, 2], [0]]], plans, capacity=[0, 1], residents={1: [7]}, score={(1, 1): 1}, staging=1, **costs)
    assert run.rows[0]["transfer_start_ns"] == [100, 350]
    assert run.prefetches == [(1, 1, 400, 450)]


def test_a_copy_in_progress_is_not_interrupted() -> None:
    plans = {(0, 0): Script(prefetches=[(2, 1), (2, 2)])}
    run = Run([[[0], [5], [1, 2]]], plans, capacity=2, residents={0: [0]}, copy=250)
    assert run.rows[1]["transfer_start_ns"] == [350]  # demanded at 220, while (2, 1) is copied from 100 to 350
    assert run.prefetches == [(2, 1, 100, 350), (2, 2, 600, 850)]
    assert run.rows[2]["start_ns"] == 620
    assert (run.rows[2]["hits"], run.count("late")) == ([1], [0, 0, 1])


@pytest.mark.parametrize("copy", [150, 120, 121])
def test_no_start_between_reading_and_plan(copy: float) -> None:
    # layer 1 is read at 260 and plans until 300; the link is free from 140 + copy on, or from the reading itself
    plans = {(0, 0): Script(prefetches=[(2, 1), (2, 2)])}
    run = Run([[[0], [0], [2]]], plans, capacity=2, residents={0: [0], 1: [0]}, copy=copy, policy_ns=40)
    assert [start for _, _, start, _ in run.prefetches] == [140, 300]


def test_starts_before_the_reading() -> None:
    plans = {(0, 0): Script(prefetches=[(2, 1), (2, 2)])}
    run = Run([[[0], [0], [2]]], plans, capacity=2, residents={0: [0], 1: [0]}, copy=119, policy_ns=40)
    assert [start for _, _, start, _ in run.prefetches] == [140, 259]


def test_prefetches_are_slowed_while_the_cpu_runs() -> None:
    # batch from 100 to 170; its plan has no transfers, so it is not slowed itself
    plans = {(0, 0): Script(on_cpu=[3], prefetches=[(1, 1), (1, 2)])}
    run = Run(
        [[[0, 3], [0]]], plans, capacity=2, residents={0: [0]}, h2d_slowdown=1.2, cpu_slowdown=2.0, cpu_b0_ns=70.0
    )
    assert [(start, end) for _, _, start, end in run.prefetches] == [(100, 160), (160, 220)]
    run = Run(
        [[[0, 3], [0]]], plans, capacity=2, residents={0: [0]}, h2d_slowdown=1.4, cpu_slowdown=2.0, cpu_b0_ns=70.0
    )
    assert [(start, end) for _, _, start, end in run.prefetches] == [(100, 170)]  # layer 1 begins at 170


def test_the_same_expert_of_another_layer_is_another_expert() -> None:
    plans = {(0, 0): Script(retained=[0, 1], prefetches=[(1, 1)])}
    run = Run([[[0, 1], [1]]], plans, capacity=2, residents={0: [0]})
    assert run.rows[1]["hits"] == [1]


# Drops


def test_dropped_when_its_layer_begins() -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1), (1, 2), (1, 3)])}
    run = Run([[[0], [1, 2]]], plans, capacity=3, residents={0: [0]})
    assert run.prefetches == [(1, 1, 100, 150)]
    assert run.count("dropped_begin") == [0, 2]
    assert run.count("unserved") == [0, 1]  # 2 is missed, 3 is not
    assert (run.rows[1]["hits"], run.rows[1]["transfers"], run.count("late")) == ([1], [2], [0, 0])


def test_unserved_though_the_cpu_computes_it() -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1), (1, 2)]), (0, 1): Script(on_cpu=[2])}
    run = Run([[[0], [2]]], plans, capacity=3, residents={0: [0]})
    assert run.count("unserved") == [0, 1]


def test_dropped_by_the_flag() -> None:
    plans = {
        (0, 0): Script(prefetches=[(2, 1), (2, 2), (2, 3)]),
        (0, 1): Script(clear=True, prefetches=[(2, 4)]),
    }
    run = Run([[[0], [0], [1, 4]]], plans, capacity=4, residents={0: [0], 1: [0]}, copy=130)
    assert run.count("dropped_flag") == [0, 2, 0]
    assert run.prefetches == [(2, 1, 100, 230), (2, 4, 230, 360)]  # what is in progress goes on
    assert (run.rows[2]["hits"], run.rows[2]["transfers"], run.count("late")) == ([1], [4], [0, 0, 1])


def test_the_flag_acts_with_the_plan_and_not_at_the_gate() -> None:
    plans = {(0, 0): Script(prefetches=[(2, 1), (2, 2)]), (0, 1): Script(clear=True)}
    run = Run([[[0], [0], [0]]], plans, capacity=4, residents={0: [0], 1: [0]}, copy=150, policy_ns=40)
    # (2, 1) lands at 290, between reading (260) and plan (300), so (2, 2) is still queued when the flag acts
    assert run.count("dropped_flag") == [0, 1, 0]
    assert run.prefetches == [(2, 1, 140, 290)]


def test_dropped_for_want_of_a_victim() -> None:
    options = {
        "capacity": [1, 2],
        "residents": {0: [0], 1: [1, 2]},
        "score": {(1, 1): 3, (1, 2): 4, (1, 3): 3, (1, 4): 5},
    }
    run = Run([[[0], [0]]], {(0, 0): Script(prefetches=[(1, 3), (1, 4)])}, **options)
    assert run.count("dropped_victim") == [1, 0]  # 3 does not score strictly above 1, but 4 does
    assert run.prefetches == [(1, 4, 100, 150)]
    assert run.resident(1, 1) == [2, 4]


def test_dropped_if_there_is_nothing_left_to_bring() -> None:
    # 1 is transferred and will be retained, before its prefetch would start
    run = Run([[[1]]], {(0, 0): Script(retained=[1], prefetches=[(0, 1)])}, capacity=2)
    assert (run.count("issued"), run.count("started"), run.count("dropped_victim")) == ([1], [0], [1])
    # not retained: the prefetch brings it again
    run = Run([[[1]], [[1]]], {(0, 0): Script(retained=[], prefetches=[(0, 1)])}, capacity=2)
    assert run.count("started") == [1, 0]
    assert run.rows[1]["hits"] == [1]


def test_dropped_if_queued_twice_and_landed_once() -> None:
    # (2, 1) until 225, (2, 2) until 350; layer 1 waits for its CPU until 520
    plans = {(0, 0): Script(prefetches=[(2, 1), (2, 2)]), (0, 1): Script(on_cpu=[1], prefetches=[(2, 2)])}
    options = {"residents": {0: [0], 1: [0]}, "copy": 125, "cpu_b0_ns": 300.0}
    run = Run([[[0], [0, 1], [2]]], plans, capacity=4, **options)
    assert [expert for _, expert, _, _ in run.prefetches] == [1, 2]
    assert (run.count("issued"), run.count("dropped_victim")) == ([2, 1, 0], [0, 1, 0])
    assert run.rows[2]["hits"] == [2]


def test_late_and_not_unserved_if_queued_twice_and_in_flight() -> None:
    # (2, 1) is dropped at 240 as (2, 1) is copied from 225 to 350
    plans = {(0, 0): Script(prefetches=[(2, 5), (2, 1)]), (0, 1): Script(prefetches=[(2, 1)])}
    run = Run([[[0], [0], [1]]], plans, capacity=4, residents={0: [0], 1: [0]}, copy=125)
    assert (run.count("dropped_begin"), run.count("late")) == ([0, 0, 1], [0, 0, 1])
    assert run.count("unserved") == [0, 0, 0]


# Victims


def test_the_lowest_score_gives_way_at_once() -> None:
    options = {"residents": {0: [0], 1: [1, 2]}, "score": {(1, 1): 4, (1, 2): 3, (1, 3): 5}}
    run = Run([[[0], [2, 3]]], {(0, 0): Script(prefetches=[(1, 3)])}, capacity=2, copy=500, **options)
    assert run.resident(1, 1) == [1]
    assert run.views[1].in_flight[1].nonzero()[0].tolist() == [3]
    assert run.views[1].free_slots == 0
    assert run.rows[1]["transfers"] == [3, 2]


@pytest.mark.parametrize(("activated", "left"), [([1], [1, 3]), ([2], [2, 3]), ([1, 2], [1, 3]), ([9], [1, 3])])
def test_ties_least_recently_activated_then_highest_id(activated: list[int], left: list[int]) -> None:
    options = {"residents": {0: [0], 1: [1, 2]}, "score": {(1, 3): 1}}
    passes = [[[0], activated], [[0], [3]]]
    run = Run(passes, {(1, 0): Script(prefetches=[(1, 3)])}, capacity=2, **options)
    assert run.resident(3, 1) == left


def test_activation_counts_wherever_it_was_served() -> None:
    # 5 is computed on the CPU in the first forward, and placed as resident by a prefetch before the second
    plans = {
        (0, 1): Script(on_cpu=[5], prefetches=[(1, 5)]),
        (1, 0): Script(prefetches=[(1, 3)]),
    }
    options = {"residents": {0: [0], 1: [6]}, "score": {(1, 3): 1}}
    run = Run([[[0], [5]], [[0], [3]]], plans, capacity=[1, 2], **options)
    assert run.resident(3, 1) == [3, 5]  # 6 was never activated


def test_scores_are_read_when_the_copy_would_start() -> None:
    # (2, 4) is copied from 100 to 250; at 220 the scores change; layer 1 waits for its CPU until 520
    plans = {
        (0, 0): Script(prefetches=[(2, 4), (2, 3)]),
        (0, 1): Script(on_cpu=[6], score={(2, 2): 8, (2, 5): 0}),
    }
    score = {(2, 1): 1, (2, 2): 2, (2, 5): 3, (2, 3): 9, (2, 4): 9}
    options = {"residents": {0: [0], 1: [0], 2: [1, 2, 5]}, "score": score, "cpu_b0_ns": 300.0}
    run = Run([[[0], [0, 6], [0]]], plans, capacity=3, copy=150, **options)
    assert run.resident(2, 2) == [2, 3, 4]


@pytest.mark.parametrize(("copy", "evicted"), [(19, False), (20, True), (50, True)])
def test_hits_are_safe_until_their_kernel_has_run(copy: float, evicted: bool) -> None:
    # hits run from 100 to 120; the prefetch looks for a victim when copy 2 has landed
    plans = {(0, 0): Script(retained=[0], prefetches=[(0, 3)])}
    run = Run([[[0, 2]], [[0]]], plans, capacity=1, residents={0: [0]}, score={(0, 3): 5, (0, 0): 1}, copy=copy)
    assert run.count("dropped_victim") == [int(not evicted), 0]
    assert run.resident(1, 0) == ([3] if evicted else [0])


def test_a_hit_is_safe_only_from_its_gate_on() -> None:
    # issued at 150, while layer 1, which began at 120 and is read at 220, will activate its resident 1
    plans = {(0, 0): Script(prefetches=[(1, 3)], delay_ns=50)}
    run = Run([[[0], [1]]], plans, capacity=1, residents={0: [0], 1: [1]}, score={(1, 3): 5})
    assert run.prefetches == [(1, 3, 150, 200)]
    assert (run.rows[1]["hits"], run.rows[1]["transfers"]) == ([], [1])


def test_residents_of_other_layers_are_not_victims() -> None:
    run = Run(
        [[[0], [0]]], {(0, 0): Script(prefetches=[(1, 3)])}, capacity=[2, 0], residents={0: [0, 1]}, score={(1, 3): 5}
    )
    assert run.count("dropped_victim") == [1, 0]


def test_in_a_global_pool_all_layers_give_way() -> None:
    # (0, 0) scores lowest but is in use; then (0, 4) and (1, 2) tie, and (1, 2) has the higher number
    score = {(1, 3): 5, (0, 0): 0, (0, 4): 1, (1, 2): 1, (1, 1): 2}
    options = {"residents": {0: [0, 4], 1: [1, 2]}, "score": score, "pool": "global"}
    run = Run([[[0], [2, 3]]], {(0, 0): Script(prefetches=[(1, 3)])}, capacity=4, **options)
    assert np.argwhere(run.views[1].resident).tolist() == [[0, 0], [0, 4], [1, 1], [1, 3]]
    assert (run.rows[1]["hits"], run.rows[1]["transfers"]) == ([3], [2])


# Reservations


def test_a_copy_in_flight_counts_in_its_pool() -> None:
    run = Run(
        [[[0], [5]]], {(0, 0): Script(prefetches=[(1, 1)])}, capacity=[1, 3], residents={0: [0], 1: [2]}, copy=500
    )
    assert run.views[1].free_slots == 3 - 1 - 1
    assert run.views[1].in_flight.sum() == 1


@pytest.mark.parametrize(("retained", "started"), [([0, 1], 0), ([0], 1)])
def test_slots_of_transfers_to_be_retained_are_not_free(retained: list[int], started: int) -> None:
    plans = {(0, 0): Script(retained=retained, prefetches=[(0, 5)])}
    run = Run([[[0, 1]]], plans, capacity=2, residents={0: [0]}, score={(0, 0): 9, (0, 5): 5})
    assert run.count("started") == [started]


def test_those_slots_matter_in_their_own_pool_alone() -> None:
    plans = {(0, 0): Script(retained=[0, 1], prefetches=[(1, 5)])}
    run = Run([[[0, 1], [5]]], plans, capacity=[2, 1], residents={0: [0]}, score={(1, 5): -1})
    assert run.rows[1]["hits"] == [5]


def test_a_resident_that_leaves_unused_frees_its_slot_at_once() -> None:
    plans = {(0, 0): Script(on_cpu=[0], retained=[], prefetches=[(0, 5)])}
    run = Run([[[0]]], plans, capacity=1, residents={0: [7]}, score={(0, 5): -1}, copy=40)
    assert run.prefetches == [(0, 5, 100, 140)]


@pytest.mark.parametrize(("copy", "started"), [(19, 0), (20, 1)])
def test_a_hit_that_leaves_frees_its_slot_when_it_was_used(copy: float, started: int) -> None:
    plans = {(0, 0): Script(retained=[], prefetches=[(0, 5)])}
    run = Run([[[7, 2]]], plans, capacity=1, residents={0: [7]}, score={(0, 5): -1}, copy=copy)
    assert run.count("started") == [started]


def test_a_free_slot_that_a_demand_copy_has_borrowed_is_waited_for() -> None:
    # 3 + 4 slots, all taken by demand copies at 130; the first chunk runs from 120 to 320
    plans = {(0, 0): Script(retained=[], prefetches=[(0, 9)])}
    run = Run([[range(7)]], plans, capacity=3, staging=4, copy=5, g_a_ns=200.0)
    assert run.rows[0]["transfer_end_ns"][-1] == 135
    assert run.prefetches == [(0, 9, 320, 325)]
    assert run.count("dropped_victim") == [0]


# Promotion


def test_promotion_heads_the_first_chunk() -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1)]), (0, 1): Script(transfers=[2, 3, 4, 5, 1], retained=[1])}
    run = Run([[[0], [1, 2, 3, 4, 5]], [[0], [1]]], plans, capacity=1, residents={0: [0]}, copy=500, g_b_ns=10.0)
    row = run.rows[1]
    # layer 0 ends at 130; 1 is copied from 100 to 600; chunk 1 is 1, 2, 3, 4, chunk 2 is 5
    assert row["transfers"] == [1, 2, 3, 4, 5]
    assert row["transfer_start_ns"] == [100, 600, 1100, 1600, 2100]
    assert row["transfer_end_ns"] == [600, 1100, 1600, 2100, 2600]
    assert row["end_ns"] == 2600 + 30
    assert (row["num_promoted"], run.count("late"), run.count("unserved")) == (1, [0, 1, 0, 0], [0, 0, 0, 0])
    assert (row["hits"], run.rows[3]["hits"]) == ([], [1])
    assert len(run.copies) == 5


def test_a_promoted_copy_alone_makes_the_cpu_batch_slow() -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1)]), (0, 1): Script(on_cpu=[3])}
    run = Run([[[0], [1, 3]]], plans, capacity=1, residents={0: [0]}, copy=145, cpu_slowdown=2.0, policy_ns=40)
    # layer 1 is read at 260; its prefetch lands at 285, before the plan acts at 300
    row = run.rows[1]
    assert (row["transfers"], row["transfer_start_ns"], row["transfer_end_ns"]) == ([1], [140], [285])
    assert row["cpu_end_ns"] == row["end_ns"] == 300 + 140


def test_a_promoted_copy_that_lands_before_the_plan_acts_is_computed_then() -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1)])}
    run = Run([[[0], [1]]], plans, capacity=1, residents={0: [0]}, copy=145, policy_ns=40)
    assert (run.rows[1]["plan_ns"], run.rows[1]["end_ns"]) == (300, 320)
    assert (run.count("landed"), run.count("late")) == ([0, 1], [0, 1])


def test_a_promoted_expert_is_safe_until_its_kernel_has_run() -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1)]), (0, 1): Script(retained=[1], prefetches=[(1, 6)])}
    run = Run([[[0], [1]]], plans, capacity=1, residents={0: [0]}, copy=145, score={(1, 6): 9})
    # lands at 245 and runs until 265; the prefetch looks for a victim at 245
    assert run.count("dropped_victim") == [0, 1]
    assert run.rows[1]["end_ns"] == 265


def test_in_flight_and_not_activated_is_no_promotion() -> None:
    run = Run([[[0], [2]]], {(0, 0): Script(prefetches=[(1, 1)])}, capacity=[1, 2], residents={0: [0]}, copy=500)
    assert (run.rows[1]["transfers"], run.rows[1]["transfer_start_ns"]) == ([2], [600])
    assert (run.count("late"), run.count("landed")) == ([0, 0], [0, 1])


# Delay


def test_delay_is_counted_from_the_plan() -> None:
    plans = {(0, 0): Script(prefetches=[(2, 1)], delay_ns=30)}
    run = Run([[[0], [0], [1]]], plans, capacity=1, residents={0: [0], 1: [0]}, policy_ns=40, copy=10)
    assert run.prefetches == [(2, 1, 170, 180)]
    assert run.count("issued") == [0, 1, 0]  # layer 0 ended at 160


def test_the_flag_spares_what_is_not_issued_yet() -> None:
    plans = {(0, 0): Script(prefetches=[(2, 1)], delay_ns=130), (0, 1): Script(clear=True)}
    run = Run([[[0], [0], [1]]], plans, capacity=1, residents={0: [0], 1: [0]})
    assert (run.count("dropped_flag"), run.count("issued")) == ([0, 0, 0], [0, 1, 0])
    assert run.prefetches == [(2, 1, 230, 280)]


def test_at_one_instant_the_flag_comes_before_the_issue() -> None:
    plans = {(0, 0): Script(prefetches=[(2, 1)], delay_ns=120), (0, 1): Script(clear=True, prefetches=[(2, 2)])}
    run = Run([[[0], [0], [1]]], plans, capacity=2, residents={0: [0], 1: [0]}, copy=10)
    assert run.count("dropped_flag") == [0, 0, 0]
    assert [expert for _, expert, _, _ in run.prefetches] == [1, 2]  # the older plan's first


@pytest.mark.parametrize("delay", [20, 100])
def test_issued_after_its_layer_began_it_is_for_the_next_forward(delay: int) -> None:
    plans = {(0, 0): Script(prefetches=[(1, 3)], delay_ns=delay)}
    run = Run([[[0], [0]], [[0], [3]]], plans, capacity=1, residents={0: [0], 1: [0]}, score={(1, 3): 1})
    assert run.count("dropped_begin") == [0, 0, 0, 0]
    assert run.rows[3]["hits"] == [3]


@pytest.mark.parametrize(("delay", "dropped"), [(19, 1), (20, 0)])
def test_issued_at_the_instant_its_layer_begins_it_is_not_dropped(delay: int, dropped: int) -> None:
    # (2, 9) is copied from 100 to 300; layer 1's plan acts at 220, layer 2 begins at 240
    plans = {(0, 0): Script(prefetches=[(2, 9)]), (0, 1): Script(prefetches=[(2, 3)], delay_ns=delay)}
    run = Run([[[0], [0], [0]]], plans, capacity=2, residents={0: [0], 1: [0]}, copy=200)
    assert run.count("dropped_begin") == [0, 0, dropped]
    assert run.count("issued") == [1, dropped, 1 - dropped]


# Across layers, forwards and requests


def test_a_prefetch_for_the_same_layer_is_for_the_next_forward() -> None:
    # lands at 150, just as the next forward begins: still counted in the first
    run = Run([[[0]], [[5]]], {(0, 0): Script(prefetches=[(0, 5)])}, capacity=2, residents={0: [0]}, tail_ns=30)
    assert (run.count("landed"), run.count("dropped_begin")) == ([1, 0], [0, 0])
    assert run.rows[1]["hits"] == [5]


def test_a_copy_goes_on_into_the_next_request() -> None:
    plans = {(0, 0): Script(prefetches=[(0, 5)])}
    run = Run([[[0]], [[5]]], plans, capacity=2, residents={0: [0]}, tail_ns=30, copy=200, requests=[0, 1])
    assert (run.rows[1]["start_ns"], run.rows[1]["transfer_start_ns"]) == (150, [100])
    assert (run.count("late"), run.count("landed")) == ([0, 1], [0, 1])


@pytest.mark.parametrize(("copy", "dropped"), [(150, 1), (140, 1), (130, 0)])
def test_the_queue_goes_on_until_its_layer_begins_again(copy: float, dropped: int) -> None:
    # layer 1's plan acts at 220; it begins again at 360, and what would start at that instant is dropped
    plans = {(0, 1): Script(prefetches=[(1, 4), (1, 5)])}
    run = Run([[[0], [0]], [[0], [5]]], plans, capacity=3, residents={0: [0], 1: [0]}, copy=copy)
    assert run.count("dropped_begin") == [0, 0, 0, dropped]
    assert run.count("unserved") == [0, 0, 0, dropped]
    assert run.count("late") == [0, 0, 0, 1 - dropped]
    assert run.count("started") == [0, 1, 1 - dropped, 0]


def test_starts_during_the_tail_count_in_the_last_layer() -> None:
    plans = {(0, 0): Script(prefetches=[(0, 4), (0, 5)])}
    run = Run([[[0]], [[0]]], plans, capacity=3, residents={0: [0]}, tail_ns=100)
    assert run.prefetches == [(0, 4, 100, 150), (0, 5, 150, 200)]
    assert (run.count("started"), run.count("landed")) == ([2, 0], [2, 0])


def test_the_boundary_sees_what_landed_in_the_tail() -> None:
    seen = []

    def boundary(params: Any, state: Any, end: Any, view: View) -> Any:
        seen.append(view.resident[0].nonzero()[0].tolist())
        return view.capacity.copy(), np.zeros_like(view.resident)

    plans = {(0, 0): Script(prefetches=[(0, 5)])}
    Run([[[0]]], plans, capacity=2, residents={0: [0]}, tail_ns=30, boundary=boundary)
    assert seen == [[0, 5]]


# Unused


@pytest.mark.parametrize(("activated", "unused"), [(1, 0), (2, 1)])
def test_unused_if_it_leaves_without_having_been_activated(activated: int, unused: int) -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1)]), (0, 1): Script(retained=[])}
    run = Run([[[0], [activated]]], plans, capacity=1, residents={0: [0]})
    assert run.count("unused") == [0, unused]


def test_unused_if_it_gives_way_to_another_prefetch() -> None:
    plans = {(0, 0): Script(prefetches=[(2, 1), (2, 2)])}
    run = Run([[[0], [0], [0]]], plans, capacity=1, residents={0: [0], 1: [0]}, score={(2, 1): 1, (2, 2): 2})
    # (2, 1) lands at 150 and gives way at once, while layer 1 runs
    assert run.count("unused") == [0, 1, 0]
    assert run.resident(2, 2) == [2]


def test_a_late_one_was_used() -> None:
    plans = {(0, 0): Script(prefetches=[(1, 1)]), (1, 1): Script(retained=[])}
    run = Run([[[0], [1]], [[0], [0]]], plans, capacity=1, residents={0: [0]}, copy=500)
    assert sum(run.count("unused")) == 0


def test_evicted_by_the_boundary_without_having_been_activated() -> None:
    def boundary(params: Any, state: Any, end: Any, view: View) -> Any:
        return view.capacity.copy(), view.resident & (np.arange(16) == 5)

    plans = {(0, 0): Script(prefetches=[(0, 5)])}
    run = Run([[[0]], [[0]]], plans, capacity=2, residents={0: [0]}, tail_ns=30, boundary=boundary)
    assert run.count("unused") == [1, 0]


# Errors


def test_prefetching_needs_a_score() -> None:
    with pytest.raises(PolicyError, match="score"):
        Run([[[0], [1]]], {(0, 0): Script(prefetches=[(1, 1)])}, capacity=1, residents={0: [0]}, has_score=False)


def test_arrays_that_a_policy_uses_again_are_copied() -> None:
    shape = make_shape(2, 4)
    policy = scripted(shape, {(0, 0): Script(prefetches=[(1, 1)], delay_ns=150)}, capacity=1, residents={0: [0]})
    target = np.zeros((1, 2), np.int64)

    def decide(params: Any, state: Any, step: Any, view: View) -> Plan:
        plan = policy.decide(params, state, step, view)
        target[:] = plan.prefetches if len(plan.prefetches) else 3
        return plan._replace(prefetches=target) if len(plan.prefetches) else plan

    shared = type(policy)(**{**vars(policy), "decide": decide})
    # issued at 250, when layer 1 has begun and been read
    passes = [make_pass(0, [[0], [2]]), make_pass(1, [[0], [1]])]
    rows = layer_rows(simulate(passes, shared, shape, 0, make_costs(), ESTIMATES))
    assert (rows[0]["prefetch_experts"], rows[3]["hits"]) == ([1], [1])


# Laws


def draw_run(seed: int) -> tuple[list[dict[str, Any]], list[Copy], Any]:
    rng = np.random.default_rng(seed)
    num_layers, num_experts = int(rng.integers(1, 5)), int(rng.integers(2, 13))
    shape, passes = random_passes(
        rng,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=min(num_experts, 2),
        num_requests=2,
        num_blocks=1,
        batch=2,
    )
    round_to = int(rng.choice([1, 10, 50]))

    def draw(high: int) -> float:
        return float(rng.integers(0, high // round_to + 1) * round_to)

    costs = make_costs(
        n_a_ns=draw(100),
        g_a_ns=draw(100),
        g_b_ns=draw(50),
        h2d_latency_ns=draw(200) + round_to,
        cpu_b0_ns=draw(200),
        tail_ns=int(draw(200)),
        policy_ns=int(draw(50)),
        h2d_slowdown=float(rng.choice([1.0, 1.5])),
        transfer_chunk=int(rng.integers(1, 5)),
    )
    pool = str(rng.choice(["layer", "global"]))
    sizes = rng.integers(0, num_experts + 1, num_layers)
    capacity = [int(sizes.sum())] if pool == "global" else sizes.tolist()
    policy = random_policy(shape, seed, capacity=capacity, pool=pool, prefetches=True, moves_slots=True)
    staging = costs.transfer_chunk + int(rng.integers(0, 3))
    copies: list[Copy] = []
    log = simulate(passes, policy, shape, 0, costs, ESTIMATES, staging_slots=staging, on_copy=copies.append)
    return layer_rows(log), copies, costs


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_laws_with_prefetches(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(des, "Slots", WatchedSlots)
        rows, copies, costs = draw_run(seed)
    check_laws(rows, copies, costs.policy_ns)


def test_the_same_run_twice_is_the_same() -> None:
    for seed in range(20):
        assert draw_run(seed)[0] == draw_run(seed)[0]
