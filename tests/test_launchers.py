"""Grids in processes of their own: the same table, nothing left behind, and on with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from strategies import metadata_for, random_passes

from tracer.store import TraceWriter

COMMAND = [sys.executable, "-m", "experiments.simulate_command", "-m", "trace=small.trace", "shape=llada2.0-mini"]
GRID = ["policy=lru,full,oled", "cache.slots_per_layer=4,9", "hardware.h2d_bytes_per_s=12e9,50e9"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape, passes = random_passes(np.random.default_rng(3), num_experts=16, num_requests=3)
    with TraceWriter(Path("small.trace"), metadata_for(shape)) as writer:
        for item in passes:
            writer.write(item)


def test_the_table_does_not_depend_on_the_launcher():
    for name, launcher in (("alone", "hydra/launcher=basic"), ("beside", "hydra.launcher.n_jobs=2")):
        done = subprocess.run([*COMMAND, *GRID, launcher, f"output.dir={name}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("\n") == 10  # a short line for each cell
    assert Path("alone/sweep.parquet").read_bytes() == Path("beside/sweep.parquet").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_grid_that_is_ended_leaves_no_process_and_goes_on(number):
    grid = [*COMMAND, "policy=lru", "cache.slots_per_layer=range(1,9)", "seed=range(0,8)", "hydra.launcher.n_jobs=2"]
    with Path("err").open("w") as err:
        running = subprocess.Popen([*grid, "output.dir=grid"], stderr=err, start_new_session=True)
        while running.poll() is None and not list(Path("grid").glob("*/cell.json")):
            time.sleep(0.05)
        running.send_signal(number)
        running.send_signal(number)
        assert running.wait() in (-number, 128 + number)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes are left")
    if number == signal.SIGTERM:
        cells = {path.parent.name for path in Path("grid").glob("*/summary.json")}
        assert {path.name for path in Path("grid").iterdir()} == cells | {"multirun.yaml"}
    first = {path: path.stat().st_mtime_ns for path in Path("grid").glob("*/summary.json")}
    assert 0 < len(first) < 64
    done = subprocess.run([*grid, "output.dir=grid"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(path.stat().st_mtime_ns == when for path, when in first.items())
    assert len(list(Path("grid").glob("*/summary.json"))) == 64
    assert [path.name for path in Path("grid").iterdir() if path.name.startswith(".")] == []


KILLS = """
import os, signal
from policies.plain import PlainPolicy

class Kills(PlainPolicy):
    def decide(self, step, view):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_was_killed_is_one_line_that_names_its_cell():
    Path("kills.py").write_text(KILLS)
    grid = ["policy=lru,custom", "policy.path=kills.py", "cache.slots_per_layer=4", "hydra.launcher.n_jobs=2"]
    done = subprocess.run([*COMMAND, *grid, "output.dir=grid"], capture_output=True, text=True)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if ": cell " not in line]
    assert len(lines) == 1, done.stderr
    assert "was ended by SIGKILL(-9), as systems do that are out of memory; under way were: " in lines[0]
    assert "policy=custom" in lines[0]
    assert not list(Path("grid").glob(".*"))
    assert not list(Path("grid").glob("custom*"))
