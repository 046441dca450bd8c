"""Accesses per second of caches that serve experts one by one, beside other simulators of such caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from experiments.bench_others import LibCacheSim, PolicyLang, Timed, installed, missing
from policies.contract import PolicyError
from simulator.stream import accesses, belady_hits, by_layer, lfu_hits, lru_hits
from tracer.schema import ModelShape
from tracer.shipped import find_trace
from tracer.store import TraceReader

HITS = {"LRU": lru_hits, "LFU": lfu_hits, "Belady": belady_hits}
BARS = {"LRU": 5.0, "Belady": 4.0}  # times libcachesim's accesses per second
# of the synthetic stream: LLaDA2.0-mini's routing shape, and what the OLED-MoE paper prints of its forwards
SHAPE = ModelShape(tuple(range(1, 20)), 256, 8, hidden=0, expert_intermediate=0)
ACTIVATED, CHURN = 60, 0.13


def drifting_sets(num_forwards: int, seed: int = 0) -> NDArray[np.bool_]:
    """Experts that forwards activate, [forwards, L, E]: ACTIVATED of each layer, of which CHURN are new each time."""
    rng = np.random.default_rng(seed)
    active = np.zeros((num_forwards, SHAPE.num_layers, SHAPE.num_experts), np.bool_)
    wish = rng.random(active.shape[1:])
    for forward in range(num_forwards):
        best = np.argpartition(-wish, ACTIVATED - 1, axis=1)[:, :ACTIVATED]
        np.put_along_axis(active[forward], best, True, axis=1)
        drawn = rng.random((2, *wish.shape))
        leaves = active[forward] & (drawn[0] < CHURN)
        wish = drawn[1] + np.where(leaves, -1, np.where(active[forward], 1, 0))
    return active


def measure_caches(trace: str, slots: Sequence[int], num_forwards: int, num_repeats: int) -> dict[str, Any]:
    """Time LRU, LFU and Belady over single accesses, ours and others in turn, each with its best of some repeats.

    Both work on one thread. Ours reads an array of int32 in memory, or a Parquet file of one such column; libcachesim
    reads a mapped file of 24 bytes an access, which holds the next uses that we find ourselves. Before anything is
    timed, both must have the same hits.

    Args:
        trace: shipped name or path; beside it stands a synthetic stream.
        slots: of each layer; one cache of all layers has as many for each.
        num_forwards: of the synthetic stream.
        num_repeats: of everything.

    Raises:
        TraceError, PolicyError: there is no such trace, or no cache of a layer has that many slots.
    """
    reader = TraceReader(find_trace(trace))
    shape = reader.metadata.shape
    for size in slots:
        if not 1 <= size <= (most := min(shape.num_experts, SHAPE.num_experts)):
            raise PolicyError(f"slots {size}: must be 1 to {most}, the experts of a layer")
    active = drifting_sets(num_forwards)
    start = perf_counter()
    recorded = accesses(reader, shape)
    read_s = perf_counter() - start
    synthetic = np.flatnonzero(active) % active[0].size
    streams = {"drifting sets": (synthetic.astype(np.int32), SHAPE), reader.path.stem: (recorded, shape)}
    others = {name: installed(name) for name in (LibCacheSim.NAME, PolicyLang.NAME)}
    rows = []
    bar = tqdm(total=len(streams) * 2 * len(slots) * len(HITS), unit="row", disable=None, leave=False)
    with bar, TemporaryDirectory() as directory:
        for name, (stream, of) in streams.items():
            for layout in ("shared", "per layer"):
                place = Path(directory, name, layout)
                place.mkdir(parents=True)
                for row in _measure(stream, of, layout, slots, num_repeats, place):
                    rows.append({"stream": name, **row})
                    bar.update()
    return {
        "streams": {
            name: {"num_accesses": stream.size, "num_layers": of.num_layers, "num_experts": of.num_experts}
            for name, (stream, of) in streams.items()
        },
        "trace": {"name": reader.path.stem, "content_hash": reader.metadata.content_hash, "read_s": read_s},
        "num_repeats": num_repeats,
        "others": others,
        "missing": [missing(name) for name, found in others.items() if found is None],
        "caches": rows,
        "replay": _replay(active[:, 0], slots, num_repeats) if others[PolicyLang.NAME] else [],
    }


def _best_of(num_repeats: int, runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Least seconds of each run over some repeats, every other one of which has them in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(num_repeats):
        for name in list(runs)[:: 1 if repeat % 2 == 0 else -1]:
            seconds[name].append(runs[name]())
    return {name: min(found) for name, found in seconds.items()}


def _seconds(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _measure(
    stream: NDArray[np.int32], shape: ModelShape, layout: str, slots: Sequence[int], num_repeats: int, directory: Path
) -> Iterator[dict[str, Any]]:
    """One row for each size and cache: one for all layers, `shared`, or one for each."""
    is_shared = layout == "shared"
    num_ids = shape.num_experts * (shape.num_layers if is_shared else 1)
    parts = [stream] if is_shared else by_layer(stream, shape)
    file = directory / "stream.parquet"
    pq.write_table(pa.table({"expert": stream}), file, compression="zstd")
    other = LibCacheSim(parts, directory) if installed(LibCacheSim.NAME) else None

    def run(cache: str, capacity: int, parts: Sequence[NDArray[np.int32]]) -> int:
        return sum(HITS[cache](part, num_ids, capacity) for part in parts)

    def read_and_run(cache: str, capacity: int) -> int:
        column = pq.read_table(file, use_threads=False)["expert"].to_numpy()
        return run(cache, capacity, [column] if is_shared else by_layer(column, shape))

    for size, cache in product(slots, HITS):
        capacity = size * (shape.num_layers if is_shared else 1)
        num_hits = run(cache, capacity, parts)
        runs = {
            "ours": partial(_seconds, partial(run, cache, capacity, parts)),
            "with_parquet": partial(_seconds, partial(read_and_run, cache, capacity)),
        }
        if other is not None:
            _require_equal(
                LibCacheSim.NAME, f"{cache}, {layout}, {capacity} slots", num_hits, other.run(cache, capacity)
            )
            runs["libcachesim"] = partial(lambda *given: other.run(*given).seconds, cache, capacity)
        per_s = {f"{name}_per_s": stream.size / best for name, best in _best_of(num_repeats, runs).items()}
        yield {
            "layout": layout,
            "slots": capacity,
            "cache": cache,
            "num_hits": num_hits,
            "hit_ratio": num_hits / stream.size,
            **per_s,
            "ratio": per_s["ours_per_s"] / per_s["libcachesim_per_s"] if other is not None else None,
            "bar": BARS.get(cache),
        }


def _replay(active: NDArray[np.bool_], slots: Sequence[int], num_repeats: int) -> list[dict[str, Any]]:
    """The first layer of the synthetic stream, [forwards, E], as moe-policylang replays it, and ours in its order."""
    other = PolicyLang(active)
    rows = []
    for size, cache in product(slots, HITS):
        run = partial(HITS[cache], other.stream, SHAPE.num_experts, size)
        num_hits, found = run(), other.run(cache, size)
        if cache == "LRU":
            _require_equal(PolicyLang.NAME, f"{cache}, {size} slots", num_hits, found)
        runs = {
            "ours": partial(_seconds, run),
            "policylang": partial(lambda *given: other.run(*given).seconds, cache, size),
        }
        num_accesses = other.stream.size
        rows.append(
            {
                "cache": cache,
                "slots": size,
                "num_accesses": num_accesses,
                "hit_ratio": num_hits / num_accesses,
                "policylang_hit_ratio": found.num_hits / num_accesses,
                **{f"{name}_per_s": num_accesses / best for name, best in _best_of(num_repeats, runs).items()},
            }
        )
    return rows


def _require_equal(name: str, what: str, num_hits: int, found: Timed) -> None:
    if found.num_hits != num_hits:
        raise RuntimeError(f"{what}: {num_hits} hits, {name} has {found.num_hits}")


def caches_as_text(report: Mapping[str, Any]) -> str:
    """What was measured as Markdown, 80 columns wide."""
    machine, trace = report["machine"], report["trace"]
    versions = {**machine["versions"], **{name: found for name, found in report["others"].items() if found}}
    num_read = report["streams"][trace["name"]]["num_accesses"]
    lines = [
        "# Caches of single accesses: millions of accesses per second",
        "",
        f"- processor: {machine['processor']}, {machine['num_cpus']} cores, one used",
        f"- busy: load average {machine['load_average']} at the end",
        *wrap(f"- versions: {', '.join(f'{name} {number}' for name, number in versions.items())}", 80, **_INDENT),
        f"- counted: the best of {report['num_repeats']} repeats, in turn",
    ]
    for name, stream in report["streams"].items():
        size = f"{stream['num_accesses']:,} accesses, {stream['num_layers']} layers of {stream['num_experts']}"
        lines += ["", f"## {name}: {size}", "", *_table(_CACHES, [r for r in report["caches"] if r["stream"] == name])]
    lines += ["", *_NOTES]
    lines += wrap(
        f"Reading all of {trace['name']}, every column with its checks, goes at {num_read / trace['read_s'] / 1e6:.1f}.",
        80,
    )
    if report["replay"]:
        size = f"{report['replay'][0]['num_accesses']:,}"
        lines += [
            "",
            f"## One synthetic layer, {size} accesses, beside moe-policylang",
            "",
            *_table(_REPLAY, report["replay"]),
        ]
        lines += [
            "",
            "Hits are those of one order of each step. Its Belady looks past the rest of the",
            "step, and so is no bound.",
        ]
    return "\n".join([*lines, *(f"\nNot compared: {why}" for why in report["missing"])])


_INDENT: Any = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
_NOTES = (
    "Hits are equal in each row. `ours` reads an array in memory; `+ Parquet` first",
    "reads it from a file of one column, and splits it by layers where each has a",
    "cache; libcachesim reads a mapped file, which holds the next uses for its",
    "Belady, that ours finds within its time. `!` is below the bar.",
)
_CACHES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "slots": lambda row: f"{row['slots']}{' a layer' if row['layout'] == 'per layer' else ''}",
    "cache": lambda row: row["cache"],
    "hits %": lambda row: f"{100 * row['hit_ratio']:.2f}",
    "ours": lambda row: f"{row['ours_per_s'] / 1e6:.0f}",
    "+ Parquet": lambda row: f"{row['with_parquet_per_s'] / 1e6:.0f}",
    "libcachesim": lambda row: "-" if row["ratio"] is None else f"{row['libcachesim_per_s'] / 1e6:.1f}",
    "ratio": lambda row: "-" if row["ratio"] is None else f"{row['ratio']:.1f}{' !' if _is_short(row) else ''}",
    "bar": lambda row: "" if row["bar"] is None else f"{row['bar']:.0f}",
}
_REPLAY: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "slots": lambda row: str(row["slots"]),
    "cache": lambda row: row["cache"],
    "hits %": lambda row: f"{100 * row['hit_ratio']:.2f}",
    "its hits %": lambda row: f"{100 * row['policylang_hit_ratio']:.2f}",
    "ours": lambda row: f"{row['ours_per_s'] / 1e6:.0f}",
    "moe-policylang": lambda row: f"{row['policylang_per_s'] / 1e6:.2f}",
    "ratio": lambda row: f"{row['ours_per_s'] / row['policylang_per_s']:.0f}",
}


def _is_short(row: Mapping[str, Any]) -> bool:
    return row["bar"] is not None and row["ratio"] < row["bar"]


def _table(columns: Mapping[str, Callable[[Mapping[str, Any]], str]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table in Markdown, aligned: text to the left, numbers to the right."""
    cells = {head: [text(row) for row in rows] for head, text in columns.items()}
    widths = {head: max(map(len, (head, *texts))) for head, texts in cells.items()}

    def line(texts: Mapping[str, str]) -> str:
        padded = (
            text.ljust(widths[head]) if head == "cache" else text.rjust(widths[head]) for head, text in texts.items()
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join(
        f":{'-' * (width + 1)}" if head == "cache" else f"{'-' * (width + 1)}:" for head, width in widths.items()
    )
    return [
        line({head: head for head in cells}),
        f"|{rule}|",
        *(line(dict(zip(cells, row, strict=True))) for row in zip(*cells.values(), strict=True)),
    ]
