from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import pass_of, shape_of
from reference_oled import Split

from experiments.calibration import calibrated
from policies.contract import Estimates, PolicyError
from policies.dispatch import (
    DispatchKnobs,
    dispatch_params,
    gpu_ratio,
    gpu_share,
    reuse_worth,
    split_at,
    split_ns,
    tokens_per_expert,
)
from policies.retention import by_priority
from tracer.schema import ForwardKind

# ms of the worked example as ns: T_H = .12, b0 = 0, b1 = .05, so that an expert of nbar = 4 takes .2
COSTS = Estimates(h2d_ns=120_000, cpu_b0_ns=0, cpu_b1_ns=50_000)
A, B, C, D, E = range(5)
LOADS = np.array([6, 1, 4, 2, 5])
P = np.array([0.05, 0.20, 0.10, 0.02, 0.15])


def split_example(**knobs):
    params = dispatch_params(DispatchKnobs(**knobs))
    transfers, on_cpu = split_at(params, 4.0, P, LOADS, np.ones(5, bool), 5, COSTS)
    return transfers.tolist(), on_cpu.tolist()


def test_ratio_of_the_gpu():
    assert gpu_ratio(4.0, COSTS) == 0.625
    assert gpu_ratio(4.0, COSTS) * 5 == 3.125
    assert gpu_ratio(4.0, Estimates(0, 0, 0)) == 1


@pytest.mark.parametrize(("num_missed", "share"), [(5, 3), (0, 0), (1, 1), (4, 3), (8, 5), (12, 8)])
def test_share_of_the_gpu(num_missed, share):
    assert gpu_share(0, 4.0, num_missed, COSTS) == share  # rho .625; 3.125 -> 3, 2.5 -> 3, 7.5 -> 8


def test_share_rounds_as_asked_and_stays_within_the_misses():
    assert [gpu_share(how, 4.0, 5, COSTS) for how in range(3)] == [3, 3, 4]
    assert [gpu_share(how, 4.0, 4, COSTS) for how in range(3)] == [3, 2, 3]
    assert gpu_share(0, 4.0, 5, COSTS._replace(h2d_ns=0)) == 5
    assert gpu_share(0, 4.0, 5, COSTS._replace(cpu_b1_ns=0)) == 0
    assert gpu_share(0, 4.0, 5, Estimates(0, 0, 0)) == 5
    # a constant part of the CPU's time shifts the share: (100 + 4 * 50) / (300 + 120)
    assert gpu_share(0, 4.0, 70, Estimates(120, 100, 50)) == 50


def test_first_split_takes_what_promises_most():
    assert split_example(max_swaps=0) == ([B, E, C], [A, D])


def test_cheap_reuse_lets_load_decide():
    assert split_example(lambda_ms=0.5) == ([B, E, A], [C, D])


def test_dear_reuse_keeps_the_first_split():
    assert split_example(lambda_ms=1.0) == ([B, E, C], [A, D])


def test_what_the_exchange_changes():
    params = dispatch_params(DispatchKnobs())
    splits = [split_example(max_swaps=0), split_example(lambda_ms=0.5)]
    times = [split_ns(params, len(copied), 50_000 * LOADS[on_cpu].sum(), COSTS) / 1e6 for copied, on_cpu in splits]
    sums = [P[copied].sum() for copied, _ in splits]
    assert times == [0.40, 0.36]
    assert sums == pytest.approx([0.45, 0.40], rel=1e-12)
    for worth, values in ((0.5, [0.175, 0.160]), (1.0, [-0.05, -0.04])):
        assert [time - worth * p for time, p in zip(times, sums, strict=True)] == pytest.approx(values, rel=1e-12)


def test_the_exchange_flips_at_its_worth():
    assert split_example(lambda_ms=0.799)[0] == [B, E, A]
    assert split_example(lambda_ms=0.801)[0] == [B, E, C]


