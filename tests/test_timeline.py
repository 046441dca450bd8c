from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pftraces import Slice, Track, by_name, read_tracks
from scripted import ESTIMATES, Script, layer_rows, make_costs, make_pass, make_shape, random_policy, scripted
from strategies import random_passes

from experiments.timeline import Timeline, Window
from experiments.timeline_packets import TraceWriter
from policies.contract import Policy
from policies.log import LogChunk
from policies.profile import Costs
from simulator import des
from simulator.clock import Clock
from simulator.slots import Slots
from tracer.schema import ModelShape, Pass

EVERYTHING = Window(0, None)


def record(
    path: Path,
    passes: Sequence[Pass],
    policy: Policy,
    shape: ModelShape,
    costs: Costs,
    window: Window = EVERYTHING,
    *,
    warmup: int = 0,
    chunk_forwards: int = 256,
    slots: int = 0,
    staging: int = 8,
) -> tuple[dict[str, Track], list[LogChunk]]:
    """Run with a timeline; returns its tracks and the log."""
    with path.open("wb") as file:
        timeline = Timeline(
            TraceWriter(file),
            "run",
            costs=costs,
            num_experts=shape.num_experts,
            is_global=policy.pool == "global",
            window=window,
            warmup_requests=warmup,
        )
        log = []
        for chunk in des.simulate(
            *(passes, policy, shape, slots, costs, ESTIMATES),
            staging_slots=staging,
            chunk_forwards=chunk_forwards,
            on_copy=timeline.add_copy,
        ):
            timeline.add(chunk)
            log.append(chunk)
        timeline.finish()
    return by_name(read_tracks(path)), log


def names_and_times(slices: Sequence[Slice]) -> list[tuple[str, int, int]]:
    return [(one.name, one.start_ns, one.end_ns) for one in slices]


def test_the_worked_example_slice_by_slice(tmp_path: Path) -> None:
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
        tail_ns=8 * us,
    )
    loads = dict.fromkeys(range(7), 1) | {7: 1, 8: 2, 9: 3}
    shape = make_shape(1, 16)
    policy = scripted(shape, {(0, 0): Script(on_cpu=[7, 8, 9])}, capacity=2, residents={0: [0, 1]})
    tracks, _ = record(tmp_path / "t", [make_pass(0, [loads])], policy, shape, costs)
    about = {"activated": 10, "missed": 8, "on_cpu": 3, "resident": 2, "capacity": 2}
    whole = {"forward": 0, "pass": 0, "tokens": 13, "kv_len": 0, "accepted": 1}
    assert tracks["GPU stream"].slices == [
        Slice(0, 100 * us, "non-expert part", {"layer": 0}, 0),
        Slice(100 * us, 124 * us, "hits", {"layer": 0, "experts": 2, "tokens": 2}, 0),
        Slice(604 * us, 632 * us, "chunk", {"layer": 0, "experts": 4, "tokens": 4}, 0),
        Slice(730 * us, 752 * us, "chunk", {"layer": 0, "experts": 1, "tokens": 1}, 0),
        Slice(752 * us, 760 * us, "tail", {}, 0),
    ]
    assert tracks["H2D engine: demand"].slices == [
        Slice(first * us, (first + 126) * us, f"L0 E{expert}", {"layer": 0, "expert": expert}, 0)
        for expert, first in zip(range(2, 7), range(100, 700, 126), strict=False)
    ]
    assert tracks["CPU pool"].slices == [
        Slice(100 * us, 630 * us, "batch", {"layer": 0, "experts": 3, "tokens": 6}, 0),
        Slice(630 * us, 660 * us, "roundtrip", {"layer": 0}, 0),
    ]
    assert tracks["forwards"].slices == [
        Slice(0, 752 * us, "layer 0", about, 1),
        Slice(0, 760 * us, "denoise", whole, 0),
    ]
    assert tracks["requests"].slices == [
        Slice(0, 760 * us, "iteration 0", {"accepted": 1}, 2),
        Slice(0, 760 * us, "block 0", {"block": 0}, 1),
        Slice(0, 760 * us, "request 0", {"request": 0}, 0),
    ]
    assert tracks["H2D engine: prefetches"].slices == []
    # residents, and each transfer from the start of its copy to the end of its chunk's kernel, as none is retained
    starts = [(at * us, taken) for at, taken in ((100, 3), (226, 4), (352, 5), (478, 6), (604, 7))]
    assert tracks["slots taken"].counts == [(0, 2), *starts, (632 * us, 3), (752 * us, 2)]
    assert tracks["missed experts"].counts == [(0, 8)]


