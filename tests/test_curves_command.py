import json
import re
import signal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from commands import command
from matplotlib import image

from experiments import curves as curves_command
from experiments.curves import main
from experiments.curves_files import FILES
from experiments.curves_plot import LINES
from experiments.run import simulate
from simulator.curves import CURVES
from tracer.shipped import find_trace
from tracer.store import TraceReader


@pytest.fixture
def oled_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        try:
            main(arguments)
        except SystemExit as stop:
            return stop.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_a_curve_passes_through_the_runs_of_its_policy(oled_curves):
    """Every number of a curve is that of `oled-simulate`: counts to the last hit, and the ratios made of them."""
    code, out, err = oled_curves(
        "trace=proxy-tiny", "points=lru,oled layer_adapt=false coop=false", "points_slots=7,16", "output.dir=made"
    )
    assert (code, err) == (0, "")
    table = pl.read_parquet("made/curves.parquet")
    together = table.filter(pl.col("layer").is_null())
    for curve, point in (("lru", "lru"), ("confidence", "oled (layer_adapt=false, coop=false)")):
        for slots in (7, 16):
            line, run = (
                together.filter(curve=name, slots_per_layer=slots, is_point=is_point).row(0, named=True)
                for name, is_point in ((curve, False), (point, True))
            )
            for count in ("hits", "activated", "num_forwards", "misses"):
                assert line[count] == run[count]
            for ratio in ("hit_ratio", "utilization", "utilization_slot_weighted"):
                assert line[ratio] == pytest.approx(run[ratio], rel=1e-12)
    points = [line for line in out.splitlines() if line.startswith(("lru  ", "oled ("))]
    assert [line.split()[-5:] for line in points if line.startswith("lru")] == [
        ["h2d", "7", "12.8", "79.5", "79.5"],
        ["h2d", "16", "29.7", "80.9", "80.9"],
    ]


def test_the_table_is_tidy(oled_curves):
    code, out, _ = oled_curves("trace=proxy-tiny", "curves=seq,ideal_min", "output.dir=made", "warmup_requests=3")
    assert code == 0
    assert sorted(path.name for path in Path("made").iterdir()) == sorted(FILES)
    table = pl.read_parquet("made/curves.parquet")
    assert table.height == 2 * 4 * 64  # curves, layers and all together, sizes
    assert table.select("curve", "is_point", "layer", "slots_per_layer").is_duplicated().sum() == 0
    assert table["warmup"].unique().to_list() == [3]
    reference = simulate("proxy-tiny", "ideal_min", 16, knobs={"misses": "h2d"}, warmup_requests=3).summary
    row = table.filter(pl.col("layer").is_null(), curve="ideal_min", slots_per_layer=16)
    assert row["hit_ratio"].item() == reference["hit_ratio"]
    sums = table.filter(pl.col("layer").is_not_null()).group_by("curve", "slots_per_layer").agg(pl.col("hits").sum())
    joined = sums.join(table.filter(pl.col("layer").is_null()), on=["curve", "slots_per_layer"])
    assert (joined["hits"] == joined["hits_right"]).all()
    for layer in range(3):
        hits = table.filter(curve="ideal_min", layer=layer).sort("slots_per_layer")["hits"].to_numpy()
        assert (np.diff(hits) >= 0).all()
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "trace proxy-tiny; source proxy:proxy-tiny (hidden 128, trained 4.45 minutes)" in text
    assert "3 warm-up requests" in text
    manifest = json.loads(Path("made/manifest.json").read_text())
    assert manifest["config"]["curves"] == "seq,ideal_min"
    assert manifest["trace"]["source"] == "proxy:proxy-tiny"