def test_gain_must_exceed_half_a_ns():
    # exchanging a and c gains 40 000 ns and costs lambda * .05
    assert split_example(lambda_ms=0.79998)[0] == [B, E, A]  # 1 ns
    assert split_example(lambda_ms=0.799992)[0] == [B, E, C]  # .4 ns


def test_equal_gains_go_to_the_higher_priority():
    plain = Split(dict(enumerate(P)), dict(enumerate(LOADS)), COSTS, worth=0.0)
    swaps = {(enters, leaves): {B, C, E} - {leaves} | {enters} for enters in (A, D) for leaves in (B, C, E)}
    times = {swap: plain.time(then) for swap, then in swaps.items()}
    best = [swap for swap, time in times.items() if time == min(times.values()) == 360_000]
    assert best == [(A, B), (A, C), (A, E), (D, B)]
    assert swaps[min(best)] == {A, C, E}  # what the lower ids alone would decide
    assert split_example(lambda_ms=0.0) == ([B, E, A], [C, D])
    assert split_example(kappa=0.0) == ([B, E, A], [C, D])


def test_equal_gains_and_priorities_go_to_the_lower_ids():
    load, p = np.array([2, 2, 1, 1]), np.full(4, 0.25)
    # both of load 2 should leave the CPU: ids 2, 3 enter the first split because their priority is a bit higher
    p[2:] += 0.01
    params = dispatch_params(DispatchKnobs(lambda_ms=0.0, max_swaps=1))
    transfers, on_cpu = split_at(params, 1.0, p, load, np.ones(4, bool), 4, Estimates(1, 0, 1))
    assert (transfers.tolist(), on_cpu.tolist()) == ([3, 0], [1, 2])


def test_worth_of_reuse():
    params = dispatch_params(DispatchKnobs(kappa=2.0))
    assert reuse_worth(params, 4.0, 60, COSTS) == 2 * 60 * 120_000
    assert reuse_worth(params, 4.0, 60, COSTS._replace(h2d_ns=500_000)) == 2 * 60 * 200_000
    assert reuse_worth(dispatch_params(DispatchKnobs(lambda_ms=1.5)), 4.0, 60, COSTS) == 1_500_000


@pytest.mark.parametrize(("bound", "num_swapped"), [(0, 0), (1, 1), (2, 2), (8, 8), (20, 9)])
def test_swaps_are_bounded(bound, num_swapped):
    # 25 of 40 go to the GPU, the 20 light ones first: 3 ms there, 6 ms on the CPU, and each swap takes .35 off that
    load, p = np.repeat([1, 8], 20), np.repeat([0.04, 0.01], 20)
    params = dispatch_params(DispatchKnobs(lambda_ms=0.0, max_swaps=bound))
    transfers, on_cpu = split_at(params, 4.0, p, load, np.ones(40, bool), 40, COSTS)
    assert transfers.size == 25
    assert (load[on_cpu] == 1).sum() == num_swapped


def test_one_alone_changes_sides_only_where_allowed():
    # all on the GPU takes .36 ms; one alone on the CPU .24, whichever it is, so the lower id; two .12
    load, p = np.array([1, 9, 9]), np.zeros(3)
    swaps = dispatch_params(DispatchKnobs(lambda_ms=0.0))
    moves = dispatch_params(DispatchKnobs(lambda_ms=0.0, allow_move=True))
    far = dispatch_params(DispatchKnobs(lambda_ms=0.0, allow_move=True, drift=2))
    cheap = COSTS._replace(cpu_b1_ns=9_000)
    everything = np.ones(3, bool)
    assert [split_at(how, 100.0, p, load, everything, 3, cheap)[1].tolist() for how in (swaps, moves, far)] == [
        [],
        [0],
        [0, 1],
    ]


