from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, run, shown
from scripted import make_pass, make_shape
from strategies import random_passes, traces

from experiments import calibration
from policies.contract import Context, Estimates, PolicyError
from policies.driver import drive
from policies.fiddler import OBJECTIVES, Knobs
from policies.registry import build_policy
from policies.steps import Steps, step_at
from tracer.shipped import find_trace
from tracer.store import TraceReader

CPU_7_GPU_70 = Estimates(h2d_ns=70, cpu_b0_ns=0, cpu_b1_ns=7)


def split(objective, loads, resident, estimates):
    """Copies and CPU experts for these loads, {expert: tokens}, in a layer of 8 experts."""
    shape, passes = make_shape(1, 8), [make_pass(0, [loads])]
    policy = built("fiddler", {"fd_obj": objective}, shape, passes)
    state, residents, capacity = policy.init(policy.params, shape, 4)
    residents[:] = False
    residents[0, resident] = True
    view = shown(residents, np.zeros_like(residents), capacity, estimates=estimates)
    plan = policy.decide(policy.params, state, step_at(Steps(shape).read(passes[0]), 0), view)
    assert (plan.retained == residents[0]).all()
    return plan.transfers.tolist(), plan.on_cpu.tolist()


def cpu_ns(load, estimates):
    return estimates.cpu_b0_ns + estimates.cpu_b1_ns * load


def sides(loads, copied, on_cpu, estimates):
    return estimates.h2d_ns * len(copied), sum(cpu_ns(loads[expert], estimates) for expert in on_cpu)


# A, B, C, D are experts 0 to 3, and A is resident


@pytest.mark.parametrize(
    ("objective", "copied", "on_cpu", "times"), [("sum", [1, 3], [2], (140, 21)), ("max", [1], [2, 3], (70, 91))]
)
def test_worked_example(objective, copied, on_cpu, times):
    loads = {0: 1, 1: 12, 2: 3, 3: 10}
    assert split(objective, loads, [0], CPU_7_GPU_70) == (copied, on_cpu)
    assert sides(loads, copied, on_cpu, CPU_7_GPU_70) == times
    assert {"sum": sum(times), "max": max(times)}[objective] == {"sum": 161, "max": 91}[objective]


@pytest.mark.parametrize(("load", "copied"), [(9, []), (10, [5]), (11, [5])])
def test_where_both_take_the_same_the_expert_is_copied(load, copied):
    assert split("sum", {5: load}, [], CPU_7_GPU_70)[0] == copied


def test_equal_longer_sides_go_to_the_gpu():
    assert split("max", {1: 10}, [], CPU_7_GPU_70) == ([1], [])  # 70 either way
    # the longer side takes 140 with one copy, as with two
    assert split("max", {1: 10, 2: 20}, [], CPU_7_GPU_70) == ([2], [1])
    assert split("max", {1: 20, 2: 20}, [], CPU_7_GPU_70) == ([1, 2], [])


estimates = st.builds(Estimates, st.integers(0, 90), st.integers(0, 60), st.integers(0, 20))
loads = st.dictionaries(st.integers(0, 7), st.integers(1, 9), min_size=1, max_size=8)


@given(loads, st.sets(st.integers(0, 7), max_size=4), estimates, st.sampled_from(OBJECTIVES))
@settings(max_examples=150)
def test_no_other_split_is_better(loads, resident, estimates, objective):
    copied, on_cpu = split(objective, loads, sorted(resident), estimates)
    missed = sorted(loads.keys() - resident)
    assert sorted(copied + on_cpu) == missed
    assert (copied, on_cpu) == (sorted(copied), sorted(on_cpu))
    combine = {"sum": sum, "max": max}[objective]

    def value(chosen):
        return combine(sides(loads, chosen, [expert for expert in missed if expert not in chosen], estimates))

    ways = [chosen for size in range(len(missed) + 1) for chosen in combinations(missed, size)]
    least = min(value(chosen) for chosen in ways)
    assert value(copied) == least
    # of the best splits, one that copies most
    assert len(copied) == max(len(chosen) for chosen in ways if value(chosen) == least)


@given(traces(), st.sampled_from(OBJECTIVES), st.data())
@settings(max_examples=25)
def test_nothing_is_admitted_and_residents_are_those_of_ktransformers(trace, objective, data):
    shape, passes = trace
    capacity = data.draw(st.integers(1, shape.num_experts))
    found = run("fiddler", {"fd_obj": objective}, shape, passes, capacity)
    static = run("ktransformers", {}, shape, passes, capacity)
    for decision, other in zip(found, static, strict=True):
        plan, load = decision.plan, decision.step.load
        assert (decision.resident == other.resident).all()
        assert (plan.retained == decision.resident).all()
        missed = np.flatnonzero((load > 0) & ~decision.resident).tolist()
        assert sorted([*plan.transfers, *plan.on_cpu]) == missed
        if objective == "sum":
            expected = [e for e in missed if cpu_ns(load[e], ESTIMATES) >= ESTIMATES.h2d_ns]
            assert plan.transfers.tolist() == expected


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_laws_hold_on_the_shipped_trace(objective):
    reader = TraceReader(find_trace("proxy-tiny"))
    shape = reader.metadata.shape
    context, _ = calibration.context_of(reader, 1)
    policy = build_policy("fiddler", {"fd_obj": objective}, context)
    num_copied = num_on_cpu = 0
    for decision in drive(policy, reader.passes(), shape, 16 * shape.num_layers, ESTIMATES):
        plan = decision.plan
        assert (plan.retained == decision.resident).all()
        num_copied, num_on_cpu = num_copied + len(plan.transfers), num_on_cpu + len(plan.on_cpu)
        assert len(decision.hits) + len(plan.transfers) + len(plan.on_cpu) == np.count_nonzero(decision.step.load)
    assert num_copied > 0
    assert num_on_cpu > 0


def test_a_fixed_cost_can_send_all_to_one_side():
    shape, passes = random_passes(np.random.default_rng(1))
    policy = built("fiddler", {}, shape, passes)
    for cpu_b0_ns, side in ((0, "on_cpu"), (ESTIMATES.h2d_ns, "transfers")):
        believed = ESTIMATES._replace(cpu_b0_ns=cpu_b0_ns, cpu_b1_ns=1)
        for decision in drive(policy, passes, shape, 18, believed):
            missed = (decision.step.load > 0) & ~decision.resident
            assert getattr(decision.plan, side).size == missed.sum()


def test_with_a_slot_for_every_expert_nothing_is_missed():
    shape, passes = random_passes(np.random.default_rng(7), batch=2)
    for decision in run("fiddler", {}, shape, passes, shape.num_experts):
        assert len(decision.hits) == np.count_nonzero(decision.step.load)


def test_what_it_is_built_from():
    shape, passes = random_passes(np.random.default_rng(0))
    policy = built("fiddler", {}, shape, passes)
    assert (policy.reads_estimates, policy.prefetches, policy.clairvoyant) == (True, False, False)
    with pytest.raises(PolicyError, match="fiddler needs calibration, and there is none"):
        build_policy("fiddler", {}, Context(shape))
    with pytest.raises(PolicyError, match="fd_obj 'min': allowed are sum, max"):
        Knobs(fd_obj="min")
