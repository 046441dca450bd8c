"""Stand-ins for replays: results of simulated runs whose times are changed in a known way and said to be measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from commands import ROW
from numpy.typing import NDArray

from experiments.compare_runs import Ran, ran

CONDITIONS = {
    "engine": "replay",
    "mode": "closed",
    "device": "cpu",
    "machine": "a machine of tests",
    "is_pinned": True,
    "cpu_kernel": "onednn",
    "num_distinct_experts": 192,
}
PROFILE = {"name": "rtx5090", "h2d_latency_ns": 5000, "h2d_bytes_per_s": 55e9, "assumed": []}


def made(
    policy: str,
    times_ms: list[float],
    *,
    replay: bool = False,
    slots: int | None = 16,
    bytes_per_s: float = 55e9,
    factor: int | None = None,
    num_hits: int = 50,
    late: int = 0,
    unserved: int = 0,
    issued: int = 0,
    name: str = "made",
    **facts: Any,
) -> Ran:
    """A run of one request with these times of forwards, each of which activates 100 experts and accepts a position.

    A prefill that took 1 ms comes before.
    """
    count = len(times_ms)
    forwards = pl.DataFrame(
        {
            "pass_id": np.arange(count + 1),
            "kind": ["prefill", *["denoise"] * count],
            "warmup": [False] * (count + 1),
            "requests": [[0]] * (count + 1),
            "num_accepted": [0] + [1] * count,
            "num_activated": [100] * (count + 1),
            "time_ns": np.array([1_000_000, *(round(1e6 * ms) for ms in times_ms)]),
            "num_hits": [num_hits] * (count + 1),
            "prefetch_issued": [issued] * (count + 1),
            "prefetch_started": [issued] * (count + 1),
            "prefetch_late": [late] * (count + 1),
            "prefetch_unserved": [unserved] * (count + 1),
        }
    )
    size = {"slots_per_layer": slots or 0, "sized": slots is not None}
    made_as = CONDITIONS if replay else {"engine": "compiled"}
    summary = {**ROW, "policy": policy, **size, **made_as, "h2d_bytes_factor": factor, **facts}
    manifest = {"seed": 0, "config": {"staging_slots": None}, "profile": {**PROFILE, "h2d_bytes_per_s": bytes_per_s}}
    return ran(name, summary, manifest, forwards)


def measure(simulated: Path, output: Path, slower: Callable[[NDArray[np.int64]], NDArray[Any]], **summary: Any) -> Path:
    """Copy a simulated run as a replay in which every time is that function of what it was.

    Args:
        simulated: directory of a run with its decision log.
        output: directory to make.
        slower: from times to times, ascending.
        summary: values over those of the run and CONDITIONS. Where bytes are copied several times, the link is as much
            faster than the simulated one.
    """
    output.mkdir(parents=True)
    old = json.loads((simulated / "summary.json").read_text())
    (output / "summary.json").write_text(json.dumps({**old, **CONDITIONS, **summary}))
    manifest = json.loads((simulated / "manifest.json").read_text())
    manifest["profile"]["h2d_bytes_per_s"] *= summary.get("h2d_bytes_factor", 1)
    (output / "manifest.json").write_text(json.dumps(manifest))

    def changed(values: pl.Series) -> pl.Series:
        if values.dtype == pl.List:
            inner = values.explode().drop_nulls()
            lengths = values.list.len()
            flat = pl.Series(values=slower(inner.to_numpy()).round().astype(np.int64))
            groups = pl.DataFrame({"row": np.repeat(np.arange(len(values)), lengths.to_numpy()), "value": flat})
            lists = groups.group_by("row", maintain_order=True).agg("value")
            rows = pl.DataFrame({"row": np.arange(len(values))}).join(lists, on="row", how="left")
            return rows["value"].fill_null([]).alias(values.name)
        return pl.Series(values.name, slower(values.to_numpy()).round().astype(np.int64))

    forwards = pl.read_parquet(simulated / "result.parquet")
    forwards = forwards.with_columns(changed(forwards["start_ns"]), changed(forwards["end_ns"]))
    forwards.with_columns(time_ns=pl.col("end_ns") - pl.col("start_ns")).write_parquet(output / "result.parquet")
    layers = pl.read_parquet(simulated / "decisions.parquet")
    times = [name for name in layers.columns if name.endswith("_ns") and name != "link_busy_ns"]
    layers.with_columns(changed(layers[name]) for name in times).write_parquet(output / "decisions.parquet")
    return output
