"""What runs of one process share, and that sharing changes nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from strategies import metadata_for, random_passes

from experiments.kept import Kept, Shelf
from experiments.profiles import load_profile
from experiments.run import DEFAULTS, NOTHING_KEPT, run
from tracer.store import TraceWriter

POLICIES = ("lru", "oled", "moe_infinity", "ideal_min")
MACHINES = [replace(load_profile("rtx5090"), h2d_bytes_per_s=rate) for rate in (12e9, 25e9, 50e9)]


def write_trace(path, seed=3):
    shape, passes = random_passes(np.random.default_rng(seed), num_experts=16, num_requests=3)
    with TraceWriter(path, metadata_for(shape), overwrite=True) as writer:
        for item in passes:
            writer.write(item)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_trace(Path("small.trace"))


def arguments(policy="lru", slots=6, hardware="rtx5090", **others):
    values = {"trace": "small.trace", "policy": policy, "slots_per_layer": slots, "hardware": hardware}
    return DEFAULTS | values | {"shape": "llada2.0-mini"} | others


def same(one, other):
    return one.summary == other.summary and one.forwards.equals(other.forwards)


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_that_share_are_what_they_are_alone(policy):
    kept = Kept(2**24)
    grid = [arguments(policy, slots, machine) for slots in (4, 9) for machine in MACHINES]
    assert all(same(run(each, kept), run(each, NOTHING_KEPT)) for each in grid + grid)


def test_machines_share_decisions_where_the_policy_does_not_look():
    for policy, of_machines in (("lru", 1), ("oled", 3), ("fiddler", 3), ("ktransformers", 1)):
        kept = Kept(2**24)
        for machine in MACHINES:
            run(arguments(policy, hardware=machine), kept)
        assert kept.num_drives == of_machines, policy
        slower_cpu = replace(MACHINES[0], cpu_roundtrip_ns=9e4)  # no estimate of a policy's
        run(arguments(policy, hardware=slower_cpu), kept)
        assert kept.num_drives == of_machines, policy


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 7},
        {"policy": "lfu"},
        {"knobs": {"lru_order": "id"}},
        {"warmup_requests": 2},
        {"calibration": "warmup"},
        {"seed": 1},
    ],
)
def test_what_decisions_may_depend_on_is_decided_anew(change):
    kept = Kept(2**24)
    run(arguments(), kept)
    once = run(arguments(), kept)
    assert kept.num_drives == 1
    assert same(run(arguments(**change), kept), run(arguments(**change), NOTHING_KEPT))
    assert kept.num_drives == (1 if change == {"calibration": "warmup"} else 2)  # where auto finds no record, the same
    assert same(run(arguments(), kept), once)


def test_another_trace_of_the_same_name_is_read_anew():
    kept = Kept(2**24)
    first = run(arguments(), kept)
    write_trace(Path("small.trace"), seed=4)
    assert same(run(arguments(), kept), run(arguments(), NOTHING_KEPT))
    assert run(arguments(), kept).summary["trace_hash"] != first.summary["trace_hash"]


@pytest.mark.parametrize("budget", [1, 5000, 40_000])
def test_what_does_not_fit_is_made_again(budget):
    kept = Kept(budget)
    for slots in (4, 5, 4):
        assert same(run(arguments(slots=slots), kept), run(arguments(slots=slots), NOTHING_KEPT))


def test_a_shelf_gives_up_what_was_not_used_for_longest():
    shelf = Shelf(10)
    shelf.put("a", 1, 4)
    shelf.put("b", 2, 4)
    assert shelf.get("a") == 1
    shelf.put("c", 3, 4)
    assert [shelf.get(key) for key in "abc"] == [1, None, 3]
    shelf.put("d", 4, 11)
    assert shelf.get("d") is None
    assert shelf.get("c") == 3