def draw_run(seed: int, **options: Any) -> tuple[list[Pass], Policy, ModelShape, Costs]:
    """A random trace with batches, random costs, and a policy of random plans."""
    rng = np.random.default_rng(seed)
    num_experts = int(rng.integers(8, 14))
    shape, passes = random_passes(rng, num_experts=num_experts, top_k=2, num_requests=3, batch=int(rng.integers(1, 4)))
    round_to = int(rng.choice([1, 10, 50]))

    def draw(high: int) -> float:
        return float(rng.integers(0, high // round_to + 1) * round_to)

    costs = make_costs(
        n_a_ns=draw(100) + round_to,
        g_a_ns=draw(100) + round_to,
        g_b_ns=draw(50),
        g_c_ns=draw(10),
        h2d_latency_ns=draw(200) + round_to,
        cpu_b0_ns=draw(200),
        cpu_roundtrip_ns=int(draw(50)),
        tail_ns=int(draw(200)),
        policy_ns=int(draw(50)),
        gate_sync_ns=int(draw(50)),
        h2d_slowdown=float(rng.choice([1.0, 1.5])),
        transfer_chunk=int(rng.integers(1, 5)),
    )
    pool = str(rng.choice(["layer", "global"]))
    sizes = rng.integers(0, num_experts + 1, shape.num_layers)
    capacity = [int(sizes.sum())] if pool == "global" else sizes.tolist()
    return passes, random_policy(shape, seed, capacity=capacity, pool=pool, **options), shape, costs


def total(slices: Sequence[Slice], *names: str) -> int:
    return sum(one.end_ns - one.start_ns for one in slices if not names or one.name in names)


def do_not_overlap(slices: Sequence[Slice]) -> bool:
    ordered = sorted(slices, key=lambda one: (one.start_ns, one.end_ns))
    return all(first.end_ns <= second.start_ns for first, second in pairwise(ordered))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), prefetches=st.booleans())
def test_tracks_add_up_to_the_log(tmp_path_factory: pytest.TempPathFactory, seed: int, prefetches: bool) -> None:
    passes, policy, shape, costs = draw_run(seed, prefetches=prefetches, moves_slots=True)
    tracks, log = record(tmp_path_factory.mktemp("run") / "t", passes, policy, shape, costs)
    rows = layer_rows(log)
    gpu, demand, cpu = (tracks[name].slices for name in ("GPU stream", "H2D engine: demand", "CPU pool"))
    ahead, forwards = tracks["H2D engine: prefetches"].slices, tracks["forwards"].slices
    for slices in (gpu, [*demand, *ahead], cpu):
        assert {one.depth for one in slices} <= {0}
        assert do_not_overlap(slices)
    # the GPU: what the plans waited for, the hits, each layer's chunks up to its end, and the tails
    assert total(gpu, "non-expert part", "gate sync", "policy") == sum(r["plan_ns"] - r["start_ns"] for r in rows)
    assert total(gpu, "gate sync") == costs.gate_sync_ns * len(rows)
    assert total(gpu, "policy") == costs.policy_ns * len(rows)
    assert total(gpu, "hits") == sum(r["hits_end_ns"] - r["plan_ns"] for r in rows)
    assert total(gpu, "tail") == costs.tail_ns * len(passes)
    for layer, row in zip([one for one in forwards if one.depth == 1], rows, strict=True):
        ends = [one.end_ns for one in gpu if one.name != "tail" and layer.start_ns < one.end_ns <= layer.end_ns]
        assert max(*ends, row["cpu_end_ns"]) == layer.end_ns == row["end_ns"]
    # the link: all that the log counts as landed
    assert total([*demand, *ahead]) == sum(r["link_busy_ns"] for r in rows)
    assert len(demand) == sum(len(r["transfers"]) - r["num_promoted"] for r in rows)
    assert len(ahead) == sum(r["prefetch_landed"] for r in rows)
    # the CPU
    assert total(cpu) == sum(r["cpu_end_ns"] - r["plan_ns"] for r in rows)
    assert total(cpu, "roundtrip") == costs.cpu_roundtrip_ns * sum(bool(r["on_cpu"]) for r in rows)
    assert total([one for one in forwards if one.depth == 0]) == log[-1].forwards.scalars["end_ns"][-1]
    assert [count for _, count in tracks["missed experts"].counts] == [
        r["num_activated"] - len(r["hits"]) for r in rows
    ]


