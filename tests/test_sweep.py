"""Grids of `oled-simulate`, their table, and the table of a terminal."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from commands import ROW, command
from strategies import metadata_for, random_passes

import experiments.run
import experiments.simulate_command
from experiments.collect import table_of
from experiments.files import ALWAYS
from experiments.profiles import find_profile
from experiments.run import simulate
from experiments.simulate_command import main
from experiments.summary import COLUMNS
from experiments.table import format_table
from tracer.store import TraceWriter


def write_trace(path, seed=3, **fields):
    shape, passes = random_passes(np.random.default_rng(seed), num_experts=16, num_requests=2)
    with TraceWriter(path, metadata_for(shape, **fields), overwrite=True) as writer:
        for item in passes:
            writer.write(item)


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """A trace in an empty working directory; and the runs that were really made, as (policy, slots)."""
    monkeypatch.chdir(tmp_path)
    write_trace(Path("small.trace"))
    made = []

    whole = experiments.run._run

    def counted(setting, *arguments):
        made.append((setting.policy, setting.given.slots_per_layer))
        return whole(setting, *arguments)

    monkeypatch.setattr(experiments.run, "_run", counted)
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a grid of `lru` on 2, 4 and 8 slots."""
    path = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        write_trace(Path("small.trace"))
        sweep("policy=lru", "cache.slots_per_layer=2,4,8")
    return path / "grid"


@pytest.fixture
def grid(finished, runs):
    """A copy of it in the working directory."""
    return Path(shutil.copytree(finished, "grid"))


def sweep(*arguments, trace="small.trace", code=0):
    finished = command(main, "-m", f"trace={trace}", "output.dir=grid", "hydra/launcher=basic", *arguments)
    assert finished.code == code, finished.err
    return finished


def cell_of(grid, slots):
    """The directory of the cell of `lru` on so many slots."""
    (path,) = (p.parent for p in grid.glob("*/summary.json") if json.loads(p.read_text())["slots_per_layer"] == slots)
    return path


def table():
    return pl.read_parquet("grid/sweep.parquet")


def test_a_grid_is_one_table(runs):
    finished = sweep("policy=lru,full,ondemand", "cache.slots_per_layer=4,8")
    rows = table()
    assert tuple(rows.columns[: len(COLUMNS)]) == COLUMNS
    expected = [("ondemand", 0), ("lru", 4), ("lru", 8), ("full", 16)]
    assert rows.select("policy", "slots_per_layer").rows() == expected
    assert sorted(runs) == [("full", 4), ("lru", 4), ("lru", 8), ("ondemand", 4)]  # what ignores the size ran once
    printed = [line.split()[:2] for line in finished.out.splitlines()[-6:-2]]
    assert printed == [[policy, str(slots)] for policy, slots in expected]
    for cell in Path("grid").glob("*-*"):
        assert {path.name for path in cell.iterdir()} == {*ALWAYS, "cell.json"}


def test_a_sweep_that_was_killed_goes_on(grid, runs):
    whole = table()
    done = sorted(grid.glob("lru-*"))
    shutil.rmtree(done[0])
    (done[1] / "result.parquet").unlink()
    shutil.copytree(done[2], f"grid/.{done[2].name}.partial-0123abcd")
    sweep("policy=lru", "cache.slots_per_layer=2,4,8")
    assert len(runs) == 2
    assert table().equals(whole)


def test_another_trace_of_the_same_name_is_run_anew_and_rows_of_old_grids_say_what_they_are(grid, runs):
    write_trace(Path("small.trace"), seed=4)
    finished = sweep("policy=lru", "cache.slots_per_layer=4")
    assert runs == [("lru", 4)]
    rows = table()
    assert sorted(rows["slots_per_layer"]) == [2, 4, 8]
    assert rows["trace_hash"].n_unique() == 2
    for digest in rows["trace_hash"]:
        assert f"content {digest[:8]}" in finished.out


def test_traces_of_one_file_name_are_told_apart():
    write_trace(Path("other/small.trace"), seed=4)
    finished = sweep("policy=lru", "cache.slots_per_layer=4", trace="small.trace,other/small.trace")
    captions = [" ".join(part.split()) for part in finished.out.split("\n\n")[:-1:2]]
    assert sorted(caption.split("trace content ")[1][:8] for caption in captions) == sorted(
        digest[:8] for digest in table()["trace_hash"]
    )


