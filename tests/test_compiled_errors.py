"""What is wrong with a policy or a trace is told by the compiled engine in the words of the event engine."""

from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import pytest
from logs import same_error
from reference import built
from scripted import ESTIMATES, Script, make_costs, make_pass, make_shape, scripted
from strategies import change, random_passes

from policies.contract import Plan, Policy, PolicyError
from policies.jit import jit
from simulator import compiled, des
from simulator.drive import drive


class Fault(IntEnum):
    NONE = 0
    TRANSFER_RANGE = 1
    CPU_RANGE = 2
    TWICE = 3
    NOT_MISSED = 4
    NOT_SERVED = 5
    NOT_HELD = 6
    TOO_MANY = 7
    RETAINED_SIZE = 8
    PRIORITY_SIZE = 9  # other than of the prefetches
    DELAY = 10  # negative
    GATE_ERROR = 11
    END_ERROR = 12  # after the last layer
    SLOTS = 13  # one more than there were
    NEGATIVE = 14  # capacity
    EVICTS = 15  # who is not resident
    KEEPS = 16  # more than there are slots
    PLACES = 17  # more than there are slots
    PLACE_ERROR = 18


class FaultyParams(NamedTuple):
    fault: int  # Fault
    forward: int
    layer: int


class FaultyState(NamedTuple):
    nothing: np.ndarray


@jit
def faulty_decide(params, state, step, view):
    fault = params.fault if (step.forward, step.layer) == (params.forward, params.layer) else 0
    if fault == Fault.GATE_ERROR:
        raise PolicyError("the gate is closed")
    missed = np.flatnonzero((step.load > 0) & ~view.resident[step.layer])
    hits = np.flatnonzero((step.load > 0) & view.resident[step.layer])
    on_cpu, retained = missed[:1].copy(), view.resident[step.layer].copy()
    transfers = missed[1:].copy()
    if fault == Fault.TRANSFER_RANGE:
        transfers = np.append(transfers, step.load.size)
    if fault == Fault.CPU_RANGE:
        on_cpu = np.append(on_cpu, -1)
    if fault == Fault.TWICE:
        transfers = missed.copy()
    if fault == Fault.NOT_MISSED:
        transfers = hits.copy()
    if fault == Fault.NOT_SERVED:
        transfers = missed[:0].copy()
    if fault == Fault.NOT_HELD:
        retained[missed[0]] = True
    if fault == Fault.TOO_MANY:
        retained[transfers] = True
    if fault == Fault.RETAINED_SIZE:
        retained = retained[1:].copy()
    priority = np.zeros((1 if fault == Fault.PRIORITY_SIZE else 0, 2))
    delay_ns = -1 if fault == Fault.DELAY else 0
    return Plan(transfers, on_cpu, retained, np.empty((0, 2), np.int64), priority, False, delay_ns)


@jit
def faulty_boundary(params, state, end, view):
    fault = params.fault if end.forward == params.forward else 0
    capacity, evictions = view.capacity.copy(), np.zeros_like(view.resident)
    if fault == Fault.END_ERROR:
        raise PolicyError("the end is near")
    if fault == Fault.SLOTS:
        capacity[0] += 1
    if fault == Fault.NEGATIVE:
        capacity[1] += capacity[0] + 1
        capacity[0] = -1
    if fault == Fault.EVICTS:
        evictions[1] = True
    if fault == Fault.KEEPS:
        capacity[1] += capacity[0]
        capacity[0] = 0
    return capacity, evictions


@jit
def faulty_place(params, state, step):
    fault = params.fault if (step.forward, step.layer) == (params.forward, params.layer) else 0
    if fault == Fault.PLACE_ERROR:
        raise PolicyError("no place")
    placed = np.zeros(step.load.size, np.bool_)
    placed[np.flatnonzero(step.load)[: 3 if fault == Fault.PLACES else 2]] = True
    return placed


def faulty_init(params, shape, slots):
    resident = np.zeros((shape.num_layers, shape.num_experts), bool)
    return FaultyState(np.zeros(1, np.int64)), resident, np.full(shape.num_layers, 2, np.int64)


