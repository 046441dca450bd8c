"""`oled-simulate` on small traces, as its users call it."""

import json
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from commands import command
from strategies import metadata_for, random_passes

from experiments import run
from experiments.errors import ConfigError
from experiments.files import in_use, read_run
from experiments.profiles import load_profile, profile_hash
from experiments.simulate_command import main
from experiments.summary import COLUMNS
from policies.profile import ProfileError
from policies.registry import POLICIES
from tracer.store import TraceWriter

FILES = {"summary.json", "result.parquet", "decisions.parquet", "manifest.json"}


def write_trace(path):
    shape, passes = random_passes(np.random.default_rng(3), num_experts=16, num_requests=3)
    with TraceWriter(path, metadata_for(shape)) as writer:
        for item in passes:
            writer.write(item)


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.trace"
    write_trace(path)
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def simulate(trace, *arguments):
    """Run the command into ./out and give back its summary, manifest and what it printed."""
    into = "output.dir=out", "output.overwrite=true"
    finished = command(main, f"trace={trace}", *into, "cache.slots_per_layer=6", *arguments)
    assert finished.code == 0, finished.err
    summary, manifest = (json.loads((Path("out") / name).read_text()) for name in ("summary.json", "manifest.json"))
    return summary, manifest, finished.out


def test_a_run_writes_four_files_and_prints_a_table(trace):
    summary, manifest, out = simulate(trace, "policy=lru")
    assert {path.name for path in Path("out").iterdir()} == FILES
    assert tuple(summary)[: len(COLUMNS)] == COLUMNS
    assert summary["policy"] == "lru"
    assert summary["slots_per_layer"] == 6
    assert summary["source"] == "synthetic:tests"
    assert manifest["config"]["cache"] == {"slots_per_layer": 6}
    assert manifest["config"]["output"] == {
        "per_layer": False,
        "decisions": True,
        "timeline": False,
        "timeline_from_forward": None,
        "timeline_forwards": 20,
    }
    assert manifest["overrides"][-1] == "policy=lru"
    caption, table, written = out.split("\n\n")
    assert written == "Written: out\n"
    words = "trace small; source synthetic:tests (hidden 8, 1.23 tokens a counted forward); hardware rtx5090"
    assert words in " ".join(caption.split())
    assert "never validated on this GPU" in caption
    assert table.splitlines()[-1].split()[:2] == ["lru", "6"]
    assert table.splitlines()[-1].split()[-1] == summary["decision_hash"][:8]
    assert max(map(len, out.splitlines())) <= 80


def test_nothing_given_but_a_trace_is_oled_on_40_slots(trace):
    code, _, err = command(main, f"trace={trace}")
    assert code == 2
    assert err == (
        "oled-simulate: error: slots_per_layer is 40, must be 1 to 16, the experts of a layer of this trace\n"
    )


def test_knobs_are_keys_of_the_policy(trace):
    summary, manifest, out = simulate(trace, "policy=lru", "policy.lru_order=id", "policy.misses=oled")
    assert summary["variant"] == "lru_order=id, misses=oled"
    assert summary["misses"] == "oled"
    assert manifest["policy"]["variant"] == summary["variant"]
    assert "[1] lru_order=id, misses=oled" in out


def test_the_command_uses_the_same_profile_as_the_api(trace):
    _, manifest, _ = simulate(trace, "policy=full", "hardware=h200", "shape=llada2.0-mini")
    assert manifest["profile"]["hash"] == profile_hash(load_profile("h200"))


def test_single_keys_of_a_machine_can_be_set(trace):
    slow, manifest, _ = simulate(
        trace, "policy=ondemand", "hardware.h2d_bytes_per_s=1e6", "hardware.h2d_slowdown=1.5", "hardware.date=today"
    )
    assert manifest["profile"]["h2d_bytes_per_s"] == 1e6
    assert manifest["profile"]["h2d_slowdown"] == 1.5
    fast, _, _ = simulate(trace, "policy=ondemand")
    assert fast["tpot_ms"] < slow["tpot_ms"]
    assert fast["decision_hash"] == slow["decision_hash"]