def test_all_curves_fit_a_terminal_and_a_plot(oled_curves):
    code, out, err = oled_curves("trace=proxy-tiny")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    directory = Path(re.search("Written: (outputs/.*)", out)[1])
    picture = image.imread(directory / "curves.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50
    assert list(LINES) == list(CURVES)
    assert len(set(LINES.values())) == len(LINES)


def test_where_nothing_counts_ratios_are_null(oled_curves):
    from strategies import metadata_for, random_passes

    from tracer.store import TraceWriter

    shape, passes = random_passes(np.random.default_rng(0), num_requests=2, batch=2)
    shared = [pass_ for pass_ in passes if 0 in pass_.requests]
    metadata = metadata_for(shape)
    with TraceWriter("shared.trace", metadata) as writer:
        for pass_ in shared:
            writer.write(pass_)
    code, out, err = oled_curves("trace=shared.trace", "curves=lru_id", "output.dir=made")
    assert (code, err) == (0, "")
    row = pl.read_parquet("made/curves.parquet").row(0, named=True)
    assert (row["hit_ratio"], row["utilization"], row["num_forwards"]) == (None, None, 0)
    assert re.search(r"\n +1 +-\n", out)


def test_other_curves_are_not_replaced_unasked(oled_curves):
    first = ("trace=proxy-tiny", "curves=seq", "output.dir=made")
    assert oled_curves(*first)[0] == 0
    assert oled_curves(*first)[0] == 0
    code, _, err = oled_curves("trace=proxy-tiny", "curves=lru_id", "output.dir=made")
    assert code == 2
    assert err == "oled-curves: error: made: holds curves with another curves; output.overwrite=true replaces them\n"
    assert oled_curves("trace=proxy-tiny", "curves=lru_id", "output.dir=made", "output.overwrite=true")[0] == 0
    assert pl.read_parquet("made/curves.parquet")["curve"].unique().to_list() == ["lru_id"]
    Path("made/notes.txt").write_text("mine")
    code, _, err = oled_curves(*first, "output.overwrite=true")
    assert (code, Path("made/notes.txt").read_text()) == (2, "mine")
    assert "holds notes.txt" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "trace: must be given as trace=VALUE"),
        (["proxy-tiny"], "proxy-tiny: must be KEY=VALUE; --help lists the keys"),
        (["trace=nothing"], "trace 'nothing': no such directory"),
        (["trace=proxy-tiny", "curve=lru"], "curve: no such key; did you mean curves?"),
        (["trace=proxy-tiny", "output.dirs=x"], "output.dirs: no such key; did you mean dir?"),
        (["trace=proxy-tiny", "curves=lfu"], "curves=lfu: not known; did you mean lru?"),
        (["trace=proxy-tiny", "curves=,"], "curves=,: must name one or more, each once"),
        (["trace=proxy-tiny", "curves=seq,seq"], "curves=seq,seq: must name one or more, each once"),
        (["trace=proxy-tiny", "warmup_requests=24"], "warmup_requests is 24, must be 0 or more and below 24"),
        (["trace=proxy-tiny", "warmup_requests=some"], "warmup_requests: Value 'some'"),
        (["trace=proxy-tiny", "points=lru", "points_slots=65"], "points_slots=65: must be whole numbers from 1 to 64"),
        (["trace=proxy-tiny", "points=lru depth", "points_slots=8"], "points=lru depth: 'lru depth' must be NAME"),
        (["trace=proxy-tiny", "points=lru max_admit=["], "'lru max_admit=[' has a value that cannot be read"),
        (
            ["trace=proxy-tiny", "points=oled", "points_slots=7"],
            "points: oled with 7 slots a layer: 21 slots for 3 layers",
        ),
        (["trace=proxy-tiny", "output.overwrite=maybe"], "output.overwrite: Value 'maybe'"),
        (["trace=proxy-tiny", "points=lr", "points_slots=8"], "policy 'lr'"),
        (["trace=proxy-tiny", "output.dir=."], ".: curves cannot take its place"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(arguments, message, oled_curves):
    if not any("output.dir" in text for text in arguments):
        arguments = [*arguments, "output.dir=some/where"]
    code, out, err = oled_curves(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("oled-curves: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(Path().iterdir()) == []


def test_an_interrupt_leaves_nothing(oled_curves, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(curves_command, "plot_curves", interrupted)
    code, _, err = oled_curves("trace=proxy-tiny", "curves=seq", "output.dir=some/where")
    assert (code, err) == (128 + signal.SIGINT, "oled-curves: interrupted\n")
    assert list(Path().iterdir()) == []


def test_help_names_every_key_and_curve():
    found = command(lambda: main(["--help"]))
    assert found.code == 0
    for name in (*CURVES, "trace", "warmup_requests", "points", "points_slots", "hardware", "output.dir"):
        assert name in found.out
    assert max(map(len, found.out.splitlines())) <= 80


def test_both_readings_of_a_trace_move_the_bar():
    reader = TraceReader(find_trace("proxy-tiny"))
    watched = curves_command._Watched(reader, 2)
    assert len(list(watched)) == reader.num_passes
    assert watched.bar.total == 2 * reader.num_passes
    assert len(list(watched)) == reader.num_passes