class Taken:
    """What the engine itself says of the slots taken, at the end of every instant."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: dict[int, int] = {}
        step = Clock.step

        class Kept(Slots):
            def __init__(kept, *arguments: Any) -> None:  # noqa: N805
                super().__init__(*arguments)
                self.slots = kept

        def watched(clock: Clock) -> None:
            self.at[clock.now_ns] = self.slots.num_taken  # after all that the instant has brought about so far
            step(clock)

        patch.setattr(des, "Slots", Kept)
        patch.setattr(Clock, "step", watched)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), prefetches=st.booleans())
def test_slots_taken_are_those_of_the_engine(
    tmp_path_factory: pytest.TempPathFactory, seed: int, prefetches: bool
) -> None:
    passes, policy, shape, costs = draw_run(seed, prefetches=prefetches, moves_slots=True)
    first = 1 if prefetches or policy.pool == "global" else 0  # their random residents at the start are not in the log
    with pytest.MonkeyPatch.context() as patch:
        taken = Taken(patch)
        path = tmp_path_factory.mktemp("run") / "t"
        tracks, log = record(path, passes, policy, shape, costs, Window(first, None))
    rows = layer_rows(log)
    links = [tracks[name].slices for name in ("H2D engine: demand", "H2D engine: prefetches")]
    end_ns = int(log[0].forwards.scalars["end_ns"][-1]) + 1
    if sum(row["prefetch_started"] - row["prefetch_landed"] for row in rows):
        end_ns = max(one.end_ns for slices in links for one in slices)  # the last copy is under way when the run ends
    start_ns = int(log[0].forwards.scalars["start_ns"][first])
    assert between(tracks["slots taken"].counts, start_ns, end_ns) == between(list(taken.at.items()), start_ns, end_ns)


def between(counts: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> list[tuple[int, int]]:
    """The changes of a counter; of several values at one instant the last counts."""
    kept = [(at, count) for at, count in dict(counts).items() if start_ns <= at < end_ns]
    return [kept[0], *(after for before, after in pairwise(kept) if after[1] != before[1])]


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("chunk_forwards", [1, 3, 256])
def test_a_window_is_a_part_of_the_whole(tmp_path: Path, prefetches: bool, chunk_forwards: int) -> None:
    for seed in range(6):
        run = draw_run(seed, prefetches=prefetches)
        whole, log = record(tmp_path / "whole", *run)
        part, _ = record(tmp_path / "part", *run, Window(4, 3), chunk_forwards=chunk_forwards)
        first_ns, last_ns = (int(log[0].forwards.scalars[name][at]) for name, at in (("start_ns", 4), ("end_ns", 6)))
        for name, track in part.items():
            if name.startswith("requests"):
                assert all(first_ns <= one.start_ns < one.end_ns <= last_ns for one in track.slices)
            elif name == "run" or not name.startswith("H2D"):
                assert track.slices == [s for s in whole[name].slices if first_ns <= s.start_ns < last_ns]
            else:  # a copy may be under way at the edges
                assert track.slices == [s for s in whole[name].slices if s.start_ns < last_ns and s.end_ns > first_ns]
            if track.counts:
                assert between(track.counts, first_ns, last_ns) == between(whole[name].counts, first_ns, last_ns)


def test_the_default_window_begins_with_the_first_counted_decode_forward(tmp_path: Path) -> None:
    shape, passes = random_passes(np.random.default_rng(0), num_requests=3)
    policy = random_policy(shape, 0, capacity=[4] * shape.num_layers)
    counted = [p for p in passes if p.requests.min() > 0 and p.kind != 0]
    tracks, _ = record(tmp_path / "t", passes, policy, shape, make_costs(), Window(), warmup=1)
    forwards = [one.arguments for one in tracks["forwards"].slices if one.depth == 0]
    assert [one["pass"] for one in forwards] == [p.pass_id for p in passes if p.pass_id >= counted[0].pass_id][:20]
    assert passes[counted[0].pass_id - 1].kind == 0  # prefill
    tracks, _ = record(tmp_path / "t", passes, policy, shape, make_costs(), Window(None, 2), warmup=2)
    assert len([one for one in tracks["forwards"].slices if one.depth == 0]) == 2


def test_requests_of_a_batch_never_share_a_track(tmp_path: Path) -> None:
    shape, passes = random_passes(np.random.default_rng(1), num_requests=5, batch=3)
    policy = random_policy(shape, 0, capacity=[4] * shape.num_layers)
    tracks, log = record(tmp_path / "t", passes, policy, shape, make_costs())
    lanes = [track for name, track in tracks.items() if name.startswith("requests")]
    assert [track.name for track in lanes] == ["requests", "requests (2)", "requests (3)"]
    requests = [one for track in lanes for one in track.slices if one.depth == 0]
    starts, ends = (log[0].forwards.scalars[name] for name in ("start_ns", "end_ns"))
    for request in range(5):
        runs = [row for row, p in enumerate(passes) if request in p.requests]
        assert runs == list(range(runs[0], runs[-1] + 1))
        (found,) = [one for one in requests if one.arguments["request"] == request]
        assert (found.name, found.start_ns, found.end_ns) == (f"request {request}", starts[runs[0]], ends[runs[-1]])
    for track in lanes:
        for depth in range(3):
            assert do_not_overlap([one for one in track.slices if one.depth == depth])
    accepted = [one.arguments["accepted"] for track in lanes for one in track.slices if one.depth == 2]
    assert sum(map(int, accepted)) == sum(int(p.num_accepted.sum()) for p in passes)


def test_tracks_stand_in_order_below_the_run(tmp_path: Path) -> None:
    passes, policy, shape, costs = draw_run(0)
    record(tmp_path / "t", passes, policy, shape, costs)
    tracks = read_tracks(tmp_path / "t")
    (root,) = [number for number, track in tracks.items() if not track.parent]
    below = [track for track in tracks.values() if track.parent == root]
    assert len(below) == len(tracks) - 1
    ordered = [track.name for track in sorted(below, key=lambda track: track.rank) if "(" not in track.name]
    assert ordered == [
        "requests",
        "forwards",
        "GPU stream",
        "H2D engine: demand",
        "H2D engine: prefetches",
        "CPU pool",
        "slots taken",
        "missed experts",
    ]
    assert {track.name: track.unit for track in below if track.unit} == {
        "slots taken": "slots",
        "missed experts": "experts",
    }


def test_two_timelines_share_a_file(tmp_path: Path) -> None:
    passes, policy, shape, costs = draw_run(3)
    log = list(des.simulate(passes, policy, shape, 0, costs, ESTIMATES, staging_slots=8))
    with (tmp_path / "t").open("wb") as file:
        writer = TraceWriter(file)
        for name in ("simulated", "measured"):
            is_global = policy.pool == "global"
            timeline = Timeline(
                writer, name, costs=costs, num_experts=shape.num_experts, is_global=is_global, window=EVERYTHING
            )
            for chunk in log:
                timeline.add(chunk)
            timeline.finish()
    tracks = read_tracks(tmp_path / "t")
    first, second = (
        [t for t in tracks.values() if tracks.get(t.parent, t).name == name] for name in ("simulated", "measured")
    )
    assert len(first) == len(second) == len(tracks) // 2
    for one, other in zip(first[1:], second[1:], strict=True):
        assert (one.name, one.slices, one.counts) == (other.name, other.slices, other.counts)


def test_numbers_of_any_size_and_sign_survive(tmp_path: Path) -> None:
    values = [0, 1, 127, 128, 2**31, 2**62, -1, -(2**40)]
    with (tmp_path / "t").open("wb") as file:
        writer = TraceWriter(file)
        counter = writer.counter("a counter, überall", 0, 0, "°")
        for at, value in zip([0, 1, 127, 128, 16384, 2**40, 2**60, 2**62], values, strict=True):
            writer.count(counter, at, value)
        track = writer.track("a track")
        writer.begin(track, 5, "a slice", {"a text": "wörtlich", "a number": -7})
        writer.end(track, 9)
    tracks = by_name(read_tracks(tmp_path / "t"))
    assert [value for _, value in tracks["a counter, überall"].counts] == values
    assert tracks["a counter, überall"].unit == "°"
    assert tracks["a track"].slices == [Slice(5, 9, "a slice", {"a text": "wörtlich", "a number": -7}, 0)]