def test_a_machine_of_ones_own(trace):
    mine = "name: mine\nprovenance: measured\nmachine: a box\ndate: 2026-01-01\nh2d_latency_ns: 1000\n"
    mine += "h2d_bytes_per_s: 12e9\ncpu_workers: 4\nroofline: {gpu_bytes_per_s: 1e12, gpu_flops_per_s: 1e14, "
    mine += "cpu_bytes_per_s: 1e11, cpu_flops_per_s: 1e12, kernel_ns: 4000}\n"
    Path("mine.yaml").write_text(mine)
    summary, manifest, out = simulate(
        trace, "policy=full", "hardware.path=mine.yaml", "hardware.cpu_workers=8", "hardware.roofline.kernel_ns=5000"
    )
    assert summary["hardware"] == "mine"
    assert "never validated" not in out
    assert f"profile content {summary['profile_hash'][:8]};" in " ".join(out.split())
    profile = manifest["profile"]
    assert (profile["h2d_bytes_per_s"], profile["cpu_workers"], profile["roofline"]["kernel_ns"]) == (12e9, 8, 5000)
    assert profile["gate_sync_ns"] == 0  # the file's default, not that of the group's choice
    _, manifest, _ = simulate(
        trace, "policy=full", "hardware={path: mine.yaml, cpu_workers: 7, roofline: {kernel_ns: 6000}}"
    )
    profile = manifest["profile"]
    assert (profile["h2d_bytes_per_s"], profile["cpu_workers"], profile["roofline"]["kernel_ns"]) == (12e9, 7, 6000)
    assert profile["roofline"]["gpu_bytes_per_s"] == 1e12


def test_costs_of_another_models_sizes(trace):
    small, _, _ = simulate(trace, "policy=lru")
    mini, _, out = simulate(trace, "policy=lru", "shape=llada2.0-mini")
    half, _, _ = simulate(trace, "policy=lru", "shape=llada2.0-mini", "expert_dtype=fp8")
    assert mini["decision_hash"] == small["decision_hash"]
    assert mini["h2d_bytes"] / small["h2d_bytes"] == (2048 * 512) / (8 * 4)
    assert mini["h2d_bytes"] == 2 * half["h2d_bytes"]
    assert "experts charged at 2048 x 512, 6.29 MB" in " ".join(out.split())


def test_one_row_for_each_layer_on_request(trace):
    simulate(trace, "policy=lru")
    forwards = pl.read_parquet("out/result.parquet")
    simulate(trace, "policy=lru", "output.per_layer=true")
    assert pl.read_parquet("out/result.parquet").height == 3 * forwards.height
    assert pl.read_parquet("out/forwards.parquet").equals(forwards)


def test_without_the_log_of_decisions(trace):
    with_log, _, _ = simulate(trace, "policy=lru", "output.per_layer=true")
    layers = pl.read_parquet("out/result.parquet")
    without, manifest, _ = simulate(trace, "policy=lru", "output.decisions=false", "output.per_layer=true")
    assert without == with_log
    assert {"per_layer": True, "decisions": False}.items() <= manifest["config"]["output"].items()
    assert {path.name for path in Path("out").iterdir()} == FILES - {"decisions.parquet"} | {"forwards.parquet"}
    assert pl.read_parquet("out/result.parquet").equals(layers)
    assert read_run(Path("out")) is not None
    simulate(trace, "policy=lru", "output.decisions=false")
    assert pl.read_parquet("out/result.parquet").height == layers.height / 3


def test_a_cache_of_so_many_gib(trace):
    expert_bytes = 6 * 2**20  # of llada2.0-mini, three layers in this trace
    for gib, dtype, slots in ((0.2, "bfloat16", 11), (0.2, "int4", None), (0.05, "int4", 11), (0.1758, "fp8", None)):
        keys = f"trace={trace}", "policy=lru", "shape=llada2.0-mini", f"expert_dtype={dtype}", f"cache.gib={gib}"
        code, _, err = command(main, *keys, "output.dir=out", "output.overwrite=true")
        if slots is None:
            assert (code, "must be " in err, "1 to 16 experts" in err) == (2, True, True)
            continue
        assert code == 0, err
        summary, manifest = (json.loads((Path("out") / name).read_text()) for name in ("summary.json", "manifest.json"))
        assert summary["slots_per_layer"] == slots
        assert manifest["config"]["cache"] == {"gib": gib}
        cache_bytes = summary["gpu_expert_bytes"] - 8 * summary["expert_bytes"]  # without staging
        assert gib * 2**30 - 3 * summary["expert_bytes"] < cache_bytes <= gib * 2**30
    assert expert_bytes == run.simulate(trace, "lru", 6, shape="llada2.0-mini").summary["expert_bytes"]
    assert run.simulate(trace, "full", cache_gib=1e-9).summary["slots_per_layer"] == 16  # heeds no size


def test_one_size_of_the_cache(trace):
    assert "give one of them" in refused(f"trace={trace}", "cache.gib=1", "cache.slots_per_layer=4")


