"""Curves have the hits of the policies themselves, whole number for whole number, at every cache size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ESTIMATES, built, passes_of, run, shape_of
from shipped import tiny
from strategies import change, random_passes, traces

from policies.contract import PolicyError
from policies.driver import drive
from simulator.curves import CURVES, curves
from tracer.schema import ForwardKind, TraceError

POLICY_CURVES = [name for name, policy in CURVES.items() if policy is not None]
STACKED = [name for name in POLICY_CURVES if name not in ("lru", "lru_misses_first")]


def counted_hits(name, shape, passes, capacity, warmup_requests):
    """What the policy hits in each layer, through its driver: [L]."""
    policy, knobs = CURVES[name]
    hits = np.zeros(shape.num_layers, int)
    seen = []
    slots = capacity * shape.num_layers
    for decision in drive(built(policy, knobs, shape, passes), passes, shape, slots, ESTIMATES):
        requests = decision.pass_.requests.tolist()
        seen += [request for request in requests if request not in seen]
        if not decision.pass_.is_prefill and not set(requests) & set(seen[:warmup_requests]):
            hits[decision.step.layer] += len(decision.hits)
    return hits


@pytest.mark.parametrize("name", POLICY_CURVES)
@settings(max_examples=8)
@given(traces(max_experts=9), st.integers(0, 2))
def test_every_size_has_the_hits_of_the_policy(name, trace, warmup_requests):
    shape, passes = trace
    curve = curves(passes, shape, [name], warmup_requests)[name]
    for capacity in range(1, shape.num_experts + 1):
        expected = counted_hits(name, shape, passes, capacity, warmup_requests)
        assert curve.hits[:, capacity - 1].tolist() == expected.tolist()


@pytest.mark.parametrize("name", POLICY_CURVES)
def test_a_shipped_trace_has_the_hits_of_the_policy(name):
    shape, passes = tiny(3)
    curve = curves(passes, shape, [name])[name]
    for capacity in (1, 16, 33):
        assert curve.hits[:, capacity - 1].tolist() == counted_hits(name, shape, passes, capacity, 1).tolist()


@settings(max_examples=10)
@given(traces(), st.integers(0, 2))
def test_what_is_counted_is_what_metrics_count(trace, warmup_requests):
    shape, passes = trace
    found = curves(passes, shape, CURVES, warmup_requests)
    seen, forwards, activated = [], 0, np.zeros(shape.num_layers, int)
    for pass_ in passes:
        requests = pass_.requests.tolist()
        seen += [request for request in requests if request not in seen]
        if not pass_.is_prefill and not set(requests) & set(seen[:warmup_requests]):
            forwards += 1
            activated += [len(set(ids.ravel().tolist())) for ids in pass_.expert_ids]
    for curve in found.values():
        assert curve.num_forwards == forwards
        assert curve.activated.tolist() == activated.tolist()
        assert curve.hits.shape == (shape.num_layers, shape.num_experts)
        assert (curve.hits <= activated[:, None]).all()
    for name in STACKED:
        assert (np.diff(found[name].hits, axis=1) >= 0).all()


@pytest.mark.parametrize("name", [*STACKED, "lru"])
def test_what_fewer_slots_hold_more_hold_but_under_hits_first(name):
    """The property that one pass for all sizes rests on."""
    policy, knobs = CURVES[name]
    lost = 0
    for seed in range(2):
        shape, passes = random_passes(np.random.default_rng(seed), num_experts=12, drift=0.05)
        of_size = [[d.resident for d in run(policy, knobs, shape, passes, size)] for size in range(1, 13)]
        for smaller, larger in zip(of_size, of_size[1:], strict=False):
            lost += any((one & ~two).any() for one, two in zip(smaller, larger, strict=True))
    assert (lost == 0) == (name != "lru")


def test_belady_by_hand():
    """C=2, batches {1,2,3}, {1,2,4}, {1,3}, {2,3}, cold."""
    passes, shape = passes_of([{1, 2, 3}, {1, 2, 4}, {1, 3}, {2, 3}]), shape_of(1, 5)
    found = curves(passes, shape, ["ideal_min", "lru"], warmup_requests=0)
    assert found["ideal_min"].hits[0].tolist() == [3, 5, 6, 6, 6]
    assert found["lru"].hits[0, 1] == 3
    assert found["lru"].activated.tolist() == [10]


def test_a_batch_does_not_thrash_as_single_accesses_do():
    """The same 60 experts four times with 40 slots: 0, 40, 40, 40 hits together, none one by one."""
    found = curves(passes_of([range(60)] * 4), shape_of(1, 64), CURVES, warmup_requests=0)
    assert found["seq"].hits[0, 39] == 0
    assert found["seq"].hits[0, 58:].tolist() == [0] + [180] * 5
    for name in POLICY_CURVES:
        assert found[name].hits[0, 39] == 120


@settings(max_examples=10)
@given(traces())
def test_single_accesses_hit_what_a_plain_lru_holds(trace):
    shape, passes = trace
    found = curves(passes, shape, ["seq"], warmup_requests=0)["seq"]
    for capacity in range(1, shape.num_experts + 1):
        hits = 0
        for layer in range(shape.num_layers):
            recent = []
            for pass_ in passes:
                for expert in sorted(set(pass_.expert_ids[layer].ravel().tolist())):
                    hits += expert in recent and not pass_.is_prefill
                    recent = [*(other for other in recent if other != expert), expert][-capacity:]
        assert found.hits[:, capacity - 1].sum() == hits


def test_only_confidence_needs_confidences():
    shape, passes = random_passes(np.random.default_rng(1), num_requests=1)
    denoise = next(i for i, pass_ in enumerate(passes) if pass_.kind == ForwardKind.DENOISE)
    unknown = np.full_like(passes[denoise].p_argmax, np.nan)
    passes[denoise] = change(passes[denoise], p_argmax=unknown, p_current=unknown)
    curves(passes, shape, [name for name in CURVES if name != "confidence"])
    with pytest.raises(PolicyError, match=r"^curve confidence: pass \d+: the trace does not know the confidence"):
        curves(passes, shape, ["confidence"])


def test_what_is_not_a_curve_is_refused():
    shape, passes = random_passes(np.random.default_rng(1))
    with pytest.raises(PolicyError, match="curve 'lru_ids': not known; did you mean lru_id"):
        curves(passes, shape, ["lru_ids"])


def test_passes_that_can_be_read_once_are_refused_where_the_future_is_needed():
    shape, passes = random_passes(np.random.default_rng(1))
    curves(iter(passes), shape, ["lru_id"])
    with pytest.raises(TraceError, match="ideal_min reads the passes twice"):
        curves(iter(passes), shape, ["ideal_min"])
