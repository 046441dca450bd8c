from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, context_of, pass_of, run, shape_of
from strategies import change, random_passes, traces

from policies.contract import Estimates, PolicyError
from policies.driver import drive
from policies.hybrid_schedule import hybrid_split
from policies.hybrimoe import Knobs, average
from policies.registry import build_policy
from tracer.schema import ForwardKind, Signals


def test_scores_are_averaged_over_forwards():
    averages, found = np.zeros(4), []
    for score in (0.4, 0.0, 0.4):
        average(averages, np.array([[2]]), np.array([[score]]), 0.5, 1, False)
        found.append(averages.tolist())
    assert np.round(found, 12).tolist() == [[0, 0, 0.2, 0], [0, 0, 0.1, 0], [0, 0, 0.25, 0]]


@pytest.mark.parametrize(("of_mean", "expected"), [(False, [0.2, 0.3, 0.5, 0]), (True, [0, 0.4, 0.5, 0])])
def test_each_token_keeps_its_highest_scores_or_the_mean_does(of_mean, expected):
    # one token keeps 1 and 2, the other 2 and 0; their mean is .2, .4, .5, .05
    ids = np.array([[2, 1, 3], [0, 2, 1]])
    scores = np.array([[0.5, 0.6, 0.1], [0.4, 0.5, 0.2]])
    averages = np.zeros(4)
    average(averages, ids, scores, 1.0, 2, of_mean)
    assert np.round(averages, 12).tolist() == expected


def test_of_equal_scores_the_lower_ids_count():
    averages = np.zeros(4)
    average(averages, np.array([[3, 1, 2]]), np.array([[0.5, 0.5, 0.5]]), 1.0, 2, False)
    assert averages.tolist() == [0, 0.5, 0.5, 0]


def split(loads, h2d_ns, b0_ns, b1_ns):
    load = np.array(loads)
    transfers, on_cpu = hybrid_split(load, load > 0, Estimates(h2d_ns, b0_ns, b1_ns))
    return transfers.tolist(), on_cpu.tolist()


@pytest.mark.parametrize(
    ("loads", "costs", "expected"),
    [
        # line 1, 3, 2, 0, 4. CPU to 4 (GPU 10), CPU to 8, GPU to 10 (CPU 16), CPU to 16 (GPU 20), GPU to 20 (CPU 32)
        ([1, 6, 2, 4, 1], (10, 0, 4), ([1, 3], [0, 2, 4])),
        ([1, 1], (10, 0, 10), ([0], [1])),  # 10 against 10: the GPU; then 20 against 10: the CPU
        ([3], (10, 0, 1), ([], [0])),
        ([3], (10, 7, 1), ([0], [])),  # both would end at 10
        ([0, 0], (10, 7, 1), ([], [])),
    ],
)
def test_worked_schedules(loads, costs, expected):
    assert split(loads, *costs) == expected


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 20),
)
def test_schedules_equal_a_simulation(loads, h2d_ns, b0_ns, b1_ns):
    line = sorted((e for e, load in enumerate(loads) if load), key=lambda e: (-loads[e], e))
    gpu, cpu, transfers, on_cpu = 0, 0, [], []
    while line:
        if gpu + h2d_ns <= cpu + b0_ns + b1_ns * loads[line[-1]]:
            gpu += h2d_ns
            transfers.append(line.pop(0))
        else:
            cpu += b0_ns + b1_ns * loads[line[-1]]
            on_cpu.append(line.pop())
    assert split(loads, h2d_ns, b0_ns, b1_ns) == (transfers, sorted(on_cpu))


# The whole policy