def test_what_a_killed_run_left_goes_when_it_is_made_again(trace):
    for name in (".out.partial-01234567", ".out.partial-89abcdef", ".other.partial-01234567"):
        Path(name).mkdir()
        (Path(name) / "result.parquet").touch()
    with in_use(Path(".out.partial-89abcdef")):
        run.simulate(trace, "lru", 6, output="out")
    names = sorted(path.name for path in Path().iterdir())
    assert names == [".other.partial-01234567", ".out.partial-89abcdef", "out"]
    run.simulate(trace, "lru", 6, output="out")
    assert sorted(path.name for path in Path().iterdir()) == [".other.partial-01234567", "out"]


def test_more_staging_than_the_default(trace):
    default, manifest, _ = simulate(trace, "policy=lru")
    more, _, _ = simulate(trace, "policy=lru", "staging_slots=16")
    assert more["gpu_expert_bytes"] - default["gpu_expert_bytes"] == 8 * default["expert_bytes"]
    assert manifest["config"]["staging_slots"] is None


def refused(*arguments):
    """The one line of an error; nothing may have been written."""
    before = set(Path().rglob("*"))
    code, out, err = command(main, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("oled-simulate: error: ")
    assert err.count("\n") == 1
    assert set(Path().rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("hardware.path=5", ["hardware.path is 5", "path of a .yaml file"]),
        ("cache.slots_per_layer=0", ["slots_per_layer is 0", "1 to 16"]),
        ("cache.slots_per_layer=17", ["slots_per_layer is 17", "1 to 16"]),
        ("cache.slot_per_layer=8", ["cache.slot_per_layer", "did you mean slots_per_layer?"]),
        ("policy=lruu", ["policy=lruu", "did you mean lru?", ", ".join(sorted([*POLICIES, "custom", "log"]))]),
        ("policy.lru_ordr=id", ["policy.lru_ordr", "did you mean lru_order?", "misses"]),
        ("policy.lru_order=idd", ["lru_order 'idd'", "hits_first, misses_first, id, gate"]),
        ("policy.name=oled", ["policy.name is 'oled'", "knobs of lru", "policy=oled"]),
        ("+policy.nothing=1", ["nothing", "lru_order"]),
        ("hardware=rtx509", ["hardware=rtx509", "did you mean rtx5090?", "h200"]),
        ("hardware.h2d_bytes_per_s=-1", ["rtx5090", "h2d_bytes_per_s", "-1", "above 0"]),
        ("hardware.h2d_bytes_per_s=fast", ["h2d_bytes_per_s", "'fast'", "a number"]),
        ("hardware.h2d_byte_per_s=1e9", ["hardware.h2d_byte_per_s", "did you mean h2d_bytes_per_s?"]),
        ("hardware.path=none.yaml", ["none.yaml", "No such file"]),
        ("hardware.path=nowhere", ["nowhere", "rtx5090", ".yaml"]),
        ("shape=llada", ["shape=llada", "llada2.0-mini"]),
        ("shape.hidden=4", ["shape.hidden", "allowed: none"]),
        ("expert_dtype=bf17", ["expert_dtype", "'bf17'", "bfloat16"]),
        ("warmup_requests=3", ["warmup_requests is 3", "0 to 2"]),
        ("warmup_requests=-1", ["warmup_requests is -1", "0 to 2"]),
        ("staging_slots=1", ["staging_slots is 1", "at least 4"]),
        (
            "staging_slots=1180591620717411303424",
            ["staging_slots is 1180591620717411303424", "at most 48, all experts"],
        ),
        ("seed=-1", ["seed is -1", "0 or more"]),
        ("trace=other", ["other", "shipped"]),
        ("+foo=1", ["foo", "warmup_requests"]),
        ("+cache.gb=1", ["cache.gb", "slots_per_layer"]),
    ],
)
def test_bad_input_is_one_line(trace, argument, words):
    err = refused(f"trace={trace}", "policy=lru", "cache.slots_per_layer=8", argument)
    assert [word for word in words if word not in err] == [], err


def test_a_trace_must_be_named():
    assert refused("policy=lru") == "oled-simulate: error: trace: must be given as trace=VALUE\n"


