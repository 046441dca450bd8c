"""A cell's simulated and measured run in one Perfetto trace: the same tracks twice, forward by forward on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import BinaryIO, NamedTuple

import polars as pl

from experiments.compare_log import read_layers
from experiments.compare_pairs import Pair
from experiments.compare_runs import Ran
from experiments.errors import ConfigError
from experiments.files import DECISIONS, forwards_in
from experiments.timeline import FORWARDS, Window
from experiments.timeline_packets import TraceWriter
from experiments.timeline_slices import Execution, Slice, demand_slices, executions, layer_slice


def write_timelines(pair: Pair, file: BinaryIO, window: Window) -> int:
    """Write a stretch of both runs; returns how many forwards.

    Each forward begins at one instant in both, when the slower one has ended the one before. What is drawn stands in
    the logs: kernels over chunks and prefetches that no layer waited for do not, and are not drawn.

    Args:
        pair: whose runs have their directories, with decision logs; of the replay the first repeat is drawn.
        file: open for writing.
        window: which forwards.

    Raises:
        ConfigError: a log is not at hand, or the window holds no forward.
    """
    first, stop = _window(pair, window)
    runs = [_forwards(run, first, stop) for run in (pair.simulated, pair.repeats[0])]
    writer = TraceWriter(file)
    tracks = [_Tracks(writer, f"{kind}: {pair.name}", rank) for rank, kind in enumerate(("simulated", "measured"))]
    ahead = writer.counter("layer, simulated less measured", writer.track("difference", 0, 2), 0, "ns")
    now_ns = 0
    for simulated, measured in zip(*runs, strict=True):
        for forward, of_run in zip((simulated, measured), tracks, strict=True):
            of_run.write(forward, now_ns)
        for a, b in zip(simulated.layers, measured.layers, strict=True):
            difference_ns = (a.end_ns - a.start_ns) - (b.end_ns - b.start_ns)
            writer.count(ahead, now_ns + a.start_ns - simulated.start_ns, difference_ns)
        now_ns += max(simulated.length_ns, measured.length_ns)
    return stop - first


class _Forward(NamedTuple):
    start_ns: int
    end_ns: int
    layers: list[Execution]

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


def _forwards(run: Ran, first: int, stop: int) -> list[_Forward]:
    """Those of a run within a window."""
    if run.directory is None:
        raise ConfigError(f"{run.name}: its decision log is not kept here; give the directory of the run itself")
    times = pl.read_parquet(forwards_in(run.directory), columns=["start_ns", "end_ns"])[first:stop]
    rows = groupby(executions(read_layers(run.directory, first, stop)), attrgetter("forward"))
    layers = [list(of_forward) for _, of_forward in rows]
    if len(layers) != len(times):
        raise ConfigError(
            f"{run.directory}: {DECISIONS} holds {len(layers)} of forwards {first} to {stop - 1}, must hold all of them"
        )
    return [_Forward(*of_forward) for of_forward in zip(times["start_ns"], times["end_ns"], layers, strict=True)]


def _window(pair: Pair, window: Window) -> tuple[int, int]:
    """Its first forward, and the one behind its last."""
    forwards = pair.simulated.forwards
    if window.first is None:
        counted = forwards.with_row_index().filter(~pl.col("warmup") & (pl.col("kind") != "prefill"))["index"]
        first = int(counted[0])
    else:
        first = window.first
    length = FORWARDS if window.length is None else window.length
    if not 0 <= first < forwards.height or length < 1:
        raise ConfigError(
            f"window {first}:{length}: must begin at forward 0 to {forwards.height - 1} of this cell and hold one or more"
        )
    return first, min(first + length, forwards.height)


class _Tracks:
    """The tracks of one run; where measured times overlap by a little, a slice begins when the one before has ended."""

    def __init__(self, writer: TraceWriter, name: str, rank: int) -> None:
        root = writer.track(name, 0, rank)
        self._writer = writer
        self._forwards = writer.track("forwards", root, 0)
        self._gpu = writer.track("GPU stream", root, 1)
        self._link = writer.track("H2D engine", root, 2)
        self._cpu = writer.track("CPU pool", root, 3)
        self._missed = writer.counter("missed experts", root, 4, "experts")

    def write(self, forward: _Forward, now_ns: int) -> None:
        """Write one forward as if it began now."""
        layers = forward.layers
        about = {name: getattr(layers[0], name) for name in ("forward", "num_tokens", "kv_len")}
        self._writer.begin(self._forwards, now_ns, f"forward {layers[0].forward}", about)
        self._put(self._forwards, map(layer_slice, layers), forward, now_ns)
        self._writer.end(self._forwards, now_ns + forward.length_ns)
        tail = Slice(layers[-1].end_ns, forward.end_ns, "tail", {})
        self._put(self._gpu, [*(one for row in layers for one in _gpu_slices(row)), tail], forward, now_ns)
        self._put(self._link, (one for row in layers for one in _copies(row)), forward, now_ns)
        self._put(self._cpu, (one for row in layers for one in _cpu_slices(row)), forward, now_ns)
        for row in layers:
            self._writer.count(self._missed, now_ns + row.start_ns - forward.start_ns, row.num_missed)

    def _put(self, track: int, slices: Iterable[Slice], forward: _Forward, now_ns: int) -> None:
        """Write slices of a forward, as far as they lie within it."""
        last_ns = forward.start_ns
        for one in sorted(slices, key=attrgetter("start_ns")):
            start_ns, end_ns = max(one.start_ns, last_ns), min(one.end_ns, forward.end_ns)
            if end_ns > start_ns:
                last_ns = end_ns
                self._writer.begin(track, now_ns + start_ns - forward.start_ns, one.name, one.arguments)
                self._writer.end(track, now_ns + end_ns - forward.start_ns)


def _gpu_slices(row: Execution) -> Iterator[Slice]:
    """Up to the plan, the kernel over the hits, and the rest: kernels over chunks, and waiting for copies or the CPU."""
    layer: dict[str, int | str] = {"layer": row.layer}
    yield Slice(row.start_ns, row.plan_ns, "non-expert part, gate and policy", layer)
    hits = {**layer, "experts": len(row.hits), "tokens": row.hit_tokens}
    yield Slice(row.plan_ns, row.hits_end_ns, "hits", hits)
    yield Slice(row.hits_end_ns, row.end_ns, "misses", layer)


def _copies(row: Execution) -> Iterator[Slice]:
    """Copies that the layer waits for, those that began ahead as prefetches among them."""
    for expert, start_ns, end_ns in zip(
        row.transfers[: row.num_promoted], row.transfer_start_ns, row.transfer_end_ns, strict=False
    ):
        about: dict[str, int | str] = {"layer": row.layer, "expert": expert}
        yield Slice(start_ns, end_ns, f"L{row.layer} E{expert} ahead", about)
    yield from demand_slices(row)


def _cpu_slices(row: Execution) -> Iterator[Slice]:
    """The batch of experts on the CPU, the return of its results included."""
    if row.on_cpu:
        about: dict[str, int | str] = {"layer": row.layer, "experts": len(row.on_cpu), "tokens": sum(row.cpu_loads)}
        yield Slice(row.plan_ns, row.cpu_end_ns, "batch and return", about)