class Plain:
    """What hybrimoe keeps, in lists."""

    def __init__(self, knobs, shape, num_layers):
        self.knobs, self.top = knobs, knobs.mrs_top or 2 * shape.top_k
        self.averages = np.zeros((num_layers, shape.num_experts))
        self.recency = np.zeros((num_layers, shape.num_experts), int)

    def retained(self, decision, resident):
        step, pass_ = decision.step, decision.pass_
        layer = step.layer
        ids, scores = pass_.expert_ids[layer], pass_.gates[layer]
        if pass_.signals is not None:
            ids, scores = pass_.signals.score_ids[layer], pass_.signals.scores[layer]
        mean = np.zeros(self.averages.shape[1])
        for row_ids, row in zip(ids.tolist(), scores.tolist(), strict=True):
            ranked = sorted(zip(row, row_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
            kept = ranked if self.knobs.mrs_pool == "mean_topp" else ranked[: self.top]
            for score, expert in kept:
                mean[expert] += score / len(ids)
        if self.knobs.mrs_pool == "mean_topp":
            for expert in sorted(range(mean.size), key=lambda e: (-mean[e], e))[self.top :]:
                mean[expert] = 0
        alpha = self.knobs.mrs_alpha
        self.averages[layer] = alpha * mean + (1 - alpha) * self.averages[layer]
        self.recency[layer, step.load > 0] = step.forward + 1
        keys = {e: (-round(self.averages[layer, e], 9), -self.recency[layer, e], e) for e in range(mean.size)}
        limit = self.knobs.max_admit
        entering = sorted(decision.plan.transfers.tolist(), key=keys.get)[:limit]
        return sorted(sorted([*resident, *entering], key=keys.get)[: decision.capacity])


@given(
    trace=traces(signals=None),
    misses=st.sampled_from(["hss", "h2d", "oled"]),
    pool=st.sampled_from(["token_topp", "mean_topp"]),
    top=st.sampled_from([None, 1, 3]),
    max_admit=st.sampled_from([None, 0, 2]),
    data=st.data(),
)
@settings(max_examples=60)
def test_equals_the_plain_policy(trace, misses, pool, top, max_admit, data):
    shape, passes = trace
    knobs = Knobs(misses=misses, mrs_pool=pool, mrs_top=top, max_admit=max_admit, mrs_alpha=0.5)
    policy = build_policy("hybrimoe", knobs, context_of(shape, passes))
    plain = Plain(knobs, shape, shape.num_layers)
    capacity = data.draw(st.integers(1, shape.num_experts))
    for decision in drive(policy, passes, shape, capacity * shape.num_layers, ESTIMATES):
        step, plan = decision.step, decision.plan
        missed = (step.load > 0) & ~decision.resident
        if misses == "h2d" or step.kind == ForwardKind.PREFILL:
            assert plan.on_cpu.size == 0
        elif misses == "hss":
            line, cpu = hybrid_split(step.load, missed, ESTIMATES)
            assert (plan.transfers.tolist(), plan.on_cpu.tolist()) == (line.tolist(), cpu.tolist())
        assert sorted([*plan.transfers, *plan.on_cpu]) == np.flatnonzero(missed).tolist()
        expected = plain.retained(decision, np.flatnonzero(decision.resident).tolist())
        assert np.flatnonzero(plan.retained).tolist() == expected
    assert len(policy.decide.signatures) == 1


def test_scores_of_what_was_not_routed_count():
    # 0 is chosen, 2 only scored
    ids = np.zeros((1, 1, 1), np.int64)
    signals = Signals(np.array([[[0, 2]]]), np.array([[[0.3, 0.4]]]), np.ones((1, 1)), np.ones((1, 16)), ids[None])
    shape, passes = shape_of(1, 4), [change(pass_of(ids), signals=signals)]
    policy = built("hybrimoe", {}, shape, passes)
    state, *start = policy.init(policy.params, shape, 2)
    list(drive(replace(policy, init=lambda *_: (state, *start)), passes, shape, 2, ESTIMATES))
    assert state.averages.tolist() == [[0.15, 0, 0.2, 0]]
    assert policy.warnings == ()


def test_without_scores_the_result_says_so():
    shape, passes = random_passes(np.random.default_rng(0))
    (warning,) = built("hybrimoe", {}, shape, passes).warnings
    assert warning == "the trace has no router scores: gates stand for those of routed experts, and all others count 0"


def test_the_split_acts_and_prefill_is_copied():
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3)
    num_on_cpu = dict.fromkeys((True, False), 0)
    for decision in run("hybrimoe", {}, shape, passes, 6):
        num_on_cpu[decision.pass_.is_prefill] += len(decision.plan.on_cpu)
    assert num_on_cpu[True] == 0
    assert num_on_cpu[False] > 0


@pytest.mark.parametrize(("misses", "reads"), [("hss", True), ("h2d", False), ("oled", True)])
def test_only_splits_depend_on_estimates(misses, reads):
    shape, passes = random_passes(np.random.default_rng(5))
    policy = built("hybrimoe", {"misses": misses}, shape, passes)
    assert (policy.reads_estimates, policy.prefetches, policy.pool) == (reads, False, "layer")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"misses": "cpu"}, "misses=cpu admits nothing.* allowed are hss, h2d, oled"),
        ({"misses": "none"}, "misses 'none': allowed are hss, h2d, oled"),
        ({"mrs_pool": "first"}, "mrs_pool 'first': allowed are token_topp, mean_topp"),
        ({"mrs_alpha": 0}, "mrs_alpha is 0: must be above 0 and at most 1"),
        ({"mrs_alpha": float("nan")}, "mrs_alpha is nan"),
        ({"mrs_top": 0}, "mrs_top is 0: must be at least 1"),
        ({"max_admit": -1}, "max_admit is -1: must be at least 0"),
    ],
)
def test_knobs_are_refused(knobs, message):
    with pytest.raises(PolicyError, match=message):
        Knobs(**knobs)
