"""`output.timeline` on small traces: the file is part of a run's, and its window is checked before anything runs."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from commands import command
from pftraces import by_name, read_tracks
from scripted import ESTIMATES, make_costs, random_policy
from strategies import metadata_for, random_passes

from experiments.errors import ConfigError
from experiments.files import read_run
from experiments.run import simulate
from experiments.simulate_command import main
from experiments.timeline import Timeline, Window
from experiments.timeline_packets import TraceWriter
from policies.log import LogChunk, Table
from simulator import des
from tracer import store


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.trace"
    shape, passes = random_passes(np.random.default_rng(3), num_experts=16, num_requests=3)
    with store.TraceWriter(path, metadata_for(shape)) as writer:
        for pass_ in passes:
            writer.write(pass_)
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def forwards_of(path):
    return [one.arguments for one in by_name(read_tracks(path))["forwards"].slices if one.depth == 0]


def test_a_run_has_a_timeline_where_it_is_asked_for(trace):
    keys = "policy=oled", "cache.slots_per_layer=6", "output.dir=out"
    finished = command(main, f"trace={trace}", *keys, "output.timeline=true", "output.timeline_forwards=3")
    assert finished.code == 0, finished.err
    assert len(list(Path("out").iterdir())) == 5
    tracks = read_tracks(Path("out/timeline.pftrace"))
    (name,) = [track.name for track in tracks.values() if not track.parent]
    assert name == "simulated: oled, 6 slots a layer, rtx5090, small"
    table = simulate(trace, "oled", 6).forwards.filter(~pl.col("warmup"), pl.col("kind") != "prefill")
    first = table["forward"][0]
    assert [one["forward"] for one in forwards_of(Path("out/timeline.pftrace"))] == [first, first + 1, first + 2]
    # a run without it is another one, and one that has lost it is not whole
    without = command(main, f"trace={trace}", *keys)
    assert (without.code, "holds a run with another output.timeline" in without.err) == (2, True)
    assert read_run(Path("out")) is not None
    Path("out/timeline.pftrace").unlink()
    assert read_run(Path("out")) is None
    assert command(main, f"trace={trace}", *keys).code == 0
    assert not Path("out/timeline.pftrace").exists()


def test_a_policy_that_prefetches_shows_its_copies(trace):
    result = simulate(
        trace, "ideal_prefetch", 6, output="out", timeline=True, timeline_from_forward=0, timeline_forwards=None
    )
    tracks = by_name(read_tracks(Path("out/timeline.pftrace")))
    landed = result.forwards["prefetch_landed"].sum()
    assert len(tracks["H2D engine: prefetches"].slices) == landed > 0
    assert len(forwards_of(Path("out/timeline.pftrace"))) == result.forwards.height


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["output.timeline_from_forward=999"], "timeline_from_forward is 999, must be 0 to "),
        (["output.timeline_from_forward=-1"], "timeline_from_forward is -1, must be 0 to "),
        (["output.timeline_forwards=0"], "timeline_forwards is 0, must be 1 or more, or null for all that follow"),
        (["output.timeline_forwards=all"], "output.timeline_forwards: "),
    ],
)
def test_a_window_outside_the_run_is_refused(trace, keys, message):
    common = "policy=lru", "cache.slots_per_layer=6", "output.dir=out", "output.timeline=true"
    finished = command(main, f"trace={trace}", *common, *keys)
    assert finished.code == 2
    assert message in finished.err
    assert len(finished.err.splitlines()) == 1
    assert not Path("out").exists()


def test_a_timeline_needs_a_directory(trace):
    with pytest.raises(ConfigError, match="output must be a directory"):
        simulate(trace, "lru", 6, timeline=True)


def test_a_timeline_without_a_counted_decode_forward_says_so(tmp_path):
    shape, passes = random_passes(np.random.default_rng(3), num_requests=2, batch=2)
    shared = [pass_ for pass_ in passes if 0 in pass_.requests]
    path = tmp_path / "shared.trace"
    with store.TraceWriter(path, metadata_for(shape)) as writer:
        for pass_ in shared:
            writer.write(pass_)
    result = simulate(path, "lru", 4, output="out", timeline=True)
    assert "the timeline is empty: no decode forward is counted" in result.summary["warnings"]
    assert forwards_of(Path("out/timeline.pftrace")) == []


def test_the_manifest_says_what_window_was_asked_for(trace):
    simulate(trace, "lru", 6, output="out", timeline=True, timeline_forwards=2)
    output = json.loads(Path("out/manifest.json").read_text())["config"]["output"]
    assert (output["timeline"], output["timeline_from_forward"], output["timeline_forwards"]) == (True, None, 2)


def later(chunk, times):
    """The same stretch of a run, `times` further on."""
    end_ns, length = int(chunk.forwards.scalars["end_ns"][-1]), len(chunk.forwards)

    def moved(table):
        steps = {"forward": length, "pass_id": length} | dict.fromkeys(
            (name for name in table.scalars if name.endswith("_ns") and name != "link_busy_ns"), end_ns
        )
        scalars = {name: values + times * steps.get(name, 0) for name, values in table.scalars.items()}
        lists = {
            name: replace(column, values=column.values + times * end_ns) if name.endswith("_ns") else column
            for name, column in table.lists.items()
        }
        return Table(scalars, lists)

    return LogChunk(moved(chunk.layers), moved(chunk.forwards))


def test_memory_does_not_grow_with_the_timeline(tmp_path):
    shape, passes = random_passes(np.random.default_rng(5), num_layers=4, num_requests=2)
    policy, costs = random_policy(shape, 5, capacity=[4] * 4), make_costs()
    (chunk,) = des.simulate(passes, policy, shape, 0, costs, ESTIMATES)
    peaks, num_bytes = [], []
    for num_chunks in (4, 64):
        tracemalloc.start()
        with (tmp_path / "t").open("wb") as file:
            window = Window(0, None)
            timeline = Timeline(TraceWriter(file), "run", costs=costs, num_experts=16, is_global=False, window=window)
            for times in range(num_chunks):
                timeline.add(later(chunk, times))
            timeline.finish()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        num_bytes.append((tmp_path / "t").stat().st_size)
    assert num_bytes[1] > 14 * num_bytes[0] > 1_000_000
    assert peaks[1] < peaks[0] + 500_000
    assert timeline.num_forwards == 64 * len(chunk.forwards)
    last = by_name(read_tracks(tmp_path / "t"))["forwards"].slices[-1]
    assert last.end_ns == 64 * int(chunk.forwards.scalars["end_ns"][-1])


@pytest.mark.parametrize("policy", ["oled", "ideal_prefetch"])
def test_both_engines_write_the_same_file(trace, policy):
    for engine in ("compiled", "des"):
        window = {"timeline": True, "timeline_from_forward": 0, "timeline_forwards": None}
        simulate(trace, policy, 6, engine=engine, output=engine, **window)
    first, second = (Path(engine, "timeline.pftrace").read_bytes() for engine in ("compiled", "des"))
    assert first == second
