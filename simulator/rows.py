"""Room for the layer executions that compiled loops write, and the tables that are cut from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from policies.log import FORWARD_COLUMNS, FORWARD_LISTS, LAYER_COLUMNS, LAYER_LISTS, PREFETCH_COUNTS, Ragged, Table
from policies.pool import number_in_pool, pool_of
from tracer.schema import ModelShape, Pass

# Rows of Rows.numbers: columns of the log, and two that only decisions without a clock have
NUMBERS = ("capacity", "num_resident", "num_activated", "hit_tokens", "num_promoted", "num_staying", "num_freed")
CAPACITY, NUM_RESIDENT, NUM_ACTIVATED, HIT_TOKENS, NUM_PROMOTED, NUM_STAYING, NUM_FREED = range(len(NUMBERS))
# Rows of Rows.times
TIMES = tuple(name for name in LAYER_COLUMNS if name.endswith("_ns"))
START, PLAN, HITS_END, CPU_END, END, LINK_BUSY = range(len(TIMES))
# Rows of Rows.offsets, and the columns that each is of
COLUMNS_OF_LISTS = (
    ("hits",),
    ("transfers", "transfer_loads", "transfer_retained", "transfer_start_ns", "transfer_end_ns"),
    ("on_cpu", "cpu_loads"),
    ("retained",),
    ("prefetch_layers", "prefetch_experts"),
)
HITS, TRANSFERS, ON_CPU, RETAINED, PREFETCHES = range(len(COLUMNS_OF_LISTS))
_TYPES = {**LAYER_LISTS, "transfer_retained": np.bool_}


class Rows(NamedTuple):
    """Layer executions in order, R of which there is room for; row `size[0]` is the one that is being written.

    The list columns of the log that begin and end together have their offsets in one row of `offsets`.
    """

    size: NDArray[np.int64]  # [1] rows that are complete
    numbers: NDArray[np.int32]  # [len(NUMBERS), R]
    times: NDArray[np.int64]  # [len(TIMES), R]
    counts: NDArray[np.int32]  # [len(PREFETCH_COUNTS), R]
    offsets: NDArray[np.int64]  # [len(LISTS), R + 1]
    hits: NDArray[np.int32]
    transfers: NDArray[np.int32]
    transfer_loads: NDArray[np.int32]
    transfer_retained: NDArray[np.bool_]
    transfer_start_ns: NDArray[np.int64]
    transfer_end_ns: NDArray[np.int64]
    on_cpu: NDArray[np.int32]
    cpu_loads: NDArray[np.int32]
    retained: NDArray[np.int32]
    prefetch_layers: NDArray[np.int32]
    prefetch_experts: NDArray[np.int32]


@jit
def write_decision(rows, step, view, plan, transfers):
    """Write what was found at a gate, and the plan, into the row that is being written; times and counts are not.

    Args:
        rows: Rows with room for another.
        step: at the gate.
        view: at the gate.
        plan: that keeps to the contract.
        transfers: those of the plan, in the order in which the log has them.
    """
    layer, load, row = step.layer, step.load, rows.size[0]
    num_experts, resident = load.size, view.resident[layer]
    offsets, numbers, retained, prefetches = rows.offsets, rows.numbers, plan.retained, plan.prefetches
    num_resident = num_activated = hit_tokens = 0
    for expert in range(num_experts):
        num_resident += resident[expert]
        num_activated += load[expert] > 0
        hit_tokens += load[expert] * resident[expert]
    ids, end = rows.hits, offsets[HITS, row]
    for expert in range(num_experts):
        ids[end] = expert
        end += (load[expert] > 0) & resident[expert]  # a branch would be guessed wrongly often
    offsets[HITS, row + 1] = end

    numbers[CAPACITY, row] = view.capacity[pool_of(view.capacity, layer)]
    numbers[NUM_RESIDENT, row] = num_resident
    numbers[NUM_ACTIVATED, row] = num_activated
    numbers[HIT_TOKENS, row] = hit_tokens
    numbers[NUM_PROMOTED, row] = 0

    ids, loads, stay, end = rows.transfers, rows.transfer_loads, rows.transfer_retained, offsets[TRANSFERS, row]
    start = number_in_pool(view.capacity, num_experts, layer, 0)
    for expert in transfers:
        ids[end] = expert
        loads[end] = load[expert]
        stay[end] = retained[start + expert]
        end += 1
    offsets[TRANSFERS, row + 1] = end

    ids, loads, first = rows.on_cpu, rows.cpu_loads, offsets[ON_CPU, row]
    end = first
    for expert in plan.on_cpu:
        place = end
        while place > first and ids[place - 1] > expert:
            ids[place] = ids[place - 1]
            place -= 1
        ids[place] = expert
        end += 1
    for place in range(first, end):
        loads[place] = load[ids[place]]
    offsets[ON_CPU, row + 1] = end

    ids, end = rows.retained, offsets[RETAINED, row]
    for number in range(retained.size):
        ids[end] = number
        end += retained[number]
    offsets[RETAINED, row + 1] = end

    layers, ids, end = rows.prefetch_layers, rows.prefetch_experts, offsets[PREFETCHES, row]
    for index in range(prefetches.shape[0]):
        layers[end] = prefetches[index, 0]
        ids[end] = prefetches[index, 1]
        end += 1
    offsets[PREFETCHES, row + 1] = end


_AHEAD = 16  # forwards for which room is made at once


class RowBuffer:
    """Rows that grow before each forward, and are cut off as stretches of whole forwards.

    Args:
        shape: of the passes.
        pool_size: experts of a pool, E or L * E.
        prefetches: plans may name prefetches; only then the rows have times and counts as well.
    """

    def __init__(self, shape: ModelShape, pool_size: int, prefetches: bool) -> None:
        num_layers, num_experts = shape.num_layers, shape.num_experts
        self._num_layers, self._is_timed = num_layers, prefetches
        # most of one layer execution, for each of COLUMNS_OF_LISTS
        most = (num_experts, num_experts, num_experts, pool_size, num_layers * num_experts if prefetches else 0)
        self._most = np.array(most) * num_layers + 1  # loops write one value further than a list is long
        self._rows = _room(2 * _AHEAD * num_layers, 2 * _AHEAD * self._most, self._is_timed)
        self._num_sure = 0  # forwards for which there is room, whatever they need

    def reserve(self) -> Rows:
        """The rows, with room for one more forward."""
        if self._num_sure == 0:
            rows = self._rows
            size, room = int(rows.size[0]), rows.numbers.shape[1]
            ends = rows.offsets[:, size]
            lengths = np.array([getattr(rows, columns[0]).size for columns in COLUMNS_OF_LISTS])
            needed, needed_rows = ends + _AHEAD * self._most, size + _AHEAD * self._num_layers
            if needed_rows > room or (needed > lengths).any():
                lengths = np.where(needed > lengths, 2 * needed, lengths)
                self._rows = _room(2 * needed_rows, lengths, self._is_timed)
                for written, copied in zip(_written(rows), _written(self._rows, size, ends), strict=True):
                    copied[...] = written
            self._num_sure = _AHEAD
        self._num_sure -= 1
        return self._rows

    @property
    def num_forwards(self) -> int:
        """Forwards that were written since the last cut."""
        return int(self._rows.size[0]) // self._num_layers

    def cut(self) -> Rows:
        """The rows so far, without room for more; the buffer is empty afterwards."""
        cut = Rows(*(written.copy() for written in _written(self._rows)))
        self._rows.counts[:, : int(self._rows.size[0])] = 0
        self._rows.size[0] = 0
        self._num_sure = 0
        return cut


def _written(rows: Rows, size: int | None = None, ends: NDArray[np.int64] | None = None) -> Iterator[NDArray[Any]]:
    """The part of each array that the first `size` rows take, whose lists end at `ends`; as `rows` say without."""
    size = int(rows.size[0]) if size is None else size
    ends = rows.offsets[:, size] if ends is None else ends
    yield rows.size
    for array in (rows.numbers, rows.times, rows.counts):
        yield array[:, :size]
    yield rows.offsets[:, : size + 1]
    for columns, end in zip(COLUMNS_OF_LISTS, ends.tolist(), strict=True):
        for name in columns:
            yield getattr(rows, name)[:end]


def _room(num_rows: int, lengths: NDArray[np.int64], is_timed: bool) -> Rows:
    num_timed = num_rows if is_timed else 0
    lists: dict[str, Any] = {
        name: np.zeros(length if is_timed or not name.endswith("_ns") else 0, _TYPES[name])
        for columns, length in zip(COLUMNS_OF_LISTS, lengths.tolist(), strict=True)
        for name in columns
    }
    return Rows(
        size=np.zeros(1, np.int64),
        numbers=np.zeros((len(NUMBERS), num_rows), np.int32),
        times=np.zeros((len(TIMES), num_timed), np.int64),
        counts=np.zeros((len(PREFETCH_COUNTS), num_timed), np.int32),
        offsets=np.zeros((len(COLUMNS_OF_LISTS), num_rows + 1), np.int64),
        **lists,
    )


class Said(NamedTuple):
    """What the log says of a pass itself, without its tokens and routes, which take thousands of times the memory."""

    pass_id: int
    kind: int
    requests: NDArray[np.int64]  # [R]
    blocks: NDArray[np.int64]  # [R]
    iterations: NDArray[np.int64]  # [R]
    num_tokens: NDArray[np.int64]  # [R]
    kv_lens: NDArray[np.int64]  # [R]
    num_accepted: NDArray[np.int64]  # [R]

    @classmethod
    def of(cls, pass_: Pass) -> Said:
        """What is said of a pass."""
        return cls(
            pass_.pass_id,
            int(pass_.kind),
            pass_.requests,
            pass_.blocks,
            pass_.iterations,
            pass_.num_tokens,
            pass_.kv_lens,
            pass_.num_accepted,
        )


@dataclass(frozen=True, eq=False)
class Forwards:
    """What the log says of a stretch of whole forwards before anything is timed. F forwards."""

    scalars: Mapping[str, NDArray[Any]]  # [F] forward, pass_id, request, kind, num_tokens, kv_len
    lists: Mapping[str, Ragged]  # FORWARD_LISTS

    @classmethod
    def of(cls, passes: Sequence[Said | Pass], first: int) -> Forwards:
        """What is said of these passes, at least one; the first is the run's `first`-th, from 0."""
        offsets = np.cumsum([0, *(pass_.requests.size for pass_ in passes)])

        def joined(name: str, kind: type = np.int64) -> NDArray[Any]:
            return np.concatenate([getattr(pass_, name) for pass_ in passes]).astype(kind)

        scalars = {
            "forward": first + np.arange(len(passes)),
            "pass_id": np.array([pass_.pass_id for pass_ in passes], np.int64),
            "request": np.minimum.reduceat(joined("requests"), offsets[:-1]),
            "kind": np.array([int(pass_.kind) for pass_ in passes]),
            "num_tokens": np.add.reduceat(joined("num_tokens"), offsets[:-1]),
            "kv_len": np.add.reduceat(joined("kv_lens"), offsets[:-1]),
        }
        names = {"requests": "requests", "blocks": "blocks", "iterations": "iterations", "accepted": "num_accepted"}
        lists = {name: Ragged(offsets, joined(names[name], kind)) for name, kind in FORWARD_LISTS.items()}
        return cls({name: array.astype(LAYER_COLUMNS[name]) for name, array in scalars.items()}, lists)

    def table(self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> Table:
        """The forward table of the log, from when each forward starts and ends, [F]."""
        scalars = {**self.scalars, "start_ns": start_ns, "end_ns": end_ns}
        return Table({name: scalars[name] for name in FORWARD_COLUMNS}, self.lists)


def decided(forwards: Forwards, rows: Rows) -> Table:
    """What was decided in these forwards, all of them in `rows`: the layer table of the log as far as it is not timed."""
    num_rows, num_forwards = rows.numbers.shape[1], len(forwards.scalars["forward"])
    num_layers = num_rows // num_forwards
    scalars = {name: np.repeat(values, num_layers) for name, values in forwards.scalars.items()}
    scalars["layer"] = np.tile(np.arange(num_layers, dtype=np.int32), num_forwards)
    scalars |= {name: column for name, column in zip(NUMBERS, rows.numbers, strict=True) if name in LAYER_COLUMNS}
    lists = {
        name: Ragged(offsets, getattr(rows, name))
        for columns, offsets in zip(COLUMNS_OF_LISTS, rows.offsets, strict=True)
        for name in columns
        if name in LAYER_LISTS and not name.endswith("_ns")
    }
    return Table(scalars, lists)


def timed(
    layers: Table,
    times: NDArray[np.int64],
    counts: NDArray[np.int32],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> Table:
    """The layer table of the log.

    Args:
        layers: as `decided` makes it.
        times: [len(TIMES), rows]
        counts: [len(PREFETCH_COUNTS), rows]
        starts: of all transfers.
        ends: of all transfers.
    """
    scalars = {
        **layers.scalars,
        **dict(zip(TIMES, times, strict=True)),
        **dict(zip(PREFETCH_COUNTS, counts, strict=True)),
    }
    offsets = layers.lists["transfers"].offsets
    lists = {
        **layers.lists,
        "transfer_start_ns": Ragged(offsets, starts),
        "transfer_end_ns": Ragged(offsets, ends),
    }
    return Table({name: scalars[name] for name in LAYER_COLUMNS}, {name: lists[name] for name in LAYER_LISTS})
