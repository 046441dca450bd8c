"""A cell's simulated and measured run in one Perfetto trace: the same tracks twice, forward by forward on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import BinaryIO

import polars as pl

from experiments.compare_log import read_layers
from experiments.compare_pairs import Pair
from experiments.compare_runs import Ran
from experiments.errors import ConfigError
from experiments.files import RESULT
from experiments.timeline import FORWARDS, Window
from experiments.timeline_packets import TraceWriter
from experiments.timeline_slices import Execution, Slice, demand_slices, executions


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
    replayed = pair.repeats[0]
    first, stop = _window(pair, window)
    runs = [_Run(run, first, stop) for run in (pair.simulated, replayed)]
    writer = TraceWriter(file)
    tracks = [_Tracks(writer, f"{kind}: {pair.name}", rank) for rank, kind in enumerate(("simulated", "measured"))]
    ahead = writer.counter("layer, simulated less measured", writer.track("difference", 0, 2), 0, "ns")
    now_ns = 0
    for of_forward in zip(*runs, strict=True):
        for (start_ns, end_ns, layers), track in zip(of_forward, tracks, strict=True):
            track.write(layers, now_ns - start_ns, end_ns)
        simulated, measured = (layers for _, _, layers in of_forward)
        for a, b in zip(simulated, measured, strict=True):
            difference_ns = (a.end_ns - a.start_ns) - (b.end_ns - b.start_ns)
            writer.count(ahead, now_ns + a.start_ns - of_forward[0][0], difference_ns)
        now_ns += max(end_ns - start_ns for start_ns, end_ns, _ in of_forward)
    return stop - first


class _Run:
    """Forwards of a run within a window: start, end and layers of each."""

    def __init__(self, run: Ran, first: int, stop: int) -> None:
        if run.directory is None:
            raise ConfigError(f"{run.name}: its decision log is not kept here; give the directory of the run itself")
        times = pl.read_parquet(run.directory / RESULT, columns=["start_ns", "end_ns"])[first:stop]
        self._times = list(times.iter_rows())
        self._layers = executions(read_layers(run.directory, first, stop))

    def __iter__(self) -> Iterator[tuple[int, int, list[Execution]]]:
        of_forwards = groupby(self._layers, attrgetter("forward"))
        for (start_ns, end_ns), (_, layers) in zip(self._times, of_forwards, strict=True):
            yield start_ns, end_ns, list(layers)


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
    """The tracks of one run; slices that measured times let overlap begin when the one before has ended."""

    def __init__(self, writer: TraceWriter, name: str, rank: int) -> None:
        root = writer.track(name, 0, rank)
        self._writer = writer
        self._forwards = writer.track("forwards", root, 0)
        self._gpu = writer.track("GPU stream", root, 1)
        self._demand = writer.track("H2D engine", root, 2)
        self._cpu = writer.track("CPU pool", root, 3)
        self._missed = writer.counter("missed experts", root, 4, "experts")

    def write(self, layers: Sequence[Execution], shift_ns: int, end_ns: int) -> None:
        """Write one forward, `shift_ns` later than its run had it; it ended at `end_ns` there."""
        first = layers[0]
        about = {"forward": first.forward, "tokens": first.num_tokens, "kv_len": first.kv_len}
        self._writer.begin(self._forwards, first.start_ns + shift_ns, f"forward {first.forward}", about)
        self._put(self._forwards, (_layer_slice(row) for row in layers), shift_ns)
        self._writer.end(self._forwards, end_ns + shift_ns)
        of_gpu = [one for row in layers for one in _gpu_slices(row)]
        self._put(self._gpu, [*of_gpu, Slice(layers[-1].end_ns, end_ns, "tail", {})], shift_ns)
        self._put(self._demand, (one for row in layers for one in _copies(row, first.start_ns)), shift_ns)
        self._put(self._cpu, (one for row in layers for one in _cpu_slices(row)), shift_ns)
        for row in layers:
            self._writer.count(self._missed, row.start_ns + shift_ns, row.num_activated - len(row.hits))

    def _put(self, track: int, slices: Iterable[Slice], shift_ns: int) -> None:
        last_ns = 0
        for start_ns, end_ns, name, arguments in sorted(slices, key=lambda one: one.start_ns):
            begin_ns = max(start_ns + shift_ns, last_ns)
            if end_ns + shift_ns > begin_ns:
                last_ns = end_ns + shift_ns
                self._writer.begin(track, begin_ns, name, arguments)
                self._writer.end(track, last_ns)


def _layer_slice(row: Execution) -> Slice:
    about: dict[str, int | str] = {
        "activated": row.num_activated,
        "missed": row.num_activated - len(row.hits),
        "on_cpu": len(row.on_cpu),
        "resident": row.num_resident,
        "capacity": row.capacity,
    }
    return Slice(row.start_ns, row.end_ns, f"layer {row.layer}", about)


def _gpu_slices(row: Execution) -> Iterator[Slice]:
    """Up to the plan, the kernel over the hits, and the rest: kernels over chunks, and waiting for copies or the CPU."""
    layer: dict[str, int | str] = {"layer": row.layer}
    yield Slice(row.start_ns, row.plan_ns, "non-expert part, gate and policy", layer)
    hits = {**layer, "experts": len(row.hits), "tokens": row.hit_tokens}
    yield Slice(row.plan_ns, row.hits_end_ns, "hits", hits)
    yield Slice(row.hits_end_ns, row.end_ns, "misses", layer)


def _copies(row: Execution, start_ns: int) -> Iterator[Slice]:
    """Copies that the layer waits for; of one that began ahead of the forward, at `start_ns`, the part within it."""
    for nth, expert in enumerate(row.transfers[: row.num_promoted]):
        begin_ns = max(row.transfer_start_ns[nth], start_ns)
        about: dict[str, int | str] = {"layer": row.layer, "expert": expert}
        yield Slice(begin_ns, row.transfer_end_ns[nth], f"L{row.layer} E{expert} ahead", about)
    yield from demand_slices(row)


def _cpu_slices(row: Execution) -> Iterator[Slice]:
    """The batch of experts on the CPU, the return of its results included."""
    if row.on_cpu:
        about = {"layer": row.layer, "experts": len(row.on_cpu), "tokens": sum(row.cpu_loads)}
        yield Slice(row.plan_ns, row.cpu_end_ns, "batch and return", about)