def test_the_table_holds_this_grid_and_runs_that_lie_beside_it_whole(runs):
    sweep("policy=lru", "cache.slots_per_layer=4,99", code=1)
    assert command(main, "trace=small.trace", "policy=lfu", "cache.slots_per_layer=4", "output.dir=grid/mine").code == 0
    simulate("small.trace", "lfu", 8, seed=7, output="grid/python")
    for place in ("grid/deeper/mine", "grid/.hidden"):
        shutil.copytree("grid/mine", place)
    shutil.copytree("grid/mine", "grid/torn")
    Path("grid/torn/result.parquet").unlink()
    sweep("policy=full", "cache.slots_per_layer=4", "hydra.sweep.subdir=far/away")  # whose failures are its own
    rows = table()
    assert rows.select("policy", "slots_per_layer", "seed").rows() == [
        ("lru", 4, 0),
        ("lfu", 4, 0),
        ("full", 16, 0),
        ("lfu", 8, 7),
    ]
    assert rows["run"].to_list()[1:] == ["mine", "far/away", "python"]


def test_runs_of_other_code_are_left_out_and_counted(grid):
    manifest = cell_of(grid, 4) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"sources": "', '"sources": "0'))
    finished = sweep("policy=lru", "cache.slots_per_layer=8")
    assert table()["slots_per_layer"].to_list() == [2, 8]
    assert "grid: left out of the table, as made by other code than this: 1\n" in finished.err


def test_cells_that_share_a_directory_do_not_replace_each_other(runs):
    finished = sweep("policy=lru", "cache.slots_per_layer=4,8", "hydra.sweep.subdir=one", code=1)
    assert "holds a run with another cache.slots_per_layer" in finished.err
    assert json.loads(Path("grid/one/summary.json").read_text())["slots_per_layer"] == 4
    runs.clear()
    sweep("policy=lru", "cache.slots_per_layer=4", "hydra.sweep.subdir=one")
    assert runs == []


def test_a_trace_that_is_replaced_between_cells_is_read_anew(runs, monkeypatch):
    whole = experiments.run._run

    def replaced(setting, *arguments):
        result = whole(setting, *arguments)
        if setting.given.slots_per_layer == 2:
            write_trace(Path("small.trace"), seed=4)
        return result

    monkeypatch.setattr(experiments.run, "_run", replaced)
    sweep("policy=lru", "cache.slots_per_layer=2,4")
    rows = table().sort("slots_per_layer")
    assert rows["trace_hash"].n_unique() == 2
    alone = simulate("small.trace", "lru", 4, decisions=False).summary
    assert rows.row(1, named=True)["tpot_ms"] == alone["tpot_ms"]
    monkeypatch.setattr(experiments.run, "_run", whole)
    sweep("policy=lru", "cache.slots_per_layer=2,4")
    assert table()["trace_hash"].n_unique() == 1


def test_other_code_or_another_profile_is_run_anew_and_profiles_of_one_name_are_told_apart(runs, monkeypatch):
    text = (Path(experiments.simulate_command.__file__).parent.parent / "conf/hardware/rtx5090.yaml").read_text()
    text = text.replace("name: rtx5090", "name: mine")
    assert "gate_sync_ns: 15000" in text
    Path("mine.yaml").write_text(text)
    Path("other.yaml").write_text(text.replace("gate_sync_ns: 15000", "gate_sync_ns: 16000"))
    grid = ["policy=lru", "cache.slots_per_layer=4"]
    sweep(*grid, "hardware.path=mine.yaml")
    finished = sweep(*grid, "hardware.path=other.yaml")
    assert len(runs) == 2
    assert " ".join(finished.out.split()).count("profile content ") == 2
    Path("other.yaml").write_text(text.replace("gate_sync_ns: 15000", "gate_sync_ns: 17000"))
    sweep(*grid, "hardware.path=mine.yaml,other.yaml")
    assert len(runs) == 3
    monkeypatch.setattr("experiments.identity.sources", lambda: "other")
    sweep(*grid, "hardware.path=mine.yaml")
    assert len(runs) == 4


