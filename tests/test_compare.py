"""Numbers of a comparison against pen and paper."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured import made

from experiments.compare_cells import cell_of
from experiments.compare_judge import SCOPE, compare
from experiments.compare_pairs import pairs_of
from experiments.compare_ranks import tau_b
from experiments.compare_table import as_markdown, as_text
from experiments.errors import ConfigError


def cell(simulated, *replayed):
    (pair,), _ = pairs_of([simulated, *replayed])
    return cell_of(pair)


def test_errors_by_hand():
    """Two repeats of (10, 20) and (12, 22) ms against simulated (11, 20): TPOT 15 and 17, mean 16."""
    found = cell(made("lru", [11, 20]), made("lru", [10, 20], replay=True), made("lru", [12, 22], replay=True))
    assert found.simulated_ms == 15.5
    assert (found.measured_ms, found.measured_low_ms, found.measured_high_ms) == (16, 15, 17)
    assert found.spread_ms == 2
    assert found.spread_ratio == pytest.approx(2 / 16)
    assert found.tpot_error == pytest.approx(15.5 / 16 - 1)
    # forwards: means 11 and 21
    assert found.forward_error == pytest.approx((11 / 11 + 20 / 21) / 2 - 1)
    assert found.forward_mape == pytest.approx((0 + 1 / 21) / 2)
    assert found.forward_noise == pytest.approx((1 / 11 + 1 / 21) / 2)
    assert found.p50_error == pytest.approx(15.5 / 16 - 1)
    # P90 between two values: 0.1 of the lower one, 0.9 of the upper one
    assert found.p90_error == pytest.approx(
        (0.1 * 11 + 0.9 * 20) / ((0.1 * 10 + 0.9 * 20 + 0.1 * 12 + 0.9 * 22) / 2) - 1
    )
    assert found.p99_error is None
    assert found.tail_error == found.p90_error
    assert (found.num_repeats, found.num_forwards) == (2, 2)
    assert found.same_decisions is True


def test_p99_is_judged_from_200_forwards_on():
    ramp = list(range(1, 201))
    found = cell(made("lru", ramp), made("lru", [2 * ms for ms in ramp], replay=True))
    assert found.p99_error == found.tail_error == pytest.approx(-0.5)
    assert cell(made("lru", ramp[1:]), made("lru", ramp[1:], replay=True)).p99_error is None


def test_without_repeats_the_spread_is_unknown():
    found = cell(made("lru", [10]), made("lru", [10], replay=True))
    assert (found.spread_ms, found.spread_ratio, found.forward_noise) == (None, None, None)


def test_shares_of_prefetching_policies():
    """Of 100 activated experts 50 hit, 10 were late and 4 unserved, simulated; replayed 47 and 49, 13, 5."""
    found = cell(
        made("gate_ahead", [10], issued=20, num_hits=50, late=10, unserved=4),
        made("gate_ahead", [10], replay=True, issued=20, num_hits=47, late=13, unserved=5, decision_hash="0" * 64),
        made("gate_ahead", [10], replay=True, issued=20, num_hits=49, late=13, unserved=5),
    )
    assert found.has_prefetches
    assert found.same_decisions is None
    assert found.hit_points == pytest.approx(2)
    assert found.late_points == pytest.approx(-3)
    assert found.unserved_points == pytest.approx(-1)
    assert found.late_of_started_points == pytest.approx(-15)
    assert found.worst_points == pytest.approx(3)


def test_other_decisions_are_seen():
    found = cell(
        made("lru", [10]),
        made("lru", [10], replay=True),
        made("lru", [10], replay=True, decision_hash="0" * 64),
    )
    assert found.same_decisions is False


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),
        # one tie in each: 2 concordant of 3 pairs, (2 - 0) / sqrt(2 * 3)
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),
        ([1, 1, 1], [1, 2, 3], None),
        ([1], [1], None),
        # pairs: 2 concordant, 6 discordant, ties (x) 2, (y) 1
        ([12, 2, 1, 12, 2], [1, 4, 7, 1, 0], -0.47140452079103173),
    ],
)
def test_tau_b(x, y, expected):
    pairs = [(x[a] - x[b], y[a] - y[b]) for a, b in combinations(range(len(x)), 2)]
    assert tau_b(pairs) == (None if expected is None else pytest.approx(expected))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9))
def test_tau_b_is_a_correlation_of_signs(points):
    """The cosine between the signs of all differences: the definition, in other words."""
    x, y = np.array(points).T
    a, b = (np.sign(values[:, None] - values[None, :]).ravel() for values in (x, y))
    norm = np.sqrt((a * a).sum() * (b * b).sum())
    pairs = [(p[0] - q[0], p[1] - q[1]) for p, q in combinations(points, 2)]
    assert tau_b(pairs) == (pytest.approx((a * b).sum() / norm) if norm else None)


SIX = ("lru", "lfu", "oled", "ktransformers", "fiddler", "prev_set")


def ranked(simulated, measured, spread=0.0, policies=SIX, **facts):
    """Runs of policies whose repeats are half the spread below and above what was measured."""
    runs = []
    for policy, a, b in zip(policies, simulated, measured, strict=True):
        runs.append(made(policy, [a], **facts))
        runs += [made(policy, [b + sign * spread / 2], replay=True, **facts) for sign in (-1, 1)]
    return runs


def test_a_ranking_by_hand():
    """Simulated 6 policies in order; measured the first two are swapped, and the last two closer than repeats."""
    (group,) = compare(ranked([10, 11, 20, 30, 40, 41], [11.5, 11, 20, 30, 40.1, 40], spread=0.2)).groups
    assert group.policies == ("lfu", "lru", "oled", "ktransformers", "prev_set", "fiddler")
    assert (group.num_pairs, group.num_kept, group.is_judged) == (15, 14, True)
    assert group.tau_b == pytest.approx((13 - 1) / 14)
    assert group.inversions == (("lfu", "lru"),)
    assert (group.picked, group.best) == ("lru", "lfu")
    assert group.regret == pytest.approx(11.5 / 11 - 1)


def test_a_difference_of_just_the_spread_is_left_out():
    (group,) = compare(ranked([10, 20, 30], [10, 12, 30], spread=2.0, policies=SIX[:3])).groups
    assert (group.num_pairs, group.num_kept) == (3, 2)


def test_ties_of_the_simulator_count_against_it():
    (group,) = compare(ranked([10, 10, 20, 30, 40], [10, 11, 20, 30, 40], spread=0.1, policies=SIX[:5])).groups
    assert (group.num_kept, group.inversions) == (10, ())
    assert group.tau_b == pytest.approx(9 / (9 * 10) ** 0.5)


def target(comparison, name):
    (found,) = [target for target in comparison.targets if target.name.startswith(name)]
    return found


def test_groups_of_few_pairs_are_not_judged():
    comparison = compare(ranked([10, 20, 30, 40], [40, 30, 20, 10], spread=0.1, policies=SIX[:4]))
    (group,) = comparison.groups
    assert (group.tau_b, group.is_judged) == (-1, False)
    found = target(comparison, "tau-b")
    assert found.is_met is None
    assert "16/x1/t: not judged, 6 of 6 pairs are further apart than repeats, 10 are needed" in found.remarks
    assert sum("measured faster than" in remark for remark in found.remarks) == 6
    assert target(comparison, "regret").is_met is False


def test_without_repeats_no_ranking_is_judged():
    runs = ranked([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    alone = [run for nth, run in enumerate(runs) if nth % 3 < 2]
    (group,) = compare(alone).groups
    assert (group.has_spread, group.num_kept, group.is_judged) == (False, 15, False)
    assert target(compare(alone), "tau-b").is_met is None
    assert target(compare(runs), "tau-b").is_met is True


def test_a_policy_without_a_size_is_ranked_at_every_size():
    runs = ranked([5, 6], [5, 6], policies=["lru", "oled"], slots=40)
    runs += ranked([3, 4], [3, 4], policies=["lru", "oled"], slots=100)
    runs += ranked([9], [9], policies=["ondemand"], slots=None)
    groups = compare(runs).groups
    assert [(group.name, group.policies) for group in groups] == [
        ("40/x1/t", ("lru", "oled", "ondemand")),
        ("100/x1/t", ("lru", "oled", "ondemand")),
    ]


def test_bandwidths_and_traces_are_groups_of_their_own():
    runs = ranked([5, 6], [5, 6], policies=["lru", "oled"])
    runs += ranked([7, 8], [7, 8], policies=["lru", "oled"], bytes_per_s=27.5e9)
    runs += ranked([1, 2], [1, 2], policies=["lru", "oled"], trace="u", trace_hash="c" * 64)
    assert [len(group.policies) for group in compare(runs).groups] == [2, 2, 2]


def test_policies_that_know_the_trace_are_not_ranked():
    runs = ranked([5, 6], [5, 6], policies=["lru", "ideal_min"])
    assert compare(runs).groups == []


def test_a_padded_replay_meets_the_slower_link():
    """Latency and twice the bytes over a bandwidth are latency and the bytes over half of it."""
    replay = made("lru", [10], replay=True, factor=2, bytes_per_s=55e9)
    (pair,), unpaired = pairs_of([made("lru", [9]), made("lru", [10], bytes_per_s=27.5e9), replay])
    assert pair.simulated.bytes_per_s == 27.5e9
    assert pair.name == "lru/16/x2/t"
    assert [(one.name, one.why) for one in unpaired] == [
        ("lru/16/x1/t at 55 GB/s", "simulated, not replayed (the nearest has another bandwidth)")
    ]


def test_fitted_cells_are_shown_and_not_judged():
    runs = ranked([20, 10], [10, 10], policies=["lru", "oled"])
    assert target(compare(runs), "MAPE of TPOT").is_met is False
    comparison = compare(runs, ["lru/16/*"])
    assert [cell.is_fitted for cell in comparison.cells] == [True, False]
    assert target(comparison, "MAPE of TPOT").is_met is True
    assert comparison.groups == []
    assert "lru †" in as_text(comparison)
    for pattern, message in (("lfu/*", "no cell has such a name; one is lru/16/x1/t"), ("*", "names all cells")):
        with pytest.raises(ConfigError, match=message):
            compare(runs, [pattern])


def test_targets_at_their_limits():
    def mape(error):
        return target(compare([made("lru", [100 * (1 + error)]), made("lru", [100], replay=True)]), "MAPE of TPOT")

    assert mape(0.0299).is_met
    assert not mape(0.0301).is_met
    assert mape(-0.031).remarks == ("lru/16/x1/t: -3.1 %",)
    assert mape(-0.031).found == "3.10 % over 1 cells, signed -3.10 %; of single forwards 3.10 %, signed -3.10 %"


def test_the_mean_over_cells_is_held_to_the_target():
    comparison = compare(ranked([104, 100, 99], [100, 100, 100], policies=SIX[:3]))
    found = target(comparison, "MAPE of TPOT")
    assert found.is_met
    assert found.found.startswith("1.67 % over 3 cells, signed +1.00 %")
    assert found.remarks == ("lru/16/x1/t: +4.0 %",)
    assert target(comparison, "MAPE of the tail").is_met


def test_decisions_and_shares_are_held_to_their_targets():
    runs = [made("lru", [10]), made("lru", [10], replay=True, decision_hash="0" * 64)]
    runs += [
        made("gate_ahead", [9], issued=1, num_hits=50),
        made("gate_ahead", [9], replay=True, issued=1, num_hits=53),
    ]
    comparison = compare(runs)
    assert target(comparison, "decisions").is_met is False
    assert target(comparison, "decisions").found == "0 of 1 cells"
    shares = target(comparison, "hits")
    assert shares.is_met is False
    assert shares.remarks == ("gate_ahead/16/x1/t: hits -3.00, late +0.00, unserved +0.00",)
    assert not comparison.is_met


def test_the_table_says_what_it_is():
    runs = ranked([10, 11, 20, 30, 40, 41], [11.5, 11, 20, 30, 40.1, 40], spread=0.2)
    runs += [made("lru", [1], slots=4)]
    comparison = compare(runs)
    for width in (80, 120):
        text = as_text(comparison, width)
        assert max(map(len, text.splitlines())) <= width
        plain = " ".join(text.split())
        assert f"This is {SCOPE}." in plain
        assert "source proxy:proxy-tiny (hidden 128, trained 4.45 minutes" in plain
        assert "from data sheets, never validated on this GPU" in plain
        assert "replayed on a machine of tests; mode closed; device cpu" in plain
        assert "16/x1/t: lfu measured faster than lru, simulated slower" in plain
        assert "MISSED regret of the pick (<= 2 %): 4.55 %" in plain
        assert "simulated, not replayed (the nearest has another slots_per_layer): lru/4/x1/t at 55 GB/s" in plain
    assert "P50" in as_text(comparison, 120)
    document = as_markdown(comparison)
    assert "| regret of the pick | <= 2 % | 4.55 % in the worst of 1 groups | MISSED |" in document
    tables = [block.splitlines() for block in document.split("\n\n") if block.startswith("|")]
    assert [len({line.count("|") for line in table}) for table in tables] == [1, 1, 1]


def test_pageable_memory_is_said():
    for device, is_said in (("cuda", True), ("cpu", False)):  # a CPU has nothing to pin for
        text = as_text(compare([made("lru", [1]), made("lru", [1], replay=True, is_pinned=False, device=device)]))
        assert ("PAGEABLE host memory" in " ".join(text.split())) == is_said


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([made("lru", [1])], "no replayed run among these"),
        ([made("lru", [1], replay=True)], "no simulated run among these"),
        (
            [made("lru", [1]), made("lru", [1], replay=True, trace_hash="c" * 64)],
            "replayed, not simulated .the nearest has another trace.; lru/16/x1/t at 55 GB/s: simulated, not replayed",
        ),
        (
            [made("lru", [1]), made("oled", [1], replay=True)],
            "oled/16/x1/t at 55 GB/s: replayed, not simulated; lru/16/x1/t at 55 GB/s: simulated, not replayed$",
        ),
        (
            [made("lru", [1], name="a"), made("lru", [2], name="b"), made("lru", [1], replay=True)],
            "a and b: simulate the same cell and differ; give one of them",
        ),
        ([made("lru", [1]), made("lru", [0], replay=True)], "no token|took no time"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs, message):
    with pytest.raises(ConfigError, match=message):
        compare(runs)


def test_other_forwards_are_refused():
    odd = made("lru", [1, 2], replay=True, name="odd")
    odd = type(odd)("odd", odd.facts, odd.forwards.with_columns(num_accepted=odd.forwards["num_accepted"] * 2))
    with pytest.raises(ConfigError, match="odd and made: differ in num_accepted of their forwards"):
        compare([made("lru", [1, 2]), odd])


def test_a_shorter_replay_is_held_against_the_same_forwards():
    found = cell(made("lru", [10, 20, 1000]), made("lru", [10, 20], replay=True))
    assert (found.num_forwards, found.tpot_error) == (2, 0)
    assert found.same_decisions is None  # the hash is of all forwards, and there is no log
    assert target(compare([made("lru", [1, 2]), made("lru", [1], replay=True)]), "decisions").is_met is None


def test_cells_that_differ_in_more_have_names_that_say_so():
    runs = [made("lru", [1])]
    runs += [
        made("lru", [1], replay=True, mode=mode, device=device)
        for mode in ("open", "closed")
        for device in ("cpu", "cuda")
    ]
    pairs, _ = pairs_of(runs)
    assert sorted(pair.name for pair in pairs) == [
        "lru/16/x1/t/closed/cpu",
        "lru/16/x1/t/closed/cuda",
        "lru/16/x1/t/open/cpu",
        "lru/16/x1/t/open/cuda",
    ]
    knobs = [made("oled", [1], variant="coop=false, layer_adapt=false", replay=replay) for replay in (False, True)]
    assert pairs_of(knobs)[0][0].name == "oled(coop=false,layer_adapt=false)/16/x1/t"
