"""`oled-compare` on directories: what it reads, writes, refuses, and draws."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from matplotlib import image
from measured import measure
from pftraces import Track, read_tracks

from experiments import compare_files, figures
from experiments.compare import main
from experiments.compare_cells import Cell
from experiments.compare_files import CELLS, FILES, NUMBERS, TABLE, TIMELINE
from experiments.compare_log import decision_hash, first_difference
from experiments.compare_runs import read_runs
from experiments.run import simulate

CELLS_MADE = (("lru", 16), ("oled", 16), ("gate_ahead", 16), ("ondemand", 16))


def slower(times):
    """One percent, and half a millisecond at the start."""
    return 1.01 * times + 500_000 * (times > 0)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Simulated runs, and two repeats of a replay of each but `ondemand`, of which there is one."""
    root = tmp_path_factory.mktemp("results")
    for policy, slots in CELLS_MADE:
        made = root / "simulated" / policy
        simulate("proxy-tiny", policy, slots, shape="llada2.0-mini", output=made)
        measure(made, root / "replayed" / "1" / policy, slower)
        if policy != "ondemand":
            measure(made, root / "replayed" / "2" / policy, lambda times: 1.03 * times)
    return root


@pytest.fixture
def oled_compare(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


def test_sweeps_against_sweeps(oled_compare, results):
    code, out, err = oled_compare(results / "simulated", results / "replayed", "--output", "made")
    assert (code, err) == (0, "")
    assert sorted(path.name for path in Path("made").iterdir()) == sorted({*FILES} - {TIMELINE})
    numbers = json.loads(Path("made", NUMBERS).read_text())
    cells = {cell["name"]: cell for cell in numbers["cells"]}
    assert list(cells) == [
        "ondemand/x1/proxy-tiny",
        "lru/16/x1/proxy-tiny",
        "oled/16/x1/proxy-tiny",
        "gate_ahead/16/x1/proxy-tiny",
    ]
    # no forward but the first is later by anything else than one percent, and it is warm-up
    assert cells["lru/16/x1/proxy-tiny"]["tpot_error"] == pytest.approx(1 / 1.02 - 1, abs=1e-6)
    assert cells["ondemand/x1/proxy-tiny"]["tpot_error"] == pytest.approx(1 / 1.01 - 1, abs=1e-6)
    assert cells["lru/16/x1/proxy-tiny"]["spread_ratio"] == pytest.approx(0.02 / 1.02, abs=1e-6)
    assert cells["ondemand/x1/proxy-tiny"]["spread_ratio"] is None
    assert [cell["same_decisions"] for cell in cells.values()] == [True, True, True, None]
    assert [cell["worst_points"] if "worst_points" in cell else cell["hit_points"] for cell in cells.values()] == [
        0
    ] * 4
    assert pl.read_parquet(Path("made", CELLS)).height == 4
    assert max(map(len, out.splitlines())) <= 80
    assert "met         decisions without prefetch (equal): 3 of 3 cells" in out
    assert out.splitlines()[-1] == "Written: made"
    picture = image.imread("made/plot.png")
    assert picture.shape[1] > 1500
    assert len(np.unique(picture[::5, ::5].reshape(-1, picture.shape[2]), axis=0)) > 50


def test_what_was_written_can_be_compared_again(oled_compare, results):
    code, out, _ = oled_compare(results, "--output", "made")
    assert code == 0
    code, again, _ = oled_compare("made", "--output", "copy")
    assert code == 0
    assert again.replace("copy", "made") == out
    for name in (NUMBERS, TABLE):
        assert Path("copy", name).read_text() == Path("made", name).read_text()
    assert oled_compare("made", "copy") == (0, out.removesuffix("\nWritten: made\n"), "")  # nothing counts twice


def test_a_run_given_twice_counts_once(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = results / "replayed" / "1" / "lru"
    shutil.copytree(first, "copied")
    once = [run for run in read_runs([results]) if run.is_replay]
    assert len(once) == 7
    assert len([run for run in read_runs([first, results / "replayed", Path("copied")]) if run.is_replay]) == 7


def test_runs_with_a_row_for_each_layer_are_compared_alike(oled_compare, results, tmp_path):
    by_layer = Path(shutil.copytree(results / "replayed" / "1" / "lru", tmp_path / "by_layer"))
    (by_layer / "result.parquet").rename(by_layer / "forwards.parquet")
    shutil.copy(by_layer / "decisions.parquet", by_layer / "result.parquet")
    drawn = ("--output", "made", "--overwrite", "--timeline", "lru/16/x1/proxy-tiny")
    by_forward = oled_compare(results / "simulated" / "lru", results / "replayed" / "1" / "lru", *drawn)
    assert by_forward[0] == 0
    assert oled_compare(results / "simulated" / "lru", by_layer, *drawn) == by_forward


def test_strict_says_what_the_verdict_is(oled_compare, results, tmp_path):
    assert oled_compare(results, "--strict")[0] == 0
    measure(results / "simulated" / "lru", tmp_path / "off" / "lru", lambda times: 2 * times)
    code, out, err = oled_compare(results / "simulated" / "lru", "off", "--strict")
    assert (code, err) == (1, "")
    assert "MISSED      MAPE of TPOT (<= 3 %): 50.00 % over 1 cells, signed -50.00 %;" in out
    assert oled_compare(results / "simulated" / "lru", "off")[0] == 0


def test_other_decisions_are_named(oled_compare, results, tmp_path):
    lied = measure(results / "simulated" / "lru", tmp_path / "lied" / "lru", slower, decision_hash="0" * 64)
    layers = pl.read_parquet(lied / "decisions.parquet")
    row = layers.with_row_index().filter(pl.col("transfers").list.len() > 2)["index"][300]
    changed = [[*ids[:-1]] if nth == row else ids for nth, ids in enumerate(layers["transfers"].to_list())]
    layers.with_columns(transfers=pl.Series(changed, dtype=layers.schema["transfers"])).write_parquet(
        lied / "decisions.parquet"
    )
    forward, layer = layers["forward"][row], layers["layer"][row]
    code, out, _ = oled_compare(results / "simulated" / "lru", "lied")
    assert code == 0
    assert "DIFFER!" in out
    assert f"forward {forward}, layer {layer}: transfers [" in " ".join(out.split())


def test_the_hash_of_a_stretch_comes_from_the_log(results):
    """Of all forwards it is what the summary says; and a shorter replay is judged by it."""
    lru, oled = (read_runs([results / "simulated" / policy])[0] for policy in ("lru", "oled"))
    num_forwards = lru.forwards.height
    assert decision_hash(lru.cut(num_forwards)) == lru.facts["decision_hash"]
    as_cut = type(lru)(lru.name, lru.facts, lru.forwards, lru.directory, is_whole=False)
    assert decision_hash(as_cut) == lru.facts["decision_hash"]
    assert decision_hash(lru.cut(100)) not in (lru.facts["decision_hash"], decision_hash(oled.cut(100)), None)
    assert first_difference(lru, lru) is None
    assert "request" in first_difference(lru, oled)


def tracks_of(path: Path) -> dict[str, dict[str, Track]]:
    """Tracks by their group's first word and their name."""
    tracks = read_tracks(path)
    groups = {number: track.name.partition(":")[0] for number, track in tracks.items() if not track.parent}
    found: dict[str, dict[str, Track]] = {name: {} for name in groups.values()}
    for track in tracks.values():
        if track.parent:
            found[groups[track.parent]][track.name] = track
    return found


@pytest.mark.parametrize("policy", ["oled", "gate_ahead"])
def test_both_timelines(policy, oled_compare, results):
    cell = f"{policy}/16/x1/proxy-tiny"
    code, _, err = oled_compare(results, "--output", "made", "--timeline", cell, "--window", "50:3")
    assert (code, err) == (0, "")
    found = tracks_of(Path("made", TIMELINE))
    assert list(found) == ["simulated", "measured", "difference"]
    both = found["simulated"], found["measured"]
    simulated, measured = ([one for one in run["forwards"].slices if one.depth == 0] for run in both)
    assert (
        [one.name for one in simulated] == [one.name for one in measured] == ["forward 50", "forward 51", "forward 52"]
    )
    # each begins at one instant in both, and measured ones take 1.01 times as long
    assert [one.start_ns for one in simulated] == [one.start_ns for one in measured]
    assert simulated[0].start_ns == 0
    for a, b, later in zip(simulated, measured, measured[1:], strict=False):
        assert b.end_ns - b.start_ns == pytest.approx(1.01 * (a.end_ns - a.start_ns), abs=2)
        assert later.start_ns == b.end_ns
    names = [[one.name.removesuffix(" ahead") for one in run["H2D engine"].slices] for run in both]
    assert names[0] == names[1]
    assert names[0]
    for run in both:
        for track in run.values():
            starts = [one.start_ns for one in track.slices if one.depth == 0]
            ends = [one.end_ns for one in track.slices if one.depth == 0]
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    log = pl.read_parquet(results / "simulated" / policy / "decisions.parquet").filter(
        pl.col("forward").is_between(50, 52)
    )
    layer_ns = [one.end_ns - one.start_ns for one in both[0]["forwards"].slices if one.depth == 1]
    assert layer_ns == (log["end_ns"] - log["start_ns"]).to_list()
    assert [count for _, count in both[0]["missed experts"].counts] == (
        log["num_activated"] - log["hits"].list.len()
    ).to_list()
    differences = [count for _, count in found["difference"]["layer, simulated less measured"].counts]
    assert len(differences) == log.height
    assert sum(differences) == pytest.approx(-0.01 * sum(layer_ns), rel=1e-3)


def test_measured_times_that_overlap_are_drawn_one_after_another(oled_compare, results, tmp_path):
    """Events of different streams are read with an error; tracks must not show what cannot be."""
    rng = np.random.default_rng(0)
    run = measure(results / "simulated" / "oled", tmp_path / "rough", lambda times: times)
    layers = pl.read_parquet(run / "decisions.parquet")
    for name in ("transfer_start_ns", "transfer_end_ns"):
        shaken = [[ns + int(rng.integers(-800, 800)) for ns in row] for row in layers[name].to_list()]
        layers = layers.with_columns(pl.Series(name, shaken, dtype=layers.schema[name]))
    layers = layers.with_columns(pl.col("end_ns") + 700)
    layers.write_parquet(run / "decisions.parquet")
    args = [results / "simulated" / "oled", run, "--output", "made", "--timeline", "oled/16/x1/proxy-tiny"]
    assert oled_compare(*args)[0] == 0
    measured = tracks_of(Path("made", TIMELINE))["measured"]  # reading refuses times that go back
    assert len(measured["H2D engine"].slices) > 100
    layers.head(layers.height // 2).write_parquet(run / "decisions.parquet")
    code, _, err = oled_compare(*args, "--overwrite", "--window", "100:9")
    assert code == 2
    assert "decisions.parquet holds 0 of forwards 100 to 108, must hold all of them" in err


def damaged(results, tmp_path, how):
    run = Path(shutil.copytree(results / "replayed" / "2" / "lru", tmp_path / "damaged"))
    if how == "no summary":
        (run / "summary.json").unlink()
    if how == "no manifest":
        (run / "manifest.json").unlink()
    if how == "half a table":
        (run / "result.parquet").write_bytes((run / "result.parquet").read_bytes()[:-100])
    if how == "no JSON":
        (run / "summary.json").write_text("{")
    if how == "by layer":
        shutil.copy(run / "decisions.parquet", run / "result.parquet")
    if how == "older":
        old = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({key: old[key] for key in old if key != "sized"}))
    return run


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no summary", "damaged: holds no run; must be a directory of oled-simulate, oled-replay or oled-compare"),
        ("no manifest", "damaged: is not the whole of a run, or is damaged; remove it, or run it again"),
        ("no JSON", "damaged: is not the whole of a run, or is damaged; remove it, or run it again"),
        ("half a table", "result.parquet: is not a Parquet file that can be read"),
        ("by layer", "must have one row for each forward (output.per_layer=false)"),
        ("older", "damaged: the summary lacks sized; must be of a run of this version"),
    ],
)
def test_damaged_runs_are_refused(how, message, oled_compare, results, tmp_path):
    run = damaged(results, tmp_path, how)
    code, out, err = oled_compare(results / "simulated", run, "--output", "made")
    assert (code, out) == (2, "")
    assert err.startswith("oled-compare: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("manifest.json", "config", [1], "edited: is not the whole of a run, or is damaged"),
        ("manifest.json", "config", {"output": 3}, "edited: is not the whole of a run, or is damaged"),
        ("manifest.json", "profile", 3, "edited: manifest.json: profile is 3, must hold keys and values"),
        ("manifest.json", "profile", {"h2d_bytes_per_s": "x"}, "h2d_bytes_per_s is 'x', must be a number above 0"),
        ("manifest.json", "seed", [0], "manifest.json: seed is [0], must be a whole number, 0 or more or null"),
        ("summary.json", "policy", 3, "edited: summary.json: policy is 3, must be text"),
        ("summary.json", "slots_per_layer", "16", "slots_per_layer is '16', must be a whole number, 0 or more"),
        ("summary.json", "warmup", [1], "warmup is [1], must be a whole number, 0 or more"),
        ("summary.json", "variant", None, "variant is None, must be text"),
        ("summary.json", "trace", {}, "trace is {}, must be text"),
        ("summary.json", "decision_hash", [], "decision_hash is [], must be text"),
        ("summary.json", "h2d_bytes_factor", -1, "h2d_bytes_factor is -1, must be a number above 0"),
        ("summary.json", "tokens_per_forward", True, "tokens_per_forward is True, must be a number or null"),
    ],
)
def test_edited_runs_are_refused(file, key, value, message, oled_compare, results, tmp_path):
    run = Path(shutil.copytree(results / "replayed" / "2" / "lru", tmp_path / "edited"))
    (run / file).write_text(json.dumps({**json.loads((run / file).read_text()), key: value}))
    code, out, err = oled_compare(results / "simulated", run, "--output", "made")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent: no such directory"),
        (["--timeline", "lru/16/x1/proxy-tiny"], "--timeline: needs --output"),
        (["--window", "1:2"], "--window: needs --timeline"),
        (["--overwrite"], "--overwrite: needs --output"),
        (
            ["--output", "made", "--timeline", "lru/16"],
            "--timeline lru/16: no such cell; allowed: ondemand/x1/proxy-tiny, lru/16",
        ),
        (["--output", "made", "--timeline", "lru/16/x1/proxy-tiny", "--window", "3"], "--window 3: must be FIRST:N"),
        (["--output", "made", "--timeline", "lru/16/x1/proxy-tiny", "--window", "999:3"], "must begin at forward 0 to"),
        (["--output", "made", "--timeline", "lru/16/x1/proxy-tiny", "--window", "0:0"], "and hold one or more"),
        (["--fitted", "fiddler/*"], "no cell has such a name"),
        (["--output", "full"], "full: holds notes.txt, which is not of a comparison"),
        (["--output", "before"], "before: holds a comparison; --overwrite replaces it"),
    ],
)
def test_wrong_arguments_leave_nothing(arguments, message, oled_compare, results):
    for name, file in (("full", "notes.txt"), ("before", TABLE)):
        Path(name).mkdir()
        Path(name, file).write_text("mine")
    code, out, err = oled_compare(results, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["before", "full"]


def test_overwrite_replaces_a_comparison_whole(oled_compare, results):
    cell = "lru/16/x1/proxy-tiny"
    assert oled_compare(results, "--output", "made", "--timeline", cell)[0] == 0
    assert Path("made", TIMELINE).exists()
    assert oled_compare(results / "simulated", results / "replayed", "--output", "made", "--overwrite")[0] == 0
    assert not Path("made", TIMELINE).exists()
    assert sorted(path.name for path in Path().iterdir()) == ["made"]


def test_a_timeline_takes_the_log_of_the_run(oled_compare, results, tmp_path):
    assert oled_compare(results, "--output", "made")[0] == 0
    code, _, err = oled_compare("made", "--output", "again", "--timeline", "lru/16/x1/proxy-tiny")
    assert code == 2
    assert "its decision log is not kept here; give the directory of the run itself" in err
    bare = Path(shutil.copytree(results / "replayed" / "2" / "lru", tmp_path / "bare"))
    (bare / "decisions.parquet").unlink()
    manifest = json.loads((bare / "manifest.json").read_text())
    manifest["config"]["output"]["decisions"] = False
    (bare / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = oled_compare(
        results / "simulated", "bare", "--output", "again", "--timeline", "lru/16/x1/proxy-tiny"
    )
    assert code == 2
    assert "has no decisions.parquet; run it with output.decisions=true" in err


def test_the_plot_shows_every_cell(oled_compare, results, monkeypatch):
    kept = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda *args, **options: (kept.append(args[0]), save(*args, **options))
    )
    assert oled_compare(results, "--output", "made", "--fitted", "lru/*")[0] == 0
    scatter, errors = kept[0].axes
    numbers = json.loads(Path("made", NUMBERS).read_text())["cells"]
    drawn = sorted(tuple(line.get_xydata()[0]) for line in scatter.lines if line.get_marker() in "os")
    assert drawn == sorted((cell["measured_ms"], cell["simulated_ms"]) for cell in numbers)
    assert [text.get_text() for text in errors.get_yticklabels()] == [
        cell["name"].removesuffix("/proxy-tiny").replace("/", "  ") for cell in numbers
    ]
    legend = [text.get_text() for text in scatter.get_legend().get_texts()]
    assert legend == ["ondemand", "lru", "oled", "gate_ahead", "copied x1", "fitted, not judged", "within 3 %"]
    assert len({line.get_color() for line in scatter.get_legend().get_lines()[:4]}) == 4
    assert "executor, not to the cited systems" in " ".join(kept[0]._supxlabel.get_text().split())


def test_the_documentation_names_what_there_is(oled_compare):
    text = (Path(compare_files.__file__).parent.parent / "docs" / "fidelity.md").read_text()
    named = set(re.findall(r"`([a-z0-9_]+_(?:ms|ratio|error|mape|noise|points|decisions))`", text))
    assert len(named) > 10
    assert named <= {field.name for field in fields(Cell)}
    assert {name for name in FILES if f"`{name}`" not in text} == {"plot.png"}
    options = set(re.findall(r"--[a-z]+", text.partition("\n## Runs\n")[0]))
    assert options == {"--output", "--fitted", "--strict", "--timeline", "--window"}
    _, out, _ = oled_compare("--help")
    assert all(option in out for option in options)
    assert max(map(len, out.partition("Cells are")[2].splitlines())) <= 80  # the rest is as wide as the terminal
