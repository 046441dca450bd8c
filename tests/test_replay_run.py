"""Whole runs of policies with real copies and CPU experts: the same decisions as the simulator's, and whole logs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from replayed import small_machine
from scripted import ESTIMATES, make_costs

from experiments.calibration import context_of
from policies.contract import Policy, PolicyError
from policies.log import LAYER_COLUMNS, LAYER_LISTS, PREFETCH_COUNTS, DecisionHash, LogChunk
from policies.profile import ProfileError
from policies.registry import POLICIES, build_policy
from replay.calibrate_gpu import row_ns
from replay.machine import Machine
from replay.run import replay
from simulator import des
from tracer.schema import Pass
from tracer.shipped import find_trace
from tracer.store import TraceReader

TRACE, FORWARDS, SLOTS, STAGING = "proxy-tiny", 8, 20, 8  # slots of each layer
READER = TraceReader(find_trace(TRACE))
SHAPE = READER.metadata.shape
CONTEXT = context_of(READER, warmup_requests=1)[0]
PREFETCHING = ("finemoe", "gate_ahead", "ideal_prefetch", "moe_infinity", "sida")


def built(name: str, **knobs: object) -> Policy:
    return build_policy(name, knobs, replace(CONTEXT, policy=name))


@pytest.fixture(scope="module")
def passes() -> list[Pass]:
    return list(islice(READER.passes(signals=READER.has_signals), FORWARDS))


@pytest.fixture(scope="module")
def machine(passes: list[Pass]) -> Iterator[Machine]:
    made = machine_for(passes)
    yield made
    made.close()


def machine_for(passes: Sequence[Pass], device: str = "cpu", hidden: int = 64, factor: int = 1) -> Machine:
    num_slots = SHAPE.num_layers * SHAPE.num_experts + STAGING
    sizes = SHAPE.num_layers, SHAPE.num_experts, SHAPE.top_k, num_slots
    return small_machine(passes, *sizes, device=device, hidden=hidden, factor=factor)


def replayed(machine: Machine, passes: Sequence[Pass], policy: Policy) -> list[LogChunk]:
    return replay(machine, passes, policy, SHAPE, SLOTS * SHAPE.num_layers, ESTIMATES, STAGING).chunks


def simulated(passes: Sequence[Pass], policy: Policy) -> list[LogChunk]:
    slots = SLOTS * SHAPE.num_layers
    return list(des.simulate(passes, policy, SHAPE, slots, make_costs(), ESTIMATES, staging_slots=STAGING))


def hash_of(chunks: Sequence[LogChunk]) -> str:
    digest = DecisionHash()
    for chunk in chunks:
        digest.update(chunk.layers, np.ones(len(chunk.layers), np.bool_))
    return digest.hexdigest()


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("ideal_free", *PREFETCHING)])
def test_a_policy_without_prefetch_decides_as_in_the_simulator(name: str, machine: Machine, passes: list[Pass]) -> None:
    policy = built(name)
    assert not policy.prefetches
    chunks = replayed(machine, passes, policy)
    assert hash_of(chunks) == hash_of(simulated(passes, policy))
    check_whole(chunks, passes)


@pytest.mark.parametrize("name", PREFETCHING)
def test_a_policy_that_prefetches_leaves_a_whole_log(name: str, machine: Machine, passes: list[Pass]) -> None:
    policy = built(name)
    assert policy.prefetches
    chunks = replayed(machine, passes, policy)
    check_whole(chunks, passes)
    counts = {name: sum(int(chunk.layers.scalars[name].sum()) for chunk in chunks) for name in PREFETCH_COUNTS}
    dropped = sum(count for name, count in counts.items() if "dropped" in name)
    assert counts["prefetch_started"] - counts["prefetch_landed"] in (0, 1)
    assert counts["prefetch_started"] + dropped <= counts["prefetch_issued"]


def check_whole(chunks: Sequence[LogChunk], passes: Sequence[Pass]) -> None:
    """Every layer of every forward has its row; times are in order, and copies of a layer within the run."""
    (chunk,) = chunks
    layers, forwards = chunk.layers, chunk.forwards
    assert set(layers.scalars) == set(LAYER_COLUMNS)
    assert set(layers.lists) == set(LAYER_LISTS)
    assert len(forwards) == len(passes)
    assert len(layers) == len(passes) * SHAPE.num_layers
    start, plan, end = (layers.scalars[name] for name in ("start_ns", "plan_ns", "end_ns"))
    assert (start[1:] >= start[:-1]).all()
    assert (start <= plan).all()
    assert (plan <= end).all()
    assert (forwards.scalars["end_ns"][:-1] == forwards.scalars["start_ns"][1:]).all()
    begins, ends = (layers.lists[name].values for name in ("transfer_start_ns", "transfer_end_ns"))
    assert (begins <= ends).all()
    assert (ends <= np.repeat(end, layers.lists["transfers"].lengths())).all()
    served = sum(layers.lists[name].lengths() for name in ("hits", "transfers", "on_cpu"))
    assert (served == layers.scalars["num_activated"]).all()
    activated = np.concatenate([[len(np.unique(ids)) for ids in pass_.expert_ids] for pass_ in passes])
    assert (served == activated).all()


def test_runs_on_one_machine_do_not_depend_on_those_before(machine: Machine, passes: list[Pass]) -> None:
    first = hash_of(replayed(machine, passes, built("lru")))
    replayed(machine, passes, built("oled"))
    assert hash_of(replayed(machine, passes[:6], built("lru"))) != first
    assert hash_of(replayed(machine, passes, built("lru"))) == first


def test_a_slower_link_changes_no_decision(passes: list[Pass]) -> None:
    machine = machine_for(passes, factor=4)
    try:
        assert hash_of(replayed(machine, passes, built("lru"))) == hash_of(simulated(passes, built("lru")))
    finally:
        machine.close()


def test_what_no_hardware_does_is_refused(machine: Machine, passes: list[Pass]) -> None:
    with pytest.raises(PolicyError, match="ideal_free places experts at no cost, which no hardware does"):
        replayed(machine, passes, built("ideal_free"))


def test_too_few_slots_on_the_machine_are_named(passes: list[Pass]) -> None:
    machine = small_machine(passes, SHAPE.num_layers, SHAPE.num_experts, SHAPE.top_k, 30)
    try:
        with pytest.raises(ProfileError, match="lru needs 68 slots, the machine has 30"):
            replayed(machine, passes, built("lru"))
        with pytest.raises(ProfileError, match="staging_slots is 3, must be at least 4"):
            replay(machine, passes, built("lru"), SHAPE, 6, ESTIMATES, 3)
    finally:
        machine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["lru", "oled", "ktransformers", "ondemand", "gate_ahead", "moe_infinity"])
def test_a_run_on_a_gpu(name: str, passes: list[Pass]) -> None:
    machine = machine_for(passes, device="cuda", hidden=256)
    try:
        policy = built(name)
        chunks = replayed(machine, passes, policy)
        check_whole(chunks, passes)
        if not policy.prefetches:
            assert hash_of(chunks) == hash_of(simulated(passes, policy))
        assert machine.busy_link() is not None
        assert row_ns(machine.device, lambda layer: machine.start_layer(3, layer), 2) > 0
    finally:
        machine.close()