def test_a_failed_cell_is_listed_and_kept_out_of_the_table():
    finished = sweep("policy=lru", "cache.slots_per_layer=4,99,8", code=1)
    assert table()["slots_per_layer"].to_list() == [4, 8]
    errors = [line for line in finished.err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "cache.slots_per_layer=99" in errors[0]
    assert "must be 1 to 16" in errors[0]
    assert "Traceback" not in finished.err


def test_a_grid_that_fails_everywhere_has_no_table():
    finished = sweep("policy=lru", "cache.slots_per_layer=98,99", code=1)
    assert finished.out == ""
    assert not Path("grid/sweep.parquet").exists()
    errors = sorted(json.loads(path.read_text())["error"] for path in Path("grid").rglob("cell.json"))
    assert [error.split(",")[0] for error in errors] == [f"slots_per_layer is {n}" for n in (98, 99)]


def test_whatever_is_swept_has_a_column():
    finished = sweep(
        "policy=lru",
        "cache.slots_per_layer=4",
        "hardware.h2d_bytes_per_s=10e9,50e9",
        "shape=trace,llada2.0-mini",
        "seed=5",
        "staging_slots=null,16",
    )
    rows = table()
    assert rows.height == 8
    assert rows["hardware.h2d_bytes_per_s"].unique().sort().to_list() == [10e9, 50e9]
    assert set(rows["shape"]) == {"trace", "llada2.0-mini"}
    assert set(rows["staging_slots"]) == {None, 16}
    assert "seed" not in rows.columns  # the same in all cells
    captions = [" ".join(part.split()) for part in finished.out.split("\n\n")[:-1:2]]
    assert len(captions) == 8  # nothing but the caption tells these rows apart
    assert sum("hardware.h2d_bytes_per_s 5e+10" in caption for caption in captions) == 4


def test_cells_are_named_by_values_as_people_write_them_and_knobs_told_apart_by_their_variant():
    grid = ["policy=lru", "cache.slots_per_layer=4", "policy.lru_order=id,gate,hits_first"]
    finished = sweep(*grid, "hardware.h2d_bytes_per_s=12.5e9,25000000000.0")
    assert [line.rpartition("=")[2] for line in finished.err.splitlines()] == ["12.5e9", "25e9"] * 3
    assert sorted(table()["hardware.h2d_bytes_per_s"]) == [12.5e9] * 3 + [25e9] * 3
    assert set(table()["variant"]) == {"", "lru_order=id", "lru_order=gate"}
    assert "[1] lru_order=" in finished.out
    assert "policy.lru_order" not in table().columns


def test_a_warning_says_which_cache_sizes_it_is_about():
    sizes = [ROW | {"slots_per_layer": slots, "warnings": ["slept"] * (slots < 9)} for slots in (8, 16)]
    other = ROW | {"policy": "oled", "slots_per_layer": 8, "warnings": ["slept"]}
    assert format_table(table_of([*sizes, other])).splitlines()[-2:] == ["lru at 8 slots: slept", "oled: slept"]


def test_a_table_for_people():
    other = {"policy": "ondemand", "slots_per_layer": 0, "utilization": None, "tpot_ms": 123.4, "misses": "oled"}
    rows = table_of([ROW, ROW | other | {"h2d_bytes": 999, "warnings": ["never\nacted"]}])
    assert (
        format_table(rows)
        == """\
trace t; source proxy:proxy-tiny (hidden 128, trained 4.45 minutes, 5.50 tokens
a counted forward); hardware rtx5090 (from data sheets, never validated on this
GPU); experts charged at 2048 x 512, 6.29 MB; 1 warm-up request; pool layer

policy    misses   slots   TPOT  TTFT  util.    hit    H2D  stall  decision
                  /layer     ms    ms      %      %     GB     ms      hash
--------  ------  ------  -----  ----  -----  -----  -----  -----  --------
ondemand  oled         0  123.4  1234      -  100.0  0.000      0  01234567
lru       h2d          8   12.3  1234   50.0  100.0  2.500      0  01234567
ondemand: never acted"""
    )


def test_a_wider_table_shows_more_columns():
    rows = table_of([ROW])
    widths = {width: format_table(rows, width=width).split("\n\n")[1].splitlines()[1] for width in (60, 66, 80, 120)}
    assert {width: head.split() for width, head in widths.items()} == {
        60: ["/layer", "ms", "%", "%", "GB", "ms", "hash"],
        66: ["/layer", "ms", "ms", "%", "%", "GB", "ms", "hash"],
        80: ["/layer", "ms", "bound", "%", "ms", "%", "%", "GB", "ms", "hash"],
        120: ["/layer", "ms", "bound", "%", "ms", "%", "by", "slot", "%", "hit", "%", "copy", "%", "GB", "ms", "hash"],
    }


def test_a_table_fits_80_columns():
    rows = [
        ROW
        | {"policy": policy, "misses": misses, "pool": pool, "variant": "a_long_knob=with_a_long_value, and=another"}
        for policy, misses, pool in (("ideal_min_global", "oled", "global"), ("moe_infinity", "h2d", "layer"))
    ]
    text = format_table(table_of(rows))
    assert max(map(len, text.splitlines())) <= 80
    assert "moe_infinity [1]" in text
    assert "[1] a_long_knob=with_a_long_value, and=another" in text
    assert "01234567" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"provenance": "measured"}, "hardware rtx5090; experts"),
        ({"provenance": "measured", "provisional": True}, "hardware rtx5090 (provisional); experts"),
        ({"warmup": 0}, "0 warm-up requests"),
        ({"expert_bytes": 192}, "192 B"),
    ],
)
def test_the_caption_says_where_numbers_come_from(change, words):
    assert words in " ".join(format_table(table_of([ROW | change])).split())


