"""A fidelity run and its judgement: with the executor on this machine, and with a machine that obeys the rules."""

from __future__ import annotations

import ast
import json
import signal
import tarfile
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from recorded import write

from experiments import fidelity_run
from experiments.compare_judge import compare
from experiments.compare_runs import read_runs
from experiments.errors import ConfigError
from experiments.fidelity import main
from experiments.fidelity_grid import Cell, FirstForwards, cells_of, shape_of, slowed
from experiments.fidelity_judge import read_workloads
from experiments.fidelity_log import read_log, write_log
from experiments.fidelity_pack import pack
from experiments.profiles import load_profile, load_shape
from experiments.replay_machine import Facts
from policies.contract import Context
from policies.log import LAYER_LISTS, LogChunk, Table
from policies.profile import copy_ns, estimates_of
from policies.registry import build_policy
from simulator import compiled
from tracer.shipped import find_trace
from tracer.store import TraceReader

ROOT = Path(__file__).resolve().parent.parent
PROFILE = str(ROOT / "conf/hardware/h200.yaml")
KEYS = ["--shape", "tiny", "--warmup-requests", "1", "--slots", "12,20"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first passes of a shipped trace: three requests."""
    reader = TraceReader(find_trace("proxy-tiny"))
    passes = list(islice(reader.passes(signals=True), 24))
    path = tmp_path_factory.mktemp("trace") / "small.trace"
    write(path, reader.metadata.shape, passes)
    return path


@dataclass
class Obedient:
    """A machine that takes exactly as long as the rules say, `slower` times as long."""

    slower: float = 1.0
    spread: float = 0.0  # of every third run, and back of the one after it
    num_runs: int = 0
    last: int | None = None  # run after which the process is told to end

    def __call__(self, machine, passes, policy, shape, slots, estimates, staging):
        self.num_runs += 1
        if self.num_runs == self.last:
            signal.raise_signal(signal.SIGTERM)
        profile = slowed(load_profile(PROFILE), machine.factor)
        charged = machine.layout.shape
        costs = profile.costs(charged, charged.expert_bytes("bfloat16"), policy.name)
        chunks = compiled.simulate(passes, policy, shape, slots, costs, estimates, staging_slots=staging)
        times = self.slower * (1 + self.spread * (self.num_runs % 3 - 1))
        found = [scaled(chunk, times) for chunk in chunks]
        return SimpleNamespace(chunks=found, host_us=1.0, lead_us=0.5, decide_us=2.0)


def scaled(chunk: LogChunk, factor: float) -> LogChunk:
    def of(table: Table) -> Table:
        scalars = {
            name: np.round(values * factor).astype(np.int64) if name.endswith("_ns") else values
            for name, values in table.scalars.items()
        }
        lists = {
            name: replace(column, values=np.round(column.values * factor).astype(np.int64))
            if name.endswith("_ns")
            else column
            for name, column in table.lists.items()
        }
        return Table(scalars, lists)

    return LogChunk(of(chunk.layers), of(chunk.forwards))


@pytest.fixture
def obedient(monkeypatch: pytest.MonkeyPatch) -> Obedient:
    """Such a machine in the place of the executor's."""

    def machine(passes, trace_hash, traced, shape, num_slots, profile, conditions, has_bars):
        found = SimpleNamespace(factor=1, layout=SimpleNamespace(shape=shape, num_slots=num_slots))
        found.arena, found.busy_link = SimpleNamespace(budget="none"), lambda: None
        found.set_factor = lambda factor: setattr(found, "factor", factor)
        return found, Facts("cpu", "a machine that obeys", False, "rows", 1, 192)

    replay = Obedient()
    monkeypatch.setattr(fidelity_run, "replay", replay)
    monkeypatch.setattr(fidelity_run, "Workshop", lambda: SimpleNamespace(machine=machine, close=lambda: None))
    return replay


def run(directory: Path, trace: Path, *arguments: str, seconds: float = 1000) -> None:
    command = ["run", str(directory), "--seconds", str(seconds), "--trace", str(trace), "--profile", PROFILE]
    main([*command, "--device", "cpu", *KEYS, *arguments])


def judged(directory: Path, output: Path) -> Path:
    main(["judge", str(directory), "--output", str(output)])
    (found,) = output.iterdir()
    return found


def test_a_machine_that_obeys_the_rules_is_predicted_without_error(trace, tmp_path, obedient, capsys) -> None:
    obedient.spread = 0.01
    run(tmp_path / "run", trace, "--policies", "ondemand,lru,gate_ahead", "--factors", "2")
    found = judged(tmp_path / "run", tmp_path / "docs")
    cells = pl.read_parquet(found / "cells.parquet")
    assert cells.height == 5  # no multiple of 3, so that repeats of a cell differ
    assert cells["num_repeats"].unique().to_list() == [3]
    assert cells["spread_ratio"].to_list() == pytest.approx([0.02] * 5, abs=1e-5)
    assert cells["tpot_error"].abs().max() < 1e-6
    assert cells["forward_mape"].max() < 1e-6
    assert cells.filter(~pl.col("has_prefetches"))["same_decisions"].all()
    assert cells["hit_points"].abs().max() < 1e-9
    groups = json.loads((found / "comparison.json").read_text())["groups"]
    assert [group["tau_b"] for group in groups] == [1.0] * 2  # sizes
    assert all("ondemand" in group["policies"] for group in groups)
    terms = pl.read_parquet(found / "terms.parquet")
    for part in ("gate", "hits", "copy", "layer", "tail"):
        ours, theirs = terms[f"{part}_simulated_us"], terms[f"{part}_measured_us"]
        assert (ours - theirs).abs().drop_nulls().max() < 0.001
    charged = shape_of("tiny", TraceReader(trace).metadata.shape)
    costs = slowed(load_profile(PROFILE), 2).costs(charged, charged.expert_bytes("bfloat16"), "lru")
    (lru,) = terms.filter(pl.col("cell") == "lru-20-x2").to_dicts()
    assert lru["copy_simulated_us"] == copy_ns(costs, False) / 1000
    assert lru["tail_simulated_us"] == costs.tail_ns / 1000
    assert lru["lead_simulated_us"] == 0
    assert lru["cpu_simulated_us"] is None
    assert "MAPE of TPOT (<= 3 %): 0.00 %" in capsys.readouterr().out
    assert len(read_runs([found])) == 5 * 4  # the notebook and oled-compare read it again


def test_a_machine_that_is_slower_is_off_by_that(trace, tmp_path, obedient) -> None:
    obedient.slower = 1.25
    run(tmp_path / "run", trace, "--policies", "lru,ondemand", "--repeats", "1", "--factors", "1")
    cells = pl.read_parquet(judged(tmp_path / "run", tmp_path / "docs") / "cells.parquet")
    assert cells["tpot_error"].to_list() == pytest.approx([-0.2] * 3, abs=1e-6)
    assert cells["same_decisions"].all()


def test_cells_take_turns_and_stop_in_time(trace, tmp_path, obedient, monkeypatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(fidelity_run, "monotonic", lambda: clock.now)
    alone = obedient.__call__

    def slow(*arguments):
        clock.now += 10
        return alone(*arguments)

    monkeypatch.setattr(fidelity_run, "replay", slow)
    options = SimpleNamespace(
        directory=tmp_path / "run",
        trace=str(trace),
        per_request=2,
        warmup_requests=1,
        policies=["lru", "ondemand"],
        slots=(12,),
        factors=(1,),
        repeats=9,
        shape="tiny",
        device="cpu",
        profile=PROFILE,
        seconds=71.0,
    )
    fidelity_run.run(options, 0.0)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    # 20 s to warm up, then 36 s until it closes: three times 10, and no fourth of 11 to be safe
    assert [entry["file"] for entry in manifest["runs"]] == [
        "cells/lru-12-x1-r0.parquet",
        "cells/ondemand-x1-r0.parquet",
        "cells/lru-12-x1-r1.parquet",
    ]
    assert clock.now == 50


def test_what_was_finished_is_kept_when_the_run_is_ended(trace, tmp_path, obedient) -> None:
    obedient.last = 4  # 2 warm up
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", trace, "--policies", "lru,oled")
    assert end.value.code == 128 + signal.SIGTERM
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert [entry["file"] for entry in manifest["runs"]] == ["cells/lru-12-x1-r0.parquet"]
    assert sorted(path.name for path in (tmp_path / "run/cells").iterdir()) == ["lru-12-x1-r0.parquet"]
    cells = pl.read_parquet(judged(tmp_path / "run", tmp_path / "docs") / "cells.parquet")
    assert cells["name"].to_list() == ["lru/12/x1/small"]


def test_a_cell_that_fails_is_named_and_the_others_run(trace, tmp_path, obedient, monkeypatch, capsys) -> None:
    alone = obedient.__call__

    def failing(machine, passes, policy, *rest):
        if policy.name == "oled" and len(passes) > 3:
            raise RuntimeError("CUDA error: out of memory")
        return alone(machine, passes, policy, *rest)

    monkeypatch.setattr(fidelity_run, "replay", failing)
    run(tmp_path / "run", trace, "--policies", "oled,lru", "--slots", "12", "--factors", "1", "--repeats", "1")
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    error = {"cell": "oled-12-x1", "repeat": 0, "error": "CUDA error: out of memory"}
    assert manifest["errors"] == [error]
    assert len(manifest["runs"]) == 1
    assert "oled-12-x1 repeat 0 failed: CUDA error: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("returncode", [0, 3])
def test_a_run_begins_with_a_calibration(returncode, trace, tmp_path, obedient, monkeypatch, capsys) -> None:
    commands = []

    def calibrate(command, **_):
        commands.append(command[1:])
        Path(command[3]).write_text(Path(PROFILE).read_text().replace("name: h200", "name: measured"))
        return SimpleNamespace(returncode=returncode)

    monkeypatch.setattr(fidelity_run, "subprocess", SimpleNamespace(run=calibrate, TimeoutExpired=TimeoutError))
    command = ["run", str(tmp_path / "run"), "--seconds", "1000", "--trace", str(trace), "--device", "cpu"]
    command += ["--policies", "lru", "--slots", "12", "--repeats", "1", "--per-request", "2"]
    if returncode:
        with pytest.raises(SystemExit):
            main(command)
        assert "fidelity: error: oled-calibrate ended with 3" in capsys.readouterr().err
    else:
        main(command)
        manifest = json.loads((tmp_path / "run/manifest.json").read_text())
        assert manifest["calibrated"]
        assert len(manifest["runs"]) == 2
    shape = ["--device", "cpu", "--shape", "llada2.0-mini"]
    assert commands == [["-m", "experiments.calibrate", str(tmp_path / "run/measured.yaml"), *shape, "--policy", "lru"]]


def test_the_executor_runs_every_cell_here(trace, tmp_path, capsys) -> None:
    keys = ["--policies", "lru", "--slots", "12", "--per-request", "3", "--repeats", "1"]
    run(tmp_path / "run", trace, *keys)
    main(["pack", str(tmp_path / "run"), str(tmp_path / "packs")])
    assert "2 logs in 1 packs" in capsys.readouterr().out
    home = tmp_path / "home"
    with tarfile.open(tmp_path / "packs/pack-0.tar") as archive:
        archive.extractall(home, filter="data")
    found = judged(home, tmp_path / "docs")
    cells = pl.read_parquet(found / "cells.parquet")
    assert cells["same_decisions"].to_list() == [True] * 2  # with copies of once and twice the bytes
    assert (cells["measured_ms"] > 0).all()
    manifest = json.loads((found / "manifest.json").read_text())
    assert manifest["num_forwards"] == pl.read_parquet(found / "runs.parquet").filter(pl.col("run") == 0).height
    assert manifest["device"] == "cpu"
    assert manifest["link_before"] is None


COMMITTED = sorted(path.parent for path in (ROOT / "docs/fidelity").glob("*/manifest.json"))


@pytest.mark.parametrize("directory", COMMITTED, ids=lambda path: path.name[-8:])
def test_committed_findings_follow_from_the_committed_runs(directory) -> None:
    written = json.loads((directory / "comparison.json").read_text())
    found = json.loads(json.dumps(compare(read_runs([directory])).as_plain()))
    assert found["targets"] == written["targets"]
    assert found["groups"] == written["groups"]
    assert [cell["tpot_error"] for cell in found["cells"]] == pytest.approx(
        [cell["tpot_error"] for cell in written["cells"]]
    )
    groups = compare(read_workloads(directory)).groups
    assert len(groups) == 4 * 3
    assert sum(path.stat().st_size for path in directory.iterdir()) < 1_000_000


def test_there_are_committed_runs() -> None:
    assert COMMITTED


# Parts


def test_cells_differ_and_stand_once_for_sizes_that_they_ignore() -> None:
    context_shape = load_shape("llada2.0-mini")
    policies = {name: build_policy(name, {}, Context(context_shape)) for name in ("ondemand", "lru")}
    names = [cell.name for cell in cells_of(policies, (40, 100), (1, 2))]
    assert names == ["ondemand-x1", "lru-40-x1", "lru-100-x1", "ondemand-x2", "lru-40-x2", "lru-100-x2"]
    assert Cell("lru", 40, 2).name == "lru-40-x2"


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_a_padded_copy_takes_its_latency_once(factor: int) -> None:
    profile, shape = load_profile("h200"), load_shape("llada2.0-mini")
    expert_bytes = shape.expert_bytes("bfloat16")
    costs = slowed(profile, factor).costs(shape, expert_bytes, "lru")
    expected = profile.h2d_latency_ns + factor * expert_bytes * 1e9 / profile.h2d_bytes_per_s
    assert abs(copy_ns(costs, False) - expected) <= 0.5


def test_the_first_forwards_of_each_request(trace) -> None:
    every = list(FirstForwards(trace, None))
    some = list(FirstForwards(trace, 3))
    seen: list[int] = []
    for pass_ in every:
        seen += pass_.requests.tolist()
        is_there = any(pass_.pass_id == other.pass_id for other in some)
        assert is_there == (seen.count(seen[-1]) <= 3)
    assert [pass_.pass_id for pass_ in some] == sorted(pass_.pass_id for pass_ in some)
    assert 0 < len(some) < len(every)


def test_a_log_comes_back_but_for_lists_of_prefetches(trace, tmp_path) -> None:
    reader = TraceReader(trace)
    shape = reader.metadata.shape
    policy = build_policy("gate_ahead", {}, Context(shape, has_signals=True))
    charged = load_shape("llada2.0-mini")
    costs = load_profile("h200").costs(charged, charged.expert_bytes("bfloat16"), "gate_ahead")
    passes = list(reader.passes(signals=True))
    chunks = list(compiled.simulate(passes, policy, shape, 36, costs, estimates_of(costs), chunk_forwards=10))
    assert len(chunks) == 3
    write_log(tmp_path / "log.parquet", chunks, {"repeat": 2})
    found, notes = read_log(tmp_path / "log.parquet")
    assert notes == {"repeat": 2}
    for part in ("layers", "forwards"):
        ours = [getattr(chunk, part) for chunk in chunks]
        for name, values in getattr(found, part).scalars.items():
            expected = np.concatenate([table.scalars[name] for table in ours])
            np.testing.assert_array_equal(values, expected, name)
            assert values.dtype == expected.dtype
        for name, column in getattr(found, part).lists.items():
            rows = [table.lists[name][row].tolist() for table in ours for row in range(len(table))]
            is_dropped = name.startswith("prefetch_")
            assert is_dropped or [column[row].tolist() for row in range(len(column))] == rows
            assert not is_dropped or (len(column) == len(rows) and not column.values.size)
    assert set(found.layers.lists) == set(LAYER_LISTS)


def test_packs_hold_everything_within_their_size(tmp_path) -> None:
    names = [f"{number}.bin" for number in range(5)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes([number]) * 40_000)
    paths = pack(tmp_path, tmp_path / "packs", names, 100_000)
    assert [path.name for path in paths] == ["pack-0.tar", "pack-1.tar", "pack-2.tar"]
    assert all(path.stat().st_size <= 100_000 for path in paths)
    found = {}
    for path in paths:
        with tarfile.open(path) as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive}
    assert found == {name: bytes([number]) * 40_000 for number, name in enumerate(names)}


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "lru,nope"], "--policies nope: not known"),
        (["--slots", "40,x"], "--slots 40,x: must be different whole numbers of at least 1, with commas between them"),
        (["--factors", "0"], "--factors 0: must be different whole numbers"),
        (["--per-request", "0"], "--per-request 0: must be at least 1"),
        (["--shape", "llada"], "--shape llada: not known"),
        (["--shape", "llada2.0-min"], "--shape llada2.0-min: not known; did you mean llada2.0-mini"),
        (["--trace", "nope"], "trace 'nope': no such directory"),
    ],
)
def test_errors_of_the_user_are_one_line_and_leave_nothing(arguments, message, trace, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", trace, *arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"fidelity: error: {message}" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_has_a_directory_of_its_own(trace, tmp_path, capsys) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(SystemExit):
        run(tmp_path, trace, "--policies", "lru")
    assert f"{tmp_path}: is not empty; a run has a directory of its own" in capsys.readouterr().err


def test_what_is_no_run_is_not_judged(trace, tmp_path, obedient, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["judge", str(tmp_path)])
    assert "holds no manifest.json; must be a run's directory, or its packs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["pack", str(tmp_path), str(tmp_path / "packs")])
    assert "holds no manifest.json, it is not of a run that has begun" in capsys.readouterr().err
    run(tmp_path / "run", trace, "--policies", "lru", "--repeats", "1")
    profile = tmp_path / "run/measured.yaml"
    profile.write_text(profile.read_text().replace("h2d_latency_ns: ", "h2d_latency_ns: 1"))
    with pytest.raises(SystemExit):
        main(["judge", str(tmp_path / "run")])
    assert "ran with another measured.yaml than the one that is here" in capsys.readouterr().err


def test_a_damaged_log_is_named(tmp_path) -> None:
    path = tmp_path / "log.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"log\.parquet: cannot be read"):
        read_log(path)
    pl.DataFrame({"forward": [1]}).write_parquet(path)
    with pytest.raises(ConfigError, match="is no log of a replayed cell: it lacks pass_id"):
        read_log(path)


def test_the_machine_of_a_run_needs_no_simulator() -> None:
    names, found = {"experiments.fidelity_run", "experiments.fidelity"}, set()
    while names:
        name = names.pop()
        found.add(name)
        path = ROOT / f"{name.replace('.', '/')}.py"
        for node in ast.parse(path.read_text()).body if path.is_file() else ():
            imported = [node.module] if isinstance(node, ast.ImportFrom) else []
            imported += [f"{node.module}.{alias.name}" for alias in node.names] if imported else []
            imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names |= set(imported) - found
    assert {"replay.machine", "numpy"} <= found
    assert not {name.partition(".")[0] for name in found} & {"polars", "simpy", "matplotlib", "joblib", "simulator"}
