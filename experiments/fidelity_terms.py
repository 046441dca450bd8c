"""Which part of a layer is off: what each takes in a simulated run and in its replays, so that a cause can be named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from experiments.columns import Column, markdown
from experiments.compare_log import read_layers
from experiments.files import RESULT
from policies.log import LogChunk, Ragged, Table

# us, means over layer executions
PARTS = {
    "gate": "from the layer's start until the plan acts: N, gate_sync and P",
    "hits": "kernel over the hits, where there are any",
    "lead": "from the plan to the start of its first copy, where that copy is not a promoted prefetch",
    "copy": "one copy of a plan",
    "cpu": "from the plan until the CPU's results are back, where it has experts",
    "close": "from the last of hits, copies and CPU to the layer's end: the last chunk's kernel, and the sum over experts",
    "layer": "all of it",
    "tail": "from the last layer to the forward's end",
}


def terms_of(simulated: Path, replays: Sequence[LogChunk]) -> dict[str, Any]:
    """Each of PARTS, `simulated` and `measured`, of a run's directory and of the logs of its replays; None where none is."""
    ends = pl.read_parquet(simulated / RESULT, columns=["end_ns"])["end_ns"].to_numpy()
    ours = _parts(read_layers(simulated, 0, len(ends)), ends)
    theirs = [_parts(chunk.layers, chunk.forwards.scalars["end_ns"]) for chunk in replays]
    found: dict[str, Any] = {}
    for name in PARTS:
        measured = [value for parts in theirs if (value := parts[name]) is not None]
        found[f"{name}_simulated_us"] = ours[name]
        found[f"{name}_measured_us"] = float(np.mean(measured)) if measured else None
    return found


def _parts(layers: Table, forward_ends: NDArray[np.int64]) -> dict[str, float | None]:
    scalars, lists = layers.scalars, layers.lists
    start, plan, end = (scalars[name] for name in ("start_ns", "plan_ns", "end_ns"))
    starts, ends = lists["transfer_start_ns"], lists["transfer_end_ns"]
    row = np.repeat(np.arange(len(plan)), starts.lengths())
    is_demand = starts.values >= plan[row]  # a promoted prefetch started before
    first = np.flatnonzero(starts.lengths())
    first_ns = starts.values[starts.offsets[first]]
    lead_ns = (first_ns - plan[first])[first_ns >= plan[first]]
    last_ns = np.maximum(scalars["hits_end_ns"], scalars["cpu_end_ns"])
    last_ns[first] = np.maximum(last_ns[first], ends.values[ends.offsets[first + 1] - 1])
    num_layers = len(plan) // len(forward_ends)
    return {
        "gate": _mean_us(plan - start),
        "hits": _mean_us((scalars["hits_end_ns"] - plan)[_any(lists["hits"])]),
        "lead": _mean_us(lead_ns),
        "copy": _mean_us((ends.values - starts.values)[is_demand]),
        "cpu": _mean_us((scalars["cpu_end_ns"] - plan)[_any(lists["on_cpu"])]),
        "close": _mean_us(end - last_ns),
        "layer": _mean_us(end - start),
        "tail": _mean_us(forward_ends - end[num_layers - 1 :: num_layers]),
    }


def terms_as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Simulated and measured times of each part, us, and below what the parts are."""
    cells = Column(("cell", ""), [row["cell"] for row in rows], is_text=True)
    table = markdown(cells, *(Column((name, ""), [_shown(row, name) for row in rows]) for name in PARTS))
    legend = [f"- {name}: {meaning}" for name, meaning in PARTS.items()]
    intro = "Mean times in us, simulated / measured (mean over repeats), over all forwards."
    return "\n".join([intro, "", table, "", *legend]) + "\n"


def _shown(row: Mapping[str, Any], name: str) -> str:
    pair = row[f"{name}_simulated_us"], row[f"{name}_measured_us"]
    return " / ".join("-" if value is None else f"{value:.1f}" for value in pair)


def _any(column: Ragged) -> NDArray[np.bool_]:
    return column.lengths() > 0


def _mean_us(times_ns: NDArray[np.int64]) -> float | None:
    return float(times_ns.mean()) / 1000 if times_ns.size else None
