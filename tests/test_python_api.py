"""The Python API: sweep, its table, and what it shares with the command."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from strategies import metadata_for, random_passes

import experiments
from experiments import simulate, sweep
from experiments.errors import ConfigError
from experiments.grid import batches, cells
from experiments.profiles import load_profile
from tracer.store import TraceWriter


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape, passes = random_passes(np.random.default_rng(3), num_experts=16, num_requests=3)
    with TraceWriter(Path("small.trace"), metadata_for(shape)) as writer:
        for item in passes:
            writer.write(item)


def test_a_table_has_the_summary_of_each_run():
    machines = [replace(load_profile("rtx5090"), h2d_bytes_per_s=rate) for rate in (12e9, 50e9)]
    table = sweep(
        "small.trace",
        ["lru", "full", ("lru", {"lru_order": "id"})],
        [4, 9],
        machines,
        shape="llada2.0-mini",
        staging_slots=[None, 16],
        jobs=1,
    )
    assert table.height == 2 * 2 * (2 + 1 + 2)  # machines, staging, and sizes where they are heeded
    assert set(table["hardware.h2d_bytes_per_s"]) == {12e9, 50e9}
    for row in table.iter_rows(named=True):
        summary = simulate(
            "small.trace",
            row["policy"],
            row["slots_per_layer"],
            machines[row["hardware.h2d_bytes_per_s"] == 50e9],
            knobs={"lru_order": "id"} if row["variant"] else None,
            shape="llada2.0-mini",
            staging_slots=row["staging_slots"],
        ).summary
        assert {key: row[key] for key in summary} == summary


def test_neither_processes_nor_order_change_the_table():
    first = sweep("small.trace", ["lru", "ondemand", "full"], [4, 9], seed=[1, 2], jobs=2)
    again = sweep("small.trace", ["full", "ondemand", "lru"], [9, 4], seed=[2, 1], jobs=1)
    assert first.equals(again)
    assert list(Path().iterdir()) == [Path("small.trace")]


def test_a_sweep_goes_on_in_its_directory(monkeypatch):
    sweep("small.trace", "lru", [4, 9], output="grid", jobs=1)
    made = []
    whole = experiments.run._run
    monkeypatch.setattr(experiments.run, "_run", lambda *given: made.append(given) or whole(*given))
    table = sweep("small.trace", "lru", [4, 9, 12], output="grid", jobs=1)
    assert len(made) == 1
    assert table.equals(pl.read_parquet("grid/sweep.parquet"))
    assert table["slots_per_layer"].to_list() == [4, 9, 12]
    assert not list(Path("grid").glob(".*"))


def test_runs_that_fail_are_named_and_others_kept():
    with pytest.raises(
        ConfigError, match=r"sweep: 2 of 3 runs failed: slots_per_layer=98: .* must be 1 to 16.*; slots"
    ):
        sweep("small.trace", "lru", [98, 4, 99], output="grid", jobs=1)
    assert len(list(Path("grid").glob("lru-*/summary.json"))) == 1
    with pytest.raises(ConfigError, match="sweep: 1 of 1 runs failed: the run: no policy 'lruu'"):
        sweep("small.trace", "lruu", 4, jobs=1)


def test_sizes_in_gib():
    table = sweep("small.trace", "lru", cache_gib=[0.1, 0.2], shape="llada2.0-mini", jobs=1)
    assert table["slots_per_layer"].to_list() == [5, 11]
    assert table["cache.gib"].to_list() == [0.1, 0.2]


def test_the_api_is_no_module():
    assert experiments.__all__ == ["Result", "simulate", "sweep"]
    assert all(callable(getattr(experiments, name)) for name in experiments.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = experiments.nothing


def test_cells_of_a_group_stand_together_and_the_profile_varies_fastest():
    axes = {"hardware": ["a", "b"], "policy": ["lru", "full"], "slots_per_layer": [1, 2], "trace": ["x", "y"]}
    found = cells(axes, str)
    named = [
        "".join(map(str, (cell.values[key] for key in ("trace", "policy", "slots_per_layer", "hardware"))))
        for cell in found
    ]
    assert named[:6] == ["xlru1a", "xlru1b", "xlru2a", "xlru2b", "xfull1a", "xfull1b"]
    assert len(found) == 12
    assert [len(part) for part in batches(found)] == [2] * 6
    assert [len(part) for part in batches(found, 3)] == [4, 4, 4]
    assert [len(part) for part in batches(found, 1)] == [12]
    assert [cell for part in batches(found, 2) for cell in part] == found


def test_relative_paths_are_of_where_each_grid_is_started(tmp_path, monkeypatch):
    small = tmp_path / "small.trace"
    for name in ("first", "second"):
        there = tmp_path / name
        shutil.copytree(small, there / f"{name}.trace")
        monkeypatch.chdir(there)
        table = sweep(f"{name}.trace", ["lru", "full"], 8, jobs=2, shape="llada2.0-mini", output="out")
        assert table["trace"].to_list() == [name, name]
        assert (there / "out" / "sweep.parquet").is_file()