def test_a_table_that_cannot_be_written_leaves_nothing(grid, monkeypatch):
    def refuse(path, target):
        raise OSError(28, "No space left on device", str(path))

    (grid / "sweep.parquet").unlink()
    monkeypatch.setattr(Path, "replace", refuse)
    finished = sweep("policy=lru", "cache.slots_per_layer=4", code=2)
    assert "No space left on device" in finished.err
    assert not list(Path("grid").glob("*sweep.parquet*"))


def test_a_damaged_result_is_made_again(grid):
    path = cell_of(grid, 8) / "summary.json"
    whole = path.read_text()
    path.write_text(whole[:40])
    sweep("policy=lru", "cache.slots_per_layer=8")
    assert path.read_text() == whole


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("hydra.sweeper.num_batches=0", "num_batches is 0, must be 1 or more"),
        ("cache.slots_per_layer=range(8,8)", "holds no value; must be one or more"),
    ],
)
def test_a_grid_of_nothing_is_refused(argument, words):
    finished = sweep("policy=lru", argument, code=2)
    assert words in finished.err
    assert not Path("grid").exists()


def test_a_grid_does_not_go_into_a_trace():
    before = sorted(path.name for path in Path("small.trace").iterdir())
    finished = command(main, "-m", "trace=small.trace", "policy=lru,lfu", "output.dir=small.trace")
    assert finished.code == 2
    assert "is a trace; a grid needs a directory of its own" in finished.err
    assert sorted(path.name for path in Path("small.trace").iterdir()) == before


ENDS = """
import sys
from policies.plain import PlainPolicy

class Ends(PlainPolicy):
    def decide(self, step, view):
        sys.exit(0)
"""


def test_a_policy_that_ends_the_program_is_a_failed_cell():
    Path("ends.py").write_text(ENDS)
    Path("copy.py").write_text(ENDS)
    finished = sweep("policy=custom", "policy.path=ends.py,copy.py", "cache.slots_per_layer=8", code=1)
    errors = [line for line in finished.err.splitlines() if "error: " in line]
    assert [line.rpartition(": ")[0].endswith("SystemExit") for line in errors] == [True, True]


def test_a_policy_that_ends_the_program_is_an_error():
    Path("ends.py").write_text(ENDS)
    arguments = ("policy.path=ends.py", "cache.slots_per_layer=8", "output.dir=out")
    finished = command(main, "trace=small.trace", "policy=custom", *arguments)
    assert finished.code == 2
    assert "the policy ended the program, by sys.exit(0)" in finished.err
    assert not Path("out").exists()


def test_the_bound_on_time_of_a_log_is_that_of_its_own_slots():
    profile = find_profile("rtx5090")
    slow = replace(profile.roofline, cpu_bytes_per_s=1e5)
    machine = replace(profile, h2d_bytes_per_s=1e5, roofline=slow)  # misses bind, not the GPU
    runs = [simulate("small.trace", "lru", slots, machine, output=f"lru{slots}", decisions=True) for slots in (1, 12)]
    logs = "policy.path=lru1/decisions.parquet,lru12/decisions.parquet"
    sweep("policy=log", logs, "hardware.h2d_bytes_per_s=1e5", "hardware.roofline.cpu_bytes_per_s=1e5")
    alone = [run.summary["lower_bound_tpot_ms"] for run in runs]
    assert table().sort("slots_per_layer")["lower_bound_tpot_ms"].to_list() == alone
    assert alone[0] > alone[1]
