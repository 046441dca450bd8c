"""Time of a whole grid of the command: policies, cache sizes, bandwidths and traces, in parallel processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from joblib import effective_n_jobs

from experiments.errors import ConfigError

POLICIES = ("lru", "lfu", "prev_set", "oled", "moe_infinity", "ktransformers", "fiddler", "ideal_min")
TRACES = ("proxy-19x256-code", "proxy-19x256-prose", "proxy-19x256-arithmetic")
SIZES = (20, 40, 60, 80, 100, 120, 140, 160)
BANDWIDTHS = (12e9, 25e9, 40e9, 55e9)  # of copies to the GPU, bytes a second
HARDWARE, SHAPE = "rtx5090", "llada2.0-mini"
BUDGET_S = 180.0  # what we hold the whole grid to, on two processors with compiled code in the cache


def measure_sweep(
    traces: Sequence[str], policies: Sequence[str], sizes: Sequence[int], jobs: int | None = None
) -> dict[str, Any]:
    """Run the grid once for each policy by itself, and once as a whole, each time in new processes.

    Args:
        traces: names or paths.
        policies: registered names.
        sizes: slots of each layer.
        jobs: processes; None is one for each processor.

    Raises:
        ConfigError: a run failed.
    """
    cold_s = {policy: _timed([policy], traces[:1], sizes[:1], jobs)[0] for policy in policies}
    alone_s = {policy: _timed([policy], traces, sizes, jobs)[0] for policy in policies}
    whole_s, num_runs = _timed(policies, traces, sizes, jobs)
    return {
        "traces": list(traces),
        "policies": {name: {"first_s": cold_s[name], "alone_s": alone_s[name]} for name in policies},
        "slots_per_layer": list(sizes),
        "h2d_bytes_per_s": list(BANDWIDTHS),
        "num_processes": effective_n_jobs(-1 if jobs is None else jobs),
        "num_runs": num_runs,
        "whole_s": whole_s,
        "budget_s": BUDGET_S,
    }


def _timed(policies: Sequence[str], traces: Sequence[str], sizes: Sequence[int], jobs: int | None) -> tuple[float, int]:
    """Seconds of the command, from its start to its end, and how many runs it made."""
    with TemporaryDirectory(prefix="oledsim-") as directory:
        keys = {
            "trace": traces,
            "policy": policies,
            "cache.slots_per_layer": sizes,
            "hardware.h2d_bytes_per_s": BANDWIDTHS,
            "hardware": [HARDWARE],
            "shape": [SHAPE],
            "hydra.launcher.n_jobs": [-1 if jobs is None else jobs],
            "output.dir": [directory],
        }
        command = [f"{key}={','.join(map(str, values))}" for key, values in keys.items()]
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "experiments.simulate_command", "-m", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        taken_s = time.perf_counter() - start
        if done.returncode:
            raise ConfigError(f"sweep: {done.stderr.splitlines()[-1]}")
        return taken_s, pl.read_parquet(Path(directory) / "sweep.parquet", columns=["run"]).height


def sweep_as_text(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    whole_s, num_runs = report["whole_s"], report["num_runs"]
    sizes, rates = len(report["slots_per_layer"]), len(report["h2d_bytes_per_s"])
    lines = [
        f"{len(report['policies'])} policies x {sizes} sizes x {rates} bandwidths x {len(report['traces'])} traces, "
        f"{num_runs} runs in {report['num_processes']} processes:",
        f"**{whole_s:.1f} s**, {1e3 * whole_s / num_runs:.0f} ms a run; held to {report['budget_s']:.0f} s"
        + (" on the default grid." if whole_s <= report["budget_s"] else ": **missed**."),
        "",
        "| policy | first run, compiling where needed, s | its part alone, s |",
        "|---|---:|---:|",
        *(f"| {name} | {row['first_s']:.1f} | {row['alone_s']:.1f} |" for name, row in report["policies"].items()),
    ]
    return "\n".join(lines)
