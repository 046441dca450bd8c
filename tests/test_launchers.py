"""Grids in processes of their own: the same table, nothing left behind, and on with it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from commands import command
from strategies import metadata_for, random_passes

from experiments.simulate_command import main
from tracer.store import TraceWriter

KEYS = ["-m", "trace=small.trace", "shape=llada2.0-mini"]
COMMAND = [sys.executable, "-m", "experiments.simulate_command", *KEYS]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape, passes = random_passes(np.random.default_rng(3), num_experts=16, num_requests=3)
    with TraceWriter(Path("small.trace"), metadata_for(shape)) as writer:
        for item in passes:
            writer.write(item)


def test_the_table_depends_on_neither_launcher_nor_order():
    grid = ["policy=lru,full", "cache.slots_per_layer=4,9", "hardware.h2d_bytes_per_s=12e9,50e9", "output.dir=beside"]
    beside = subprocess.run([*COMMAND, *grid, "hydra.launcher.n_jobs=2"], capture_output=True, text=True)
    grid = ["hardware.h2d_bytes_per_s=50e9,12e9", "cache.slots_per_layer=9,4", "policy=full,lru", "output.dir=alone"]
    alone = command(main, *KEYS, *grid, "hydra/launcher=basic")
    for code, err in ((beside.returncode, beside.stderr), (alone.code, alone.err)):
        assert code == 0, err
        assert err.count("\n") == 6  # a short line for each cell
    assert Path("alone/sweep.parquet").read_bytes() == Path("beside/sweep.parquet").read_bytes()


WAITS = """
import time
from pathlib import Path
from policies.plain import PlainPolicy, plan

class Waits(PlainPolicy):
    def decide(self, step, view):
        while view.capacity[0] > 4 and not Path({go!r}).exists():
            time.sleep(0.01)
        return plan(step, view, [])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_grid_that_is_ended_leaves_no_process_and_goes_on(number):
    """Its first four cells end at once, and the others when a file is there."""
    Path("waits.py").write_text(WAITS.format(go=str(Path("go").absolute())))
    grid = ["policy=custom", "policy.path=waits.py", "cache.slots_per_layer=range(1,9)", "output.dir=grid"]
    with Path("err").open("w") as err:
        line = [*COMMAND, *grid, "hydra.launcher.n_jobs=2"]
        running = subprocess.Popen(line, stderr=err, start_new_session=True)
        try:
            while running.poll() is None and len(list(Path("grid").glob("*/cell.json"))) < 4:
                time.sleep(0.05)
            running.send_signal(number)
            running.send_signal(number)
            assert running.wait(60) in (-number, 128 + number)
            wait_for_the_end_of(running.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    if number == signal.SIGTERM:
        cells = {path.parent.name for path in Path("grid").glob("*/summary.json")}
        assert {path.name for path in Path("grid").iterdir()} == cells | {"multirun.yaml"}
    first = {path: path.stat().st_mtime_ns for path in Path("grid").glob("*/summary.json")}
    assert len(first) == 4
    Path("go").touch()
    done = command(main, *KEYS, *grid, "hydra/launcher=basic")
    assert done.code == 0, done.err
    assert all(path.stat().st_mtime_ns == when for path, when in first.items())
    assert len(list(Path("grid").glob("*/summary.json"))) == 8
    assert [path.name for path in Path("grid").iterdir() if path.name.startswith(".")] == []


def wait_for_the_end_of(group):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("processes are left")


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