def cut(path):
    table = path / "routing.parquet"
    table.write_bytes(table.read_bytes()[: table.stat().st_size // 2])


def rewrite(path, change_group):
    """Pass every row group of the routing table through a function."""
    file = pq.ParquetFile(path / "routing.parquet")
    groups = [change_group(file.read_row_group(i)) for i in range(file.num_row_groups)]
    with pq.ParquetWriter(path / "routing.parquet", file.schema_arrow) as writer:
        for group in groups:
            writer.write_table(group)
        writer.add_key_value_metadata(file.metadata.metadata)


def lose_layer(path):
    rewrite(path, lambda group: group.filter(pc.not_equal(group["layer"], 1)))


def poison(path, name, value):
    def change_group(group):
        column = group[name].combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False).copy()
        values[7] = value
        lists = pa.FixedSizeListArray.from_arrays(pa.array(values), type=column.type)
        return group.set_column(group.column_names.index(name), group.schema.field(name), lists)

    rewrite(path, change_group)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, ["routing.parquet"]),
        (lose_layer, ["layer 1", "request 0"]),
        (partial(poison, name="expert_ids", value=999), ["999", "layer 1", "request 0"]),
        (partial(poison, name="gates", value=np.nan), ["gate", "nan", "layer 1", "request 0"]),
    ],
)
def test_a_damaged_trace_is_one_line(damage, words, tmp_path):
    write_trace(tmp_path / "bad.trace")
    damage(tmp_path / "bad.trace")
    err = refused("trace=bad.trace", "policy=lru", "cache.slots_per_layer=8")
    assert [word for word in ("bad.trace", *words) if word not in err.lower()] == [], err


def test_bad_input_in_a_process_of_its_own(trace, tmp_path):
    code = "from experiments.simulate_command import main; main()"
    arguments = [f"trace={trace}", "policy=lru", "cache.slots_per_layer=0"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "slots_per_layer is 0, must be 1 to 16" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_no_directory(trace, tmp_path):
    with pytest.raises(ProfileError, match="staging_slots"):
        run.simulate(trace, "lru", 6, staging_slots=1, output=tmp_path / "out" / "never")
    assert list(tmp_path.iterdir()) == []


def contents(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def test_a_finished_run_is_replaced_by_its_like_and_by_another_only_when_told_so(trace):
    arguments = f"trace={trace}", "output.dir=out", "policy=lru"
    assert command(main, *arguments, "cache.slots_per_layer=6").code == 0
    before = contents("out")
    assert command(main, *arguments, "cache.slots_per_layer=6").code == 0
    assert contents("out")["summary.json"] == before["summary.json"]
    before = contents("out")
    err = refused(*arguments, "cache.slots_per_layer=7", "seed=1")
    assert "out: holds a run with another cache.slots_per_layer, seed; output.overwrite=true" in err
    assert "another policy.name, seed; " in refused(*arguments, "policy=oled", "cache.slots_per_layer=6", "seed=1")
    assert contents("out") == before
    assert command(main, *arguments, "cache.slots_per_layer=7", "output.overwrite=true").code == 0
    assert json.loads(Path("out/summary.json").read_text())["slots_per_layer"] == 7


def test_calls_from_python_are_told_apart_too(trace):
    first = run.simulate(trace, "lru", 6, output="out")
    assert first.manifest["config"]["policy"] == {"name": "lru"}
    run.simulate(str(trace), "lru", 6, output="out")
    with pytest.raises(ConfigError, match=r"out: holds a run with another policy\.name; output\.overwrite=true"):
        run.simulate(trace, "lfu", 6, output="out")
    run.simulate(trace, "lfu", 6, output="out", overwrite=True)
    assert {path.name for path in Path("out").iterdir()} == FILES
    assert json.loads(Path("out/summary.json").read_text())["policy"] == "lfu"


def test_a_run_is_the_same_whatever_the_place_and_another_with_other_contents(trace):
    result = run.simulate(trace, "lru", 6)
    assert run.simulate(trace, "lru", 6, output="out").manifest["identity"] == result.manifest["identity"]
    others = [
        run.simulate(trace, "lru", 6, hardware="h200"),
        run.simulate(trace, "lru", 6, per_layer=True),
        run.simulate(trace, "lru", 6, warmup_requests=2),
        run.simulate(trace, "lru", 6, knobs={"misses": "oled"}),
    ]
    assert len({other.manifest["identity"] for other in [result, *others]}) == 5
    full = [run.simulate(trace, "full", slots).manifest["identity"] for slots in (6, 7)]
    assert full[0] == full[1]  # it heeds no size


def test_what_is_not_of_a_run_is_never_replaced(trace, tmp_path):
    arguments = f"trace={trace}", "policy=lru", "cache.slots_per_layer=6", "output.overwrite=true"
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    assert "mine: holds notes.txt" in refused(*arguments, "output.dir=mine")
    assert "working directory" in refused(*arguments, "output.dir=.")
    Path("real").mkdir()
    Path("link").symlink_to("real")
    assert command(main, *arguments, "output.dir=link").code == 0
    assert Path("link").is_symlink()
    assert {path.name for path in Path("real").iterdir()} == FILES


def test_a_run_that_fails_leaves_the_finished_one(trace, monkeypatch):
    simulate(trace, "policy=lru")
    before = contents("out")
    refused(f"trace={trace}", "output.dir=out", "policy=lru", "cache.slots_per_layer=99", "output.overwrite=true")
    assert contents("out") == before

    rename = Path.rename

    def renamed(path, target):
        if ".partial-" in path.name and not Path("out").exists():
            raise OSError(5, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    err = refused(f"trace={trace}", "output.dir=out", "policy=lfu", "cache.slots_per_layer=6", "output.overwrite=true")
    assert "Input/output error" in err
    assert contents("out") == before


def test_equal_runs_that_end_together_leave_one_of_them(trace, tmp_path, monkeypatch):
    run.simulate(trace, "lru", 6, output="out")
    shutil.copytree("out", "other")
    rename, ended = Path.rename, []

    def renamed(path, target):
        made = rename(path, target)
        if path.name == "out" and not ended:
            ended.append(rename(Path("other"), tmp_path / "out"))
        return made

    monkeypatch.setattr(Path, "rename", renamed)
    run.simulate(trace, "lru", 6, output="out")
    assert ended
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in Path("out").iterdir()} == FILES


@pytest.mark.parametrize("renamed", ["out", ".out.partial-"])
def test_a_run_that_is_killed_leaves_no_half_of_one_and_the_next_finds_the_old(trace, tmp_path, renamed):
    code = f"""
import os, signal
from pathlib import Path
from experiments.run import simulate
rename = Path.rename
def killed(path, target):
    if path.name.startswith({renamed!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)
Path.rename = killed
simulate({str(trace)!r}, "lfu", 6, output="out", overwrite=True)
"""
    run.simulate(trace, "lru", 6, output="out")
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == -9
    found = {json.loads((path / "summary.json").read_text())["policy"]: path for path in tmp_path.iterdir()}
    assert found["lru"].name.startswith("out" if renamed == "out" else ".out.replaced-")
    assert found["lfu"].name.startswith(".out.partial-")
    assert all({file.name for file in path.iterdir()} == FILES for path in found.values())
    finished = command(main, f"trace={trace}", "output.dir=out", "policy=lfu", "cache.slots_per_layer=6")
    assert "out: holds a run with another" in finished.err
    assert json.loads(Path("out/summary.json").read_text())["policy"] == "lru"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["policy=oled", "policy.coop=false"], ["Knobs of policy=oled:\n", "policy.coop ", " false\n"]),
        (["policy=full"], ["policy=full has no knobs."]),
        (["policy=custom", "policy.path=cost$1.py"], ["policy.path ", "cost$1.py\n"]),
        (["policy=custom"], ["policy.path ", "(must be given)\n"]),
    ],
)
def test_the_help_shows_the_knobs_of_the_policy(arguments, words):
    finished = command(main, *arguments, "--help")
    assert finished.code == 0, finished.err
    assert all(word in finished.out for word in words)