def faulty(fault):
    return Policy(
        "faulty",
        FaultyParams(int(fault), 1, 1),
        faulty_init,
        faulty_decide,
        faulty_boundary,
        faulty_place,
        sized=False,
    )


@pytest.mark.parametrize("fault", Fault, ids=[fault.name.lower() for fault in Fault])
def test_what_breaks_the_contract_is_told_alike(fault):
    shape = make_shape(2, 8)
    passes = [make_pass(index, [range(6), range(1, 7)], request=index + 3) for index in range(3)]
    policy = faulty(fault)
    message = same_error(
        lambda engine=engine: list(engine.simulate(passes, policy, shape, 0, make_costs(), ESTIMATES, chunk_forwards=1))
        for engine in (des, compiled)
    )
    if fault == Fault.NONE:
        assert list(compiled.simulate(passes, policy, shape, 0, make_costs(), ESTIMATES))
        assert message == "none: "
    elif fault == Fault.PLACE_ERROR:
        assert message == "PolicyError: no place"
    else:
        where = "after the last layer" if Fault.END_ERROR <= fault <= Fault.KEEPS else "layer 1"
        kind = "PolicyError" if fault in (Fault.GATE_ERROR, Fault.END_ERROR) else "PlanError"
        assert message.startswith(f"{kind}: request 4, forward 1, {where}: ")


@pytest.mark.parametrize("fault", [Fault.TWICE, Fault.KEEPS])
def test_what_came_before_a_fault_is_handed_on(fault):
    shape = make_shape(2, 8)
    passes = [make_pass(index, [range(6), range(1, 7)]) for index in range(3)]
    policy = faulty(fault)
    chunks = compiled.simulate(passes, policy, shape, 0, make_costs(), ESTIMATES, chunk_forwards=1)
    assert next(chunks).forwards.scalars["pass_id"].tolist() == [0]
    with pytest.raises(ValueError, match="forward 1"):
        next(chunks)


def test_answers_of_other_types_are_told_alike():
    shape = make_shape(1, 4)

    @jit
    def decide(params, state, step, view):
        nothing = np.empty(0, np.int32)
        retained = view.resident[step.layer].copy()
        return Plan(nothing, nothing, retained, np.empty((0, 2), np.int64), np.empty((0, 2)), False, 0)

    policy = replace(scripted(shape, capacity=1), decide=decide)
    message = same_error(
        lambda engine=engine: list(engine.simulate([make_pass(0, [[0]])], policy, shape, 0, make_costs(), ESTIMATES))
        for engine in (des, compiled)
    )
    assert message == (
        "PlanError: request 0, forward 0, layer 0: transfers is int32 of shape (0,), must be int64 of (any)"
    )


def test_what_cannot_start_is_told_alike():
    shape, passes = random_passes(np.random.default_rng(7), signals=True)
    other = [change(passes[0], expert_ids=passes[0].expert_ids[1:], gates=passes[0].gates[1:])]
    beyond = [change(passes[0], expert_ids=passes[0].expert_ids + shape.num_experts)]
    lru = built("lru", {}, shape, passes)

    def told(passes, slots, **options):
        return same_error(
            lambda engine=engine: list(engine.simulate(passes, lru, shape, slots, make_costs(), ESTIMATES, **options))
            for engine in (des, compiled)
        )

    assert told(passes, 0).startswith("PolicyError: 0 slots for 3 layers")
    assert told(other, 18).startswith("TraceError: pass 0: expert_ids are (2, ")
    assert told(beyond, 18).startswith("TraceError: pass 0: expert ids from ")
    assert told(passes, 18, staging_slots=3).startswith("ProfileError: staging_slots is 3, must be at least 4")
    assert told([], 18) == "none: "
    for engine in (des, compiled):
        with pytest.raises(PolicyError):  # before the log is asked for
            engine.simulate(passes, lru, shape, 0, make_costs(), ESTIMATES)


def test_a_policy_that_prefetches_needs_a_clock():
    shape = make_shape(1, 4)
    policy = scripted(shape, {(0, 0): Script(prefetches=[(0, 3)])}, capacity=2)
    with pytest.raises(PolicyError, match="scripted prefetches, so its decisions need an engine with a clock"):
        list(drive([make_pass(0, [[0]])], policy, shape, 0, ESTIMATES))
