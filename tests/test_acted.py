"""What was enabled and did nothing is said."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from reference import built
from strategies import random_passes
from test_metrics import forward_row, layer_row

from experiments.acted import idle_mechanisms
from experiments.profiles import load_profile
from experiments.results import ForwardTable
from experiments.run import simulate
from policies import ondemand
from policies.log import LogChunk, forward_builder, layer_builder

SHAPE, PASSES = random_passes(np.random.default_rng(0), signals=True)
ACTIVE = {"prefetch_issued": 4, "prefetch_landed": 2, "num_transfers": 3, "num_on_cpu": 2, "slots_moved": 1}
ACTIVE |= {"num_admitted": 1}


def idle(name, knobs=None, **counts):
    """What is said of a policy whose run had a prefill, all copied, and a decode forward with these counts."""
    prefill = dict.fromkeys(ACTIVE, 0) | {"num_transfers": 9, "kind": "prefill"}
    rows = [prefill, ACTIVE | {"kind": "denoise"} | counts]
    return idle_mechanisms(built(name, knobs or {}, SHAPE, PASSES), pl.DataFrame(rows))


@pytest.mark.parametrize("name", ["lru", "oled", "gate_ahead", "ideal_prefetch", "swapmoe", "ktransformers", "fiddler"])
def test_nothing_is_said_of_what_acted(name):
    assert idle(name) == []


SWAPS = {"num_admitted": 0, "prefetch_issued": 0, "prefetch_landed": 0}


@pytest.mark.parametrize(
    ("name", "knobs", "counts", "said"),
    [
        ("gate_ahead", {}, {"prefetch_issued": 0, "prefetch_landed": 0}, "prefetching is on, and nothing was prefetched"),
        ("gate_ahead", {}, {"prefetch_landed": 0}, "of 4 prefetches none landed"),
        ("oled", {}, {"num_on_cpu": 0}, "misses=oled never split: all 3 misses of decode forwards were copied"),
        ("lru", {"misses": "oled"}, {"num_transfers": 0}, "misses=oled never split: all 2 misses of decode forwards ran on the CPU"),
        ("oled", {}, {"slots_moved": 0}, "slots follow use, and none ever moved between layers"),
        ("fiddler", {}, {"num_transfers": 0}, "misses=fiddler never split: all 2 misses of decode forwards ran on the CPU"),
        ("swapmoe", {}, SWAPS, "swap_m=8 never changed what is resident"),
        ("swapmoe", {"swap_from_staging": False}, SWAPS, "prefetching is on, and nothing was prefetched"),
        ("ktransformers", {"kt_dyn": "prefill"}, SWAPS, "kt_dyn=prefill never changed what is resident"),
    ],
)  # fmt: skip
def test_what_was_idle_is_said(name, knobs, counts, said):
    assert idle(name, knobs, **counts) == [said]


@pytest.mark.parametrize(
    ("name", "knobs", "counts"),
    [
        ("gate_ahead", {"depth": 0}, {"prefetch_issued": 0, "prefetch_landed": 0}),
        ("oled", {"coop": False}, {"num_on_cpu": 0}),
        ("oled", {"layer_adapt": False}, {"slots_moved": 0}),
        ("oled", {}, {"num_transfers": 0, "num_on_cpu": 0}),
        ("swapmoe", {"swap_m": 0}, SWAPS),
        ("swapmoe", {"swap_m": 0, "swap_from_staging": False}, SWAPS),
        ("ktransformers", {}, SWAPS),
    ],
)
def test_what_is_off_or_had_nothing_to_do_is_not_idle(name, knobs, counts):
    assert idle(name, knobs, **counts) == []


def test_slots_move_between_one_forward_and_the_next():
    table = ForwardTable(3, 16, 0, 0, is_global=False)
    for forwards in ([(4, 4, 4), (4, 4, 4)], [(6, 3, 3)], [(3, 6, 3), (3, 6, 3)]):
        layers, passes = layer_builder(), forward_builder()
        for capacities in forwards:
            for layer, capacity in enumerate(capacities):
                layers.append(layer_row(0, layer, capacity=capacity))
            passes.append(forward_row(0))
        table.add(LogChunk(layers.build(), passes.build()))
    assert table.frame()["slots_moved"].to_list() == [0, 0, 2, 3, 0]


def test_a_run_says_it_in_its_summary():
    fast = replace(load_profile("rtx5090"), h2d_bytes_per_s=1e15, h2d_latency_ns=1)  # nothing is left to the CPU
    idle_run = simulate("proxy-tiny", "oled", 64, fast, shape="llada2.0-mini")
    assert [line.split(":")[0] for line in idle_run.summary["warnings"]] == [
        "misses=oled never split",
        "slots follow use, and none ever moved between layers",
    ]
    assert simulate("proxy-tiny", "oled", 16, shape="llada2.0-mini").summary["warnings"] == []


def test_transfers_that_stay_are_counted():
    layers, passes = layer_builder(), forward_builder()
    layers.append(layer_row(0, 0, transfers=[3, 5, 6], retained=[1, 3, 6]))
    layers.append(layer_row(0, 1, hits=[3], transfers=[1], on_cpu=[2], retained=[2, 3]))
    passes.append(forward_row(0))
    table = ForwardTable(2, 16, 0, 0, is_global=False)
    table.add(LogChunk(layers.build(), passes.build()))
    assert table.frame()["num_admitted"].to_list() == [2]


def test_a_run_says_that_nothing_was_swapped_in():
    warnings = {
        m: simulate("proxy-tiny", "swapmoe", 64, shape="llada2.0-mini", knobs={"swap_m": m}).summary["warnings"]
        for m in (0, 8)
    }
    assert [line for line in warnings[8] if line not in warnings[0]] == ["swap_m=8 never changed what is resident"]


def test_a_run_that_knows_its_future_says_so(monkeypatch):
    policy = built("sida", {"oracle_noise": 0.5}, SHAPE, PASSES)
    warnings = ("oracle_noise=0.5 predicts from the run itself, which no running system can",)
    assert (policy.clairvoyant, policy.warnings) == (True, warnings)
    told = {"clairvoyant": policy.clairvoyant, "warnings": policy.warnings}
    build = ondemand.build
    found = {}
    for name, changes in (("as it is", {}), ("knows", told)):  # of one that is soon compiled
        monkeypatch.setattr(ondemand, "build", lambda *given, changes=changes: replace(build(*given), **changes))
        summary = simulate("proxy-tiny", "ondemand", 16, shape="llada2.0-mini").summary
        found[name] = summary["clairvoyant"], summary["warnings"]
    assert found == {"as it is": (False, []), "knows": (True, [*warnings])}
