"""What the benchmark of caches says is so: structure, equality of hits, never times."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from experiments import bench, bench_caches, bench_others
from experiments.errors import ConfigError
from simulator.stream import belady_hits, lru_hits

OTHERS = {"libcachesim": "libcachesim", "moe-policylang": "moe_policylang"}
SMALL = ("caches", "--trace", "proxy-tiny", "--slots", "16", "--forwards", "12", "--repeats", "2")


def ran(capsys, *arguments):
    bench.main([*SMALL, *arguments])
    return capsys.readouterr().out


@pytest.fixture
def alone(monkeypatch):
    """As where nothing to compare with is installed."""
    monkeypatch.setattr(bench_others, "find_spec", lambda name: None)


def test_the_synthetic_stream_drifts_as_it_says():
    active = bench_caches.drifting_sets(60)
    assert active.shape == (60, 19, 256)
    assert (active.sum(axis=2) == 60).all()
    left = (active[:-1] & ~active[1:]).sum(axis=2) / 60
    assert left.mean() == pytest.approx(0.13, abs=0.005)
    assert np.array_equal(active, bench_caches.drifting_sets(60))


def test_each_cache_is_measured_on_both_streams(alone, capsys, tmp_path):
    file = tmp_path / "caches.json"
    out = ran(capsys, "--json", str(file))
    report = json.loads(file.read_text())
    assert report["others"] == {"libcachesim": None, "moe-policylang": None}
    assert report["replay"] == []
    streams = report["streams"]
    assert list(streams) == ["drifting sets", "proxy-tiny"]
    assert streams["drifting sets"]["num_accesses"] == 12 * 19 * 60
    rows = report["caches"]
    assert [(row["stream"], row["layout"], row["slots"], row["cache"]) for row in rows] == [
        (stream, layout, 16 * (streams[stream]["num_layers"] if layout == "shared" else 1), cache)
        for stream in streams
        for layout in ("shared", "per layer")
        for cache in ("LRU", "LFU", "Belady")
    ]
    for row in rows:
        assert row["hit_ratio"] == row["num_hits"] / streams[row["stream"]]["num_accesses"]
        assert row["ours_per_s"] > 0
        assert row["with_parquet_per_s"] > 0
        assert row["ratio"] is None
    assert len(out.splitlines()) > 20
    assert max(len(line) for line in out.splitlines() if not line.startswith("Not compared")) <= 80
    for name in OTHERS:
        reason = f"{name} is not installed, so nothing is compared with it; CONTRIBUTING.md says how to bring it"
        assert f"Not compared: {reason}" in out.splitlines()


def test_hits_are_those_of_the_streams(alone, capsys, tmp_path):
    file = tmp_path / "caches.json"
    ran(capsys, "--json", str(file))
    found = {
        (row["layout"], row["cache"]): row["num_hits"]
        for row in json.loads(file.read_text())["caches"]
        if row["stream"] == "drifting sets"
    }
    stream = (np.flatnonzero(bench_caches.drifting_sets(12)) % (19 * 256)).astype(np.int32)
    assert found["shared", "LRU"] == lru_hits(stream, 19 * 256, 16 * 19)
    layers = [(stream[stream // 256 == layer] % 256).astype(np.int32) for layer in range(19)]
    assert found["per layer", "Belady"] == sum(belady_hits(part, 256, 16) for part in layers)


def test_next_uses_are_those_that_follow():
    stream = np.array([3, 1, 3, 3, 2, 1], np.int32)
    assert bench_others._next_use(stream).tolist() == [2, 5, 3, -1, -1, -1]
    assert bench_others._next_use(stream[:0]).size == 0


def test_a_difference_stops_it(alone, monkeypatch):
    class Wrong:
        NAME = "libcachesim"

        def __init__(self, *_):
            pass

        def run(self, *_):
            return bench_others.Timed(-1, 1.0)

    monkeypatch.setattr(bench_caches, "LibCacheSim", Wrong)
    monkeypatch.setattr(bench_caches, "installed", lambda name: "1" if name == "libcachesim" else None)
    with pytest.raises(RuntimeError, match=r"LRU, shared, 304 slots: \d+ hits, libcachesim has -1"):
        bench_caches.measure_caches("proxy-tiny", [16], 12, 1)


def test_what_is_below_its_bar_is_marked():
    row = {"stream": "s", "layout": "shared", "slots": 9, "cache": "LRU", "hit_ratio": 0.5, "ours_per_s": 4e8}
    row |= {"with_parquet_per_s": 1e8, "libcachesim_per_s": 1e8, "ratio": 4.0, "bar": 5.0}
    short, enough = bench_caches._table(bench_caches._CACHES, [row, {**row, "ratio": 5.5}])[2:]
    assert "4.0 !" in short
    assert "!" not in enough


@pytest.mark.parametrize("name", OTHERS)
def test_beside_others_hits_are_equal(name, capsys, tmp_path):
    """They are compared before anything is timed; here, that it comes to that."""
    pytest.importorskip(OTHERS[name], reason=f"{name} is not installed")
    file = tmp_path / "caches.json"
    out = ran(capsys, "--json", str(file))
    report = json.loads(file.read_text())
    if name == "libcachesim":
        assert all(row["ratio"] == row["ours_per_s"] / row["libcachesim_per_s"] for row in report["caches"])
    else:
        for row in report["replay"]:
            its, ours = row["policylang_hit_ratio"], row["hit_ratio"]
            assert its <= ours if row["cache"] == "Belady" else its == ours
    assert max(map(len, out.splitlines())) <= 80 + 50 * ("Not compared" in out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "65"], "slots 65: must be 1 to 64, the experts of a layer"),
        (["--trace", "nothing"], "trace 'nothing': no such directory"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main([*SMALL, *arguments])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith("bench: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_simulators_in_a_directory_are_looked_for_after_all_else(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_others.sys, "path", list(bench_others.sys.path))
    for package in ("moe_policylang", "experiments"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    bench_others.look_in(tmp_path)
    assert find_spec("moe_policylang").origin == str(tmp_path / "moe_policylang" / "__init__.py")
    assert Path(find_spec("experiments").origin) == Path(bench_others.__file__).with_name("__init__.py")
    with pytest.raises(ConfigError, match="must be the directory of pip install --target"):
        bench_others.look_in(tmp_path / "nowhere")
