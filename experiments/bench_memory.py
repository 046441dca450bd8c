"""Memory and time of simulating a trace that is larger than memory should be, each run in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.errors import ConfigError
from tracer.schema import Pass
from tracer.shipped import find_trace
from tracer.store import TraceReader, TraceWriter

TRACE = "proxy-19x256-code"
HARDWARE, SHAPE = "rtx5090", "llada2.0-mini"
BUDGET_BYTES = 600 * 10**6  # what we hold the peak of a process to
_MEASURE = """
import json, resource, sys, time
from experiments import simulate
trace, policy, slots, hardware, shape, output = sys.argv[1:]
start = time.perf_counter()
result = simulate(trace, policy, int(slots), hardware, shape=shape, output=output)
seconds = time.perf_counter() - start
unit = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "num_forwards": result.forwards.height}))
"""


def repeated(reader: TraceReader, times: int) -> Iterator[Pass]:
    """The passes of a trace one time after another, each time as requests of their own.

    Gates are drawn anew, uniform and normalised, so that a file of them cannot be compressed.
    """
    rng = np.random.default_rng(0)
    for nth in range(times):
        for pass_ in reader.passes():
            gates = rng.random(pass_.gates.shape, np.float32) + np.float32(0.1)
            yield replace(
                pass_,
                pass_id=pass_.pass_id + nth * reader.num_passes,
                requests=pass_.requests + nth * reader.num_requests,
                gates=(gates / gates.sum(axis=-1, keepdims=True)).astype(np.float64),
            )


def write_repeated(trace: str, path: Path, num_bytes: int) -> int:
    """Write a trace of about `num_bytes` that repeats another one; returns how many it has."""
    reader = TraceReader(find_trace(trace))
    once = path.with_name("once.trace")
    _write(reader, once, 1)
    times = -(-num_bytes // _size(once))
    _write(reader, path, times)
    return _size(path)


def measure_memory(num_bytes: int, trace: str, policy: str, slots: int) -> dict[str, Any]:
    """Simulate a trace as it is and repeated to `num_bytes`, with files, after a run that compiles what is needed.

    Args:
        num_bytes: of the large trace.
        trace: name or path of the one that is repeated.
        policy: registered name.
        slots: of each layer.

    Raises:
        ConfigError: a run failed.
    """
    with TemporaryDirectory(prefix="oledsim-") as directory:
        path = Path(directory) / "large.trace"
        large_bytes = write_repeated(trace, path, num_bytes)
        small = find_trace(trace)
        runs = {}
        for name, of in (("compiling", small), ("small", small), ("large", path)):
            runs[name] = _run(of, policy, slots, Path(directory) / name)
    runs["small"]["trace_bytes"], runs["large"]["trace_bytes"] = _size(small), large_bytes
    return {
        "trace": trace,
        "policy": policy,
        "slots_per_layer": slots,
        "num_layers": TraceReader(small).metadata.shape.num_layers,
        "runs": [runs["small"], runs["large"]],
        "budget_bytes": BUDGET_BYTES,
    }


def memory_as_text(report: Mapping[str, Any]) -> str:
    """What was measured as Markdown."""
    lines = [
        f"`{report['policy']}`, {report['slots_per_layer']} slots a layer, on `{report['trace']}` as it is and repeated; files",
        f"are written. The peak of a process is held to {report['budget_bytes'] / 1e6:.0f} MB.",
        "",
        "| trace, MB | forwards | layer executions | time, s | layer executions a second | peak memory, MB |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for run in report["runs"]:
        steps = run["num_forwards"] * report["num_layers"]
        mark = " **missed**" if run["peak_bytes"] > report["budget_bytes"] else ""
        lines.append(
            f"| {run['trace_bytes'] / 1e6:.0f} | {run['num_forwards']} | {steps} | {run['seconds']:.1f} | "
            f"{steps / run['seconds']:.0f} | {run['peak_bytes'] / 1e6:.0f}{mark} |"
        )
    return "\n".join(lines)


def _write(reader: TraceReader, path: Path, times: int) -> None:
    metadata = replace(reader.metadata, gate_dtype="float32", source="synthetic:repeated")
    bar = tqdm(total=times * reader.num_passes, unit="forward", desc=path.stem, disable=None)
    with bar, TraceWriter(path, metadata) as writer:
        for pass_ in repeated(reader, times):
            writer.write(pass_)
            bar.update()


def _size(trace: Path) -> int:
    return sum(file.stat().st_size for file in trace.iterdir())


def _run(trace: Path, policy: str, slots: int, output: Path) -> dict[str, Any]:
    arguments = [str(trace), policy, str(slots), HARDWARE, SHAPE, str(output)]
    done = subprocess.run([sys.executable, "-c", _MEASURE, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"memory: {done.stderr.splitlines()[-1]}")
    return json.loads(done.stdout)
