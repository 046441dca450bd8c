"""Policies broken in one rule each: the check must name the place and the experts."""

import numpy as np
import pytest
from reference import shown
from test_driver import plan

from policies.check import check_place, check_plan
from policies.contract import PlanError, Step

E = 6
WHERE = "request 4, forward 9, layer 1: "


def step_with(activated, layer=1):
    load = np.isin(np.arange(E), activated).astype(np.int64)
    ids = np.flatnonzero(load)[:, None]
    one = np.ones(len(ids), np.int64)
    return Step(9, layer, 1, ids, np.ones(ids.shape), load, np.ones(len(ids)), one * 4, one * 0, one * 0)


def view_with(resident=(), in_flight=(), capacity=(3, 3)):
    held, coming = np.zeros((2, E), bool), np.zeros((2, E), bool)
    for pair in resident:
        held[pair] = True
    for pair in in_flight:
        coming[pair] = True
    return shown(held, coming, np.array(capacity))


def prefetching(pairs, priority=None):
    pairs = np.array(pairs, np.int64).reshape(-1, 2)
    return {"prefetches": pairs, "prefetch_priority": np.zeros(pairs.shape) if priority is None else np.array(priority)}


# The layer activates 0, 1, 2, 3; 0 is resident, and 2 in flight
STEP = step_with([0, 1, 2, 3])
VIEW = view_with([(1, 0), (0, 5)], [(1, 2)])


@pytest.mark.parametrize(
    "accepted",
    [
        plan([2, 1], [3], [0, 1, 2]),
        plan([3, 2, 1], [], [2]),
        plan([2], [1, 3], [2], **prefetching([(0, 4), (1, 4), (1, 1)])),
    ],
)
def test_accepts(accepted):
    check_plan(accepted, STEP, VIEW)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (plan([1, 2, 3, 6], [], [2]), "transfers names expert 6, allowed are 0 to 5"),
        (plan([1, 2], [3, -1], [2]), "on_cpu names expert -1, allowed are 0 to 5"),
        (
            plan([1, 2, 3, 1], [], [2]),
            r"expert 1 is served twice: missed \[1, 2, 3\], transfers \[1, 2, 3, 1\], on CPU \[\]",
        ),
        (plan([1, 2], [3, 3], [2]), "expert 3 is served twice"),
        (plan([1, 2, 3], [1], [2]), "expert 1 is served twice"),
        (plan([0, 1, 2, 3], [], [2]), "expert 0 is served but was not missed"),
        (plan([1, 2, 3], [5], [2]), "expert 5 is served but was not missed"),
        (plan([2, 1], [], [2]), r"expert 3 was missed and is not served: missed \[1, 2, 3\], transfers \[2, 1\]"),
        (plan([1, 3], [2], [0]), "expert 2 is in flight and must be among the transfers"),
        (
            plan([2], [1, 3], [1, 2]),
            r"expert 1 of layer 1 is retained but neither resident nor transferred: transfers \[2\]",
        ),
        (plan([2, 1, 3], [], [4, 2]), "expert 4 of layer 1 is retained"),
        (plan([2, 1, 3], [], [0, 1, 3]), "expert 2 is in flight and transferred, and must be retained"),
        (plan([2, 1, 3], [], [0, 1, 2, 3]), r"need 4 slots, the capacity is 3: retained \[0, 1, 2, 3\]"),
        (plan([1, 2, 3], [], [2], prefetch_delay_ns=-1), "prefetch_delay_ns is -1, must be at least 0"),
        (
            plan([1, 2, 3], [], [2], **prefetching([(2, 1)])),
            "prefetch of expert 1 of layer 2, allowed are layers 0 to 1",
        ),
        (
            plan([1, 2, 3], [], [2], **prefetching([(0, 6)])),
            "prefetch of expert 6 of layer 0, allowed are layers 0 to 1",
        ),
        (plan([1, 2, 3], [], [2], **prefetching([(0, 5)])), "prefetch of expert 5 of layer 0, which is resident"),
        (plan([1, 2, 3], [], [2], **prefetching([(1, 2)])), "prefetch of expert 2 of layer 1, which is resident or in"),
        (plan([1, 2, 3], [], [2], **prefetching([(0, 1), (0, 1)])), "prefetch of expert 1 of layer 0 is listed twice"),
        (plan([1, 2, 3], [], [2], **prefetching([(0, 1)], [[0, np.nan]])), "has priority .*nan.*, must be numbers"),
        (plan([1, 2, 3], [], [2], size=12), r"retained is bool of shape \(12,\), must be bool of \(6\)"),
        (plan([1, 2, 3], [], [2])._replace(transfers=[1, 2, 3]), "transfers is list, must be an array"),
        (
            plan([1, 2, 3], [], [2])._replace(on_cpu=np.empty(0)),
            r"on_cpu is float64 of shape \(0,\), must be int64 of \(any\)",
        ),
        (tuple(plan([1, 2, 3], [], [2])), "the plan is tuple, must be Plan"),
        (None, "the plan is NoneType, must be Plan"),
    ],
)
def test_refuses(broken, message):
    with pytest.raises(PlanError, match=WHERE + ".*" + message):
        check_plan(broken, STEP, VIEW)


def test_retained_leaves_room_for_copies_in_flight():
    view = view_with([(1, 0)], [(1, 4)], (3, 2))
    check_plan(plan([1], retained=[0]), step_with([0, 1]), view)
    check_plan(plan([1], retained=[0, 4]), step_with([0, 1]), view)
    with pytest.raises(PlanError, match="retained and copies in flight need 3 slots, the capacity is 2"):
        check_plan(plan([1], retained=[0, 1]), step_with([0, 1]), view)


def test_a_global_pool_is_checked_as_a_whole():
    view = view_with([(0, 0), (0, 1), (1, 5)], [(0, 4)], (5,))
    step = step_with([2, 5])
    check_plan(plan([2], retained=[0, 1, 8, 11], size=12), step, view)
    for retained, message in (
        ([0, 1, 2, 8], "expert 2 of layer 0 is retained but neither"),
        ([0, 7], "expert 1 of layer 1 is retained but neither"),
    ):
        with pytest.raises(PlanError, match=WHERE + message):
            check_plan(plan([2], retained=retained, size=12), step, view)
    with pytest.raises(PlanError, match="need 5 slots, the capacity is 4"):
        check_plan(plan([2], retained=[0, 1, 8, 11], size=12), step, view._replace(capacity=np.array([4])))
    with pytest.raises(PlanError, match=r"retained is bool of shape \(6,\), must be bool of \(12\)"):
        check_plan(plan([2], retained=[0]), step, view)


def test_a_place_fits_into_its_pool():
    placed = np.isin(np.arange(E), [1, 2, 3])
    for capacity in ((0, 3), (5,)):
        check_place(placed, STEP, view_with([(1, 0), (0, 4), (0, 5)], capacity=capacity))
    with pytest.raises(PlanError, match=WHERE + "places 3 experts, the capacity is 2"):
        check_place(placed, STEP, view_with([(0, 5)], capacity=(3, 2)))
    with pytest.raises(PlanError, match=WHERE + "places 3 experts beside 2 of other layers, the capacity is 4"):
        check_place(placed, STEP, view_with([(1, 0), (0, 4), (0, 5)], capacity=(4,)))