@pytest.mark.parametrize("policy", ["full", "ondemand"])
@pytest.mark.parametrize("slots", [40, 0])
def test_a_cache_size_that_is_ignored_is_not_refused(trace, policy, slots):
    result = run.simulate(trace, policy, slots)
    assert result.summary["decision_hash"] == run.simulate(trace, policy, 6).summary["decision_hash"]
    assert result.summary["slots_per_layer"] == (16 if policy == "full" else 0)


def test_a_path_that_no_system_has_is_refused(trace):
    with pytest.raises(ConfigError, match=r"simulate: output is '.x00', must be a path"):
        run.simulate(trace, "lru", 6, output="\0")


def test_a_setting_that_json_cannot_hold_is_refused_before_the_run(trace):
    with pytest.raises(ConfigError, match=r"config: .*PosixPath.* must be texts"):
        run.simulate(trace, "lru", 6, config={"trace": Path("x")}, output="out")
    assert list(Path().iterdir()) == []


def test_a_full_disk_is_one_line(trace):
    run.simulate(trace, "lru", 6, output="out")
    assert max(path.stat().st_size for path in Path("out").iterdir()) > 13000
    shutil.rmtree("out")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for num_bytes in (100, 6000, 9000, 13000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                run.simulate(trace, "lru", 6, output="out")
            if num_bytes == 9000:
                err = refused(f"trace={trace}", "output.dir=out", "policy=lru", "cache.slots_per_layer=6")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert list(Path().iterdir()) == []
    assert "out: " in err
    assert "File too large" in err
