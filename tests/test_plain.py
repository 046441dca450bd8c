"""Plans made of lists and arrays, and the choice of who stays."""

import numpy as np
import pytest
from reference import pass_of, shape_of, shown

from policies.check import check_plan
from policies.contract import PlanError
from policies.plain import keep_best, missed, plan
from policies.steps import Steps, step_at


def gate(activated, resident, capacity, in_flight=(), layer=0, num_layers=1, num_experts=6):
    """Step and view of a layer that activates these; residents and copies in flight are (layer, expert)."""
    shape = shape_of(num_layers, num_experts)
    ids = np.tile(np.array(activated)[:, None], (num_layers, 1, 1))
    step = step_at(Steps(shape).read(pass_of(ids)), layer)
    here, coming = (np.zeros((num_layers, num_experts), bool) for _ in range(2))
    for mask, pairs in ((here, resident), (coming, in_flight)):
        for pair in pairs:
            mask[pair] = True
    slots = np.array(capacity)
    pool = slice(layer, layer + 1) if slots.size > 1 or num_layers == 1 else slice(None)
    free = int(slots[layer if slots.size > 1 else 0] - here[pool].sum() - coming[pool].sum())
    return step, shown(here, coming, slots, free)


def test_all_misses_are_copied_unless_said_otherwise():
    step, view = gate([1, 2, 4], [(0, 2), (0, 5)], [3])
    assert missed(step, view).tolist() == [1, 4]
    made = plan(step, view, [2])
    check_plan(made, step, view)
    assert (made.transfers.tolist(), made.on_cpu.tolist()) == ([1, 4], [])
    assert np.flatnonzero(made.retained).tolist() == [2]
    split = plan(step, view, [2, 4], on_cpu=[1])
    check_plan(split, step, view)
    assert (split.transfers.tolist(), split.on_cpu.tolist()) == ([4], [1])
    ordered = plan(step, view, np.arange(6) == 2, transfers=[4, 1])
    check_plan(ordered, step, view)
    assert ordered.transfers.tolist() == [4, 1]


def test_the_best_of_residents_and_transfers_stay():
    step, view = gate([1, 2, 4], [(0, 2), (0, 5)], [3])
    score = np.array([[9.0, 1, 2, 9, 3, 2]])
    kept = keep_best(step, view, score)
    assert np.flatnonzero(kept).tolist() == [2, 4, 5]  # 0 and 3 are neither there nor copied
    check_plan(plan(step, view, kept), step, view)
    assert np.flatnonzero(keep_best(step, view, score, on_cpu=[4])).tolist() == [1, 2, 5]
    level = keep_best(step, view, np.zeros((1, 6)))
    assert np.flatnonzero(level).tolist() == [1, 2, 4]  # ties go to the lower id


def test_copies_in_flight_keep_their_slots():
    step, view = gate([1, 2, 4], [(0, 2)], [2], in_flight=[(0, 4)])
    kept = keep_best(step, view, [[0, 9, 1, 0, 0, 0]])
    assert np.flatnonzero(kept).tolist() == [1, 4]  # the promoted one, and one more
    check_plan(plan(step, view, kept), step, view)
    step, view = gate([1, 2], [(0, 2)], [2], in_flight=[(0, 4)])
    kept = keep_best(step, view, [[0, 9, 1, 0, 0, 0]])
    assert np.flatnonzero(kept).tolist() == [1]  # the other slot is the prefetch's
    check_plan(plan(step, view, kept), step, view)


def test_a_global_pool_is_ranked_as_a_whole():
    step, view = gate([1, 2], [(0, 0), (0, 3), (1, 2)], [3], layer=1, num_layers=2)
    score = [[5, 0, 0, 1, 0, 0], [0, 4, 2, 0, 0, 0]]
    kept = keep_best(step, view, score)
    assert np.flatnonzero(kept).tolist() == [0, 6 + 1, 6 + 2]
    check_plan(plan(step, view, kept), step, view)


def test_prefetches_are_pairs_with_or_without_a_priority():
    step, view = gate([1], [(0, 1)], [2, 2], num_layers=2)
    made = plan(step, view, [1], prefetches=[(1, 3), (1, 4, -2.5)], clear_prefetches=True, prefetch_delay_ns=7)
    check_plan(made, step, view)
    assert made.prefetches.tolist() == [[1, 3], [1, 4]]
    assert made.prefetch_priority.tolist() == [[0.0, 0.0], [-2.5, 0.0]]
    assert (made.clear_prefetches, made.prefetch_delay_ns) == (True, 7)


def test_a_mask_is_copied():
    step, view = gate([1], [(0, 1)], [2])
    mask = view.resident[0].copy()
    made = plan(step, view, mask)
    mask[1] = False
    assert made.retained[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retained": [6]}, r"retained is \[6\], must be a mask of 6 experts, or ids of 0 to 5"),
        ({"retained": [True, False]}, "must be a mask of 6 experts"),
        ({"retained": [0.5]}, r"retained is \[0.5\], must be ids"),
        ({"retained": [], "on_cpu": ["x"]}, "on_cpu is .*, must be ids of experts"),
        ({"retained": [], "prefetches": [(1,)]}, r"prefetch \(1,\): must be \(layer, expert\)"),
    ],
)
def test_what_cannot_be_a_plan_is_refused(arguments, message):
    step, view = gate([1], [], [2])
    with pytest.raises(PlanError, match=message):
        plan(step, view, **arguments)


@pytest.mark.parametrize("score", [np.zeros(6), np.full((1, 6), np.nan)])
def test_scores_are_one_number_for_each_expert(score):
    step, view = gate([1], [], [2])
    with pytest.raises(PlanError, match=r"score is of shape .*, must be \(1, 6\) without nan"):
        keep_best(step, view, score)
