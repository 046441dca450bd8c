"""The compiled engine says what the event engine says, to the nanosecond and to the letter."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import columns_of, hash_of
from reference import built
from scripted import ESTIMATES, Script, make_costs, make_pass, make_shape, scripted
from shipped import tiny
from strategies import random_passes, traces
from test_des import draw_case, draw_costs
from test_policy_laws import VARIANTS, label

from policies.jit import jit
from policies.lru import decide as decide_lru
from policies.profile import estimates_of
from policies.residents import Residents
from policies.steps import ReadPasses
from simulator import compiled, des, loop, pointers
from simulator.drive import drive
from simulator.loop import functions_of
from simulator.timing import time

PREFETCHING = {"moe_infinity", "finemoe", "sida", "gate_ahead", "ideal_prefetch"}
STILL = [(name, knobs) for name, knobs in VARIANTS if name not in PREFETCHING and knobs.get("swap_from_staging", True)]
each_policy = pytest.mark.parametrize(("name", "knobs"), STILL, ids=[label(*variant) for variant in STILL])


def check_equal(policies, passes, shape, slots, costs, estimates=ESTIMATES, **options):
    """Both engines make the same log; `policies` makes a policy for each."""
    by_events, at_once = (
        list(engine.simulate(passes, policies(), shape, slots, costs, estimates, **options))
        for engine in (des, compiled)
    )
    expected, found = columns_of(by_events), columns_of(at_once)
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name] == values, name
    assert hash_of(at_once) == hash_of(by_events)
    assert [len(chunk.forwards) for chunk in at_once] == [len(chunk.forwards) for chunk in by_events]


@each_policy
@settings(max_examples=5)
@given(traces(max_experts=10, max_requests=2, max_block=4, signals=True), st.data())
def test_every_policy_that_does_not_prefetch(name, knobs, trace, data):
    shape, passes = trace
    capacity = data.draw(st.integers(shape.top_k, shape.num_experts), label="slots per layer")
    costs = draw_costs(np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed of the costs")), True)
    staging = costs.transfer_chunk + data.draw(st.integers(0, 4), label="staging slots beyond a chunk")
    policy = built(name, knobs, shape, passes)
    assert not policy.prefetches
    check_equal(
        *(lambda: policy, passes, shape, capacity * shape.num_layers, costs, estimates_of(costs)), staging_slots=staging
    )


@each_policy
def test_a_shipped_trace(name, knobs):
    shape, passes = tiny(2)
    policy = built(name, knobs, shape, passes)
    costs = make_costs(h2d_latency_ns=30.5, g_b_ns=2.0, g_c_ns=0.3, cpu_b0_ns=50.0, cpu_b1_ns=5.0, tail_ns=40)
    for capacity in (10, 32):
        check_equal(lambda: policy, passes, shape, capacity * shape.num_layers, costs, estimates_of(costs))


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_plans_of_any_kind(seed, chunk_forwards):
    build, passes, shape, costs, staging = draw_case(seed)
    check_equal(build, passes, shape, 0, costs, staging_slots=staging, chunk_forwards=chunk_forwards)


def test_worked_example():
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
    shape, loads = make_shape(1, 16), dict.fromkeys(range(7), 1) | {7: 1, 8: 2, 9: 3}
    policy = scripted(shape, {(0, 0): Script(on_cpu=[7, 8, 9])}, capacity=2, residents={0: [0, 1]})
    (chunk,) = compiled.simulate([make_pass(0, [loads])], policy, shape, 0, costs, ESTIMATES, staging_slots=8)
    row = {name: column[0] for name, column in (chunk.layers.scalars | chunk.layers.lists).items()}
    assert row["plan_ns"] == 100 * us
    assert row["hits_end_ns"] == 124 * us
    assert row["transfer_end_ns"].tolist()[3:] == [604 * us, 730 * us]
    assert row["cpu_end_ns"] == 660 * us
    assert row["end_ns"] == 752 * us


def test_stretches_do_not_matter():
    shape, passes = random_passes(np.random.default_rng(3), num_requests=3)
    policy = built("oled", {}, shape, passes)

    def columns(size):
        slots = 6 * shape.num_layers
        chunks = compiled.simulate(passes, policy, shape, slots, make_costs(), ESTIMATES, chunk_forwards=size)
        return columns_of(chunks)

    whole = columns(10**6)
    assert columns(1) == columns(7) == whole


def test_decisions_can_be_timed_many_times():
    shape, passes = random_passes(np.random.default_rng(4), num_requests=3)
    policy = built("lru", {"misses": "oled"}, shape, passes)
    slots = 5 * shape.num_layers
    decisions = list(drive(passes, policy, shape, slots, ESTIMATES, chunk_forwards=8))
    for costs, staging in [(make_costs(), 8), (make_costs(transfer_chunk=1, h2d_latency_ns=7.0, cpu_b0_ns=900.0), 1)]:
        expected = des.simulate(passes, policy, shape, slots, costs, ESTIMATES, staging_slots=staging)
        assert columns_of(time(decisions, costs, staging)) == columns_of(expected)


def test_copies_are_told_before_their_stretch():
    shape, passes = random_passes(np.random.default_rng(5))
    policy = built("lru", {}, shape, passes)

    def told(engine):
        copies = []
        chunks = engine.simulate(
            *(passes, policy, shape, 5 * shape.num_layers, make_costs(), ESTIMATES),
            chunk_forwards=4,
            on_copy=lambda copy: copies.append((copy.layer, copy.expert, copy.is_prefetch, copy.start_ns, copy.end_ns)),
        )
        return [(len(copies), len(chunk.forwards)) for chunk in chunks], copies

    assert told(compiled) == told(des)


# Passes that were read before


@pytest.mark.parametrize("name", ["oled", "hybrimoe"])
@pytest.mark.parametrize("reads_signals", [True, False])
@pytest.mark.parametrize("signals", [True, False])
def test_passes_read_once(name, reads_signals, signals):
    shape, passes = random_passes(np.random.default_rng(6), signals=signals)
    policy = built(name, {}, shape, passes)
    assert policy.reads_signals == (name == "hybrimoe")
    read = ReadPasses(iter(passes), shape, reads_signals)
    assert len(read) == len(list(read)) == len(passes)
    for engine in (compiled, des):
        run = (shape, 6 * shape.num_layers, make_costs(), ESTIMATES)
        expected = columns_of(engine.simulate(passes, policy, *run))
        assert columns_of(engine.simulate(read, policy, *run)) == expected
        assert columns_of(engine.simulate(read, policy, *run)) == expected


@each_policy
def test_built_in_policies_are_called_in_compiled_code(name, knobs):
    shape, passes = random_passes(np.random.default_rng(8), signals=True)
    policy = built(name, knobs, shape, passes)
    residents = Residents(policy, shape, 8 * shape.num_layers, ESTIMATES)
    assert functions_of(policy, residents, shape) is not None


class Named(NamedTuple):
    name: str
    own: Any


class Foreign(NamedTuple):
    own: Any


SHARED = {"decide": loop._at_view, "keep": pointers._keep}  # by all policies


@jit
def decide_foreign(params, state, step, view):
    return decide_lru(params.own, state, step, view)


@jit
def decide_named(params, state, step, view):
    return decide_lru(params.own, state, step, view)


def test_what_a_loop_cannot_keep_is_called_from_python():
    shape, passes = random_passes(np.random.default_rng(9))
    plain = built("lru", {}, shape, passes)
    named = replace(
        plain,
        params=Named("a text", plain.params),
        init=lambda params, *size: plain.init(params.own, *size),
        decide=decide_named,
    )
    residents = Residents(named, shape, 5 * shape.num_layers, ESTIMATES)
    assert functions_of(named, residents, shape) is None
    run = (shape, 5 * shape.num_layers, make_costs(), ESTIMATES)
    assert columns_of(compiled.simulate(passes, named, *run)) == columns_of(compiled.simulate(passes, plain, *run))


def test_classes_of_others_stay_out_of_the_cache():
    shape, passes = random_passes(np.random.default_rng(9))
    plain = built("lru", {}, shape, passes)
    foreign = replace(
        plain,
        params=Foreign(plain.params),
        init=lambda params, *size: plain.init(params.own, *size),
        decide=decide_foreign,
    )
    cached = {name: len(each.overloads) for name, each in SHARED.items()}
    run = (shape, 5 * shape.num_layers, make_costs(), ESTIMATES)
    functions = functions_of(foreign, Residents(foreign, *run[:2], ESTIMATES), shape)
    assert functions is not None
    assert {name: len(each.overloads) for name, each in SHARED.items()} == cached
    assert columns_of(compiled.simulate(passes, foreign, *run)) == columns_of(compiled.simulate(passes, plain, *run))
