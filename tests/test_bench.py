import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import command

from experiments import bench, bench_decide, bench_sweep, simulate_command
from experiments.calibration import context_of
from experiments.profiles import load_profile
from policies.registry import POLICIES, build_policy
from tracer.shipped import find_trace
from tracer.store import TraceReader, TraceWriter

NUM_LAYERS = 3  # of proxy-tiny


def decide(capsys, *arguments):
    bench.main(["decide", "--slots", "16", "--forwards", "10", *arguments])
    return capsys.readouterr().out


def test_times_of_decisions_add_up(tmp_path, capsys):
    file = tmp_path / "decide.json"
    policies = ["lru", "lru max_admit=2", "oled", "gate_ahead"]
    named = [part for policy in policies for part in ("--policy", policy)]
    out = decide(capsys, "--trace", "proxy-tiny", "--repeats", "2", "--json", str(file), *named)
    report = json.loads(file.read_text())
    assert list(report["policies"]) == policies
    assert report["num_forwards"] == 10
    assert report["trace"]["name"] == "proxy-tiny"
    assert {"processor", "num_cpus", "load_average", "versions"} <= set(report["machine"])
    for row in report["policies"].values():
        assert row["num_gates"] == (10 - bench_decide.WARM_FORWARDS) * NUM_LAYERS
        assert len(row["repeats"]) == 2
        for part in ("decide", "check"):
            least = row[part]
            assert 0 < least["median_us"] <= least["p99_us"] <= least["total_us"]
            for times in (least, *(repeat[part] for repeat in row["repeats"])):
                assert times["mean_us"] * row["num_gates"] == pytest.approx(times["total_us"])
            assert all(least["total_us"] <= repeat[part]["total_us"] for repeat in row["repeats"])
    assert [row["budget_us"] for row in report["policies"].values()] == [None, None, 15, 60]
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith("| ") and "policy" not in line]
    assert [row.split("|")[1].strip() for row in rows] == policies
    assert [float(row.split("|")[2]) for row in rows] == [
        pytest.approx(row["decide"]["mean_us"], abs=0.051) for row in report["policies"].values()
    ]


def test_every_policy_that_the_trace_allows_is_measured(tmp_path, capsys, monkeypatch):
    some = {name: POLICIES[name] for name in ("lru", "gate_ahead", "ondemand")}  # compiling all takes a minute
    monkeypatch.setattr(bench_decide, "POLICIES", some)
    reader = TraceReader(find_trace("proxy-tiny"))
    with TraceWriter(tmp_path / "bare.trace", reader.metadata) as writer:
        for pass_ in islice(reader, 40):
            writer.write(pass_)
    out = decide(capsys, "--trace", str(tmp_path / "bare.trace"), "--repeats", "1")
    assert max(map(len, out.splitlines())) <= 250  # the reason of a refusal is one line
    refused = [line for line in out.splitlines() if line.startswith("Not measured: ")]
    measured = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")][1:]
    reason = "needs ahead_ids of the table signals, which this trace lacks: proxy-19x256-signals has them"
    assert refused == [f"Not measured: gate_ahead {reason}"]
    assert measured == ["lru", "ondemand"]


@pytest.mark.parametrize("name", ["oled", "gate_ahead", "ideal_free"])
def test_asked_again_a_policy_answers_the_same(name):
    reader = TraceReader(find_trace("proxy-tiny"))
    shape = reader.metadata.shape
    passes = list(islice(reader.passes(signals=True), 20))
    costs = load_profile("rtx5090").costs(shape, shape.expert_bytes(), name)
    built = build_policy(name, {}, context_of(reader, 3)[0])
    plans = []

    def decide(*arguments):
        plan = built.decide(*arguments)
        plans.append(tuple(map(np.copy, plan)))
        return plan

    watched = replace(built, decide=decide)
    run = bench_decide.record(watched, passes, shape, 36, costs)
    first, plans = plans, []
    assert len(first) == len(passes) * NUM_LAYERS
    again = [tuple(map(np.copy, plan)) for _, _, plan in bench_decide.ask_again(run, shape)]
    for one, other in zip(first, again, strict=True):
        assert all(map(np.array_equal, one, other))


def test_summary_is_of_whole_ns():
    times = np.array([1000, 2000, 3000, 10_000])
    assert bench_decide.summary(times) == {
        "total_us": 16.0,
        "mean_us": 4.0,
        "median_us": 2.5,
        "p99_us": pytest.approx(9.79),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nothing"], "trace 'nothing': no such directory"),
        (["--policy", "lru", "--slots", "65"], "195 slots for 3 layers of 64 experts"),
        (["--policy", "lru depth=1"], "depth"),
        (["--policy", "lru", "--forwards", "8"], "8 forwards: must be more than 8, which are not counted"),
        (["--policy", "lru", "--json", "missing/decide.json"], "missing/decide.json"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        bench.main(
            ["decide", "--trace", "proxy-tiny", "--slots", "16", "--forwards", "10", "--repeats", "1", *arguments]
        )
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("bench: error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not Path("missing").exists()


def test_a_grid_is_timed_whole_and_in_parts(tmp_path, capsys, monkeypatch):
    def here(line, **_):  # five processes take long to start
        assert line[:3] == [sys.executable, "-m", "experiments.simulate_command"]
        finished = command(simulate_command.main, *line[3:])
        return subprocess.CompletedProcess(line, finished.code, finished.out, finished.err)

    processes = SimpleNamespace(run=here, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(bench_sweep, "subprocess", processes)
    file = tmp_path / "sweep.json"
    arguments = "--trace", "proxy-tiny", "--policy", "ondemand", "--policy", "full", "--slots", "8", "--jobs", "1"
    bench.main(["sweep", *arguments, "--json", str(file)])
    report = json.loads(file.read_text())
    assert report["num_runs"] == 8  # bandwidths
    assert all(time > 0 for row in report["policies"].values() for time in row.values())
    out = capsys.readouterr().out
    assert "2 policies x 1 sizes x 4 bandwidths x 1 traces, 8 runs in 1 processes:" in out
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")] == [
        "policy",
        "ondemand",
        "full",
    ]


def test_both_engines_are_measured_on_the_same_steps(tmp_path, capsys):
    file = tmp_path / "engines.json"
    arguments = ["--trace", "proxy-tiny", "--slots", "16", "--forwards", "6", "--repeats", "2", "--json", str(file)]
    bench.main(["engines", *arguments, "--policy", "lru", "--policy", "ondemand"])
    report = json.loads(file.read_text())
    assert list(report["policies"]) == ["lru", "ondemand"]
    for row in report["policies"].values():
        assert row["num_steps"] == 6 * NUM_LAYERS
        assert row["compiled_steps_per_s"] == pytest.approx(row["ratio"] * row["des_steps_per_s"])
        assert row["compiled_accesses_per_s"] / row["compiled_steps_per_s"] == pytest.approx(
            row["num_accesses"] / row["num_steps"]
        )
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