def test_time_of_a_split_can_be_the_sum():
    # side by side, the CPU's .4 counts; one after the other, every exchange of equal loads is worth nothing
    assert split_example(lambda_ms=0.0, tcomp="sum") == ([E, C, A], [B, D])


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"kappa": -1.0}, "kappa is -1.0: must be a number of at least 0"),
        ({"lambda_ms": float("nan")}, "lambda_ms is nan"),
        ({"max_swaps": -1}, "max_swaps is -1"),
        ({"drift": -2}, "drift is -2"),
        ({"tcomp": "mean"}, "tcomp 'mean': allowed are max, sum"),
        ({"rho_round": "up"}, "rho_round 'up': allowed are half_up, floor, ceil"),
    ],
)
def test_impossible_knobs_are_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        DispatchKnobs(**knobs)


def test_tokens_of_an_average_expert():
    prefill = pass_of(np.array([[[0, 1], [0, 1]], [[0, 1], [0, 1]]]), kind=ForwardKind.PREFILL, blocks=[-1])
    other = pass_of(np.array([[[0, 1]], [[0, 1]]]))
    decode = pass_of(np.array([[[0, 1], [0, 2], [0, 3]], [[4, 5], [4, 5], [4, 5]]]))
    shape = shape_of(2, 6, 2)
    assert tokens_per_expert(calibrated([prefill, decode], shape, "split")) == 12 / 6
    assert tokens_per_expert(calibrated([decode, other], shape, "split")) == 16 / 10
    nothing = replace(calibrated([decode], shape, "split"), num_activated=0)
    with pytest.raises(PolicyError, match="calibration split has no decode forward"):
        tokens_per_expert(nothing)


@st.composite
def layers(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_experts = draw(st.integers(1, 14))
    load = rng.integers(0, draw(st.sampled_from([2, 4, 9])), num_experts)
    missed = (load > 0) & (rng.random(num_experts) < 0.8)
    # coarse priorities tie often, fine ones never, and near ones tie only once they are subtracted
    kind = draw(st.sampled_from(["coarse", "fine", "near"]))
    p = rng.integers(0, 4, num_experts) / 8 if kind == "coarse" else rng.random(num_experts)
    if kind == "near":
        p = 0.1 + rng.integers(0, 3, num_experts) * 2.0**-56 + rng.integers(0, 2, num_experts) * 0.7
    b0, b1 = draw(st.sampled_from([(0, 50), (150, 5), (100, 0), (7, 33)]))
    return p, load, missed, Estimates(draw(st.sampled_from([0, 3, 126, 500])), b0, b1)


@given(
    layers(),
    st.sampled_from([0.5, 1.7, 4.0]),
    st.sampled_from([{"kappa": 1.0}, {"kappa": 0.1}, {"lambda_ms": 0.0}, {"lambda_ms": 1e-5}]),
    st.sampled_from([{}, {"tcomp": "sum"}, {"t_gpu_ns": 60}, {"max_swaps": 2}]),
    st.sampled_from([0, 1, 2]),
)
def test_equals_trying_every_exchange(layer, nbar, worth, other, drift):
    p, load, missed, estimates = layer
    moves = {"allow_move": True, "drift": drift} if drift else {}
    params = dispatch_params(DispatchKnobs(**worth, **other, **moves))
    num_activated = int((load > 0).sum())
    transfers, on_cpu = split_at(params, nbar, p, load, missed, num_activated, estimates)

    ids = np.flatnonzero(missed).tolist()
    plain = Split(
        {e: float(p[e]) for e in ids},
        {e: int(load[e]) for e in ids},
        estimates,
        reuse_worth(params, nbar, num_activated, estimates),
        other.get("tcomp", "max"),
        other.get("t_gpu_ns", 0),
    )
    expected = plain.refine(plain.start(nbar), other.get("max_swaps", 8), drift)
    assert transfers.tolist() == plain.issue_order(expected)
    assert on_cpu.tolist() == sorted(set(ids) - expected)


@given(st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_order_of_issue(seed, num_experts):
    rng = np.random.default_rng(seed)
    p = rng.integers(0, 9, num_experts) / 8
    members = rng.random(num_experts) < 0.7
    expected = sorted(np.flatnonzero(members).tolist(), key=lambda e: (-p[e], e))
    assert by_priority(members, p).tolist() == expected
