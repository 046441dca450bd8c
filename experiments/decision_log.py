"""Decision logs in Parquet, ours or of any other runtime: read, played back as a policy, and compared with a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from policies.contract import Context, Policy, PolicyError
from policies.log import DECIDED, LogChunk, Ragged
from policies.playback import Decisions, Params, playback
from tracer.schema import ModelShape
from tracer.store import TraceReader

SIZED = False  # the log says how many slots there are

_NUMBERS = ("forward", "layer", "capacity")
_PREFETCHES = ("prefetch_layers", "prefetch_experts")  # may be missing, together
_LISTS = tuple(name for name in DECIDED if name not in _PREFETCHES)


@dataclass
class Knobs:
    """Which log, and what it does not say of prefetches."""

    path: str
    """A Parquet file with the columns of decisions.parquet that say what was decided."""
    clear_prefetches: bool = True
    """The prefetches of a plan replace those that are still queued. Ours: prefetchers make their list anew."""
    prefetch_delay_ns: int = 0
    """How long after a plan acts its prefetches are queued. Ours: logs have no column for it."""

    def __post_init__(self) -> None:
        if self.prefetch_delay_ns < 0:
            raise PolicyError(f"prefetch_delay_ns is {self.prefetch_delay_ns}: must be at least 0")


def build(knobs: Knobs, context: Context) -> Policy:
    """The policy that decides as the log says.

    Raises:
        PolicyError: the log cannot be read, or is not of a trace of this shape and length.
    """
    decisions = read_log(Path(knobs.path), context.shape)
    num_forwards = len(decisions) // context.shape.num_layers
    if isinstance(context.passes, TraceReader) and num_forwards > context.passes.num_passes:
        raise PolicyError(
            f"{knobs.path}: holds {num_forwards} forwards, the trace {context.passes.num_passes}: it is not of this trace"
        )
    return playback(decisions, knobs.clear_prefetches, knobs.prefetch_delay_ns)


def read_log(path: Path, shape: ModelShape) -> Decisions:
    """The decisions in a Parquet file: one row for each layer execution, in the order of the run.

    Its columns are `forward` and `layer`, both from 0; `capacity`, slots of the layer or of the one pool; and lists
    of experts: `hits`, `transfers` in issue order, `on_cpu`, `retained`. `prefetch_layers` and `prefetch_experts` may
    be missing, and whatever else there is, is not read.

    Raises:
        PolicyError: it is not such a file, or a row is not of a trace of this shape.
    """
    table = _table(path)
    numbers = {name: _numbers(path, table, name) for name in _NUMBERS}
    empty = Ragged(np.zeros(table.num_rows + 1, np.int64), np.empty(0, np.int64))
    has_columns = any(name in table.column_names for name in _PREFETCHES)
    lists = {name: _lists(path, table, name) for name in (*_LISTS, *(_PREFETCHES if has_columns else ()))}
    lists = {**dict.fromkeys(_PREFETCHES, empty), **lists}
    num_layers, num_experts = shape.num_layers, shape.num_experts
    rows = np.arange(table.num_rows)
    for name, expected in (("forward", rows // num_layers), ("layer", rows % num_layers)):
        wrong = np.flatnonzero(numbers[name] != expected)
        if wrong.size:
            row = int(wrong[0])
            raise PolicyError(
                f"{path}: row {row} is of forward {numbers['forward'][row]}, layer {numbers['layer'][row]}, must be of "
                f"forward {row // num_layers}, layer {row % num_layers}: one row for each of {num_layers} layers, in order"
            )
    if table.num_rows == 0 or table.num_rows % num_layers:
        raise PolicyError(f"{path}: holds {table.num_rows} rows, must be some whole forwards of {num_layers} layers")
    is_global = bool((lists["retained"].values >= num_experts).any())
    within = dict.fromkeys(DECIDED, num_experts) | {"prefetch_layers": num_layers}
    if is_global:
        within["retained"] = num_layers * num_experts
    for name, size in within.items():
        column = lists[name]
        wrong = np.flatnonzero((column.values < 0) | (column.values >= size))
        if wrong.size:
            row = int(np.searchsorted(column.offsets, wrong[0], side="right")) - 1
            raise PolicyError(
                f"{_place(path, table, row, num_layers)}: {name} holds {column.values[wrong[0]]}, allowed are 0 to {size - 1}"
            )
    uneven = np.flatnonzero(lists["prefetch_layers"].lengths() != lists["prefetch_experts"].lengths())
    if uneven.size:
        place = _place(path, table, int(uneven[0]), num_layers)
        raise PolicyError(f"{place}: prefetch_layers and prefetch_experts are of different lengths")
    return Decisions(
        num_layers,
        num_experts,
        "global" if is_global else "layer",
        numbers["capacity"],
        lists,
        lists["prefetch_experts"].values.size > 0,
    )


class Comparison:
    """Counts where a run that plays a log back found other experts resident than the log did.

    Args:
        policy: of the run; one that plays nothing back is never compared.
    """

    def __init__(self, policy: Policy) -> None:
        self._decisions = policy.params.decisions if isinstance(policy.params, Params) else None
        self._num_rows = self._num_different = 0

    def add(self, chunk: LogChunk) -> None:
        """Compare the next stretch of the run."""
        if self._decisions is None:
            return
        hits, logged = chunk.layers.lists["hits"], self._decisions.lists["hits"]
        for row in range(len(hits)):
            self._num_different += not np.array_equal(hits[row], np.sort(logged[self._num_rows + row]))
        self._num_rows += len(hits)

    @property
    def warnings(self) -> list[str]:
        """What the reader of the results should know, if anything."""
        if self._decisions is None or not self._decisions.has_prefetches:
            return []
        return [
            "a log does not say which prefetches were urgent or whom they evicted, so they are queued as listed; at "
            f"{self._num_different} of {self._num_rows} gates other experts were resident than in the log"
        ]


def _table(path: Path) -> pa.Table:
    try:
        with path.open("rb") as file:
            return pq.read_table(file)
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise PolicyError(f"{path}: is not a Parquet file: {' '.join(str(error).split())}") from None


def _column(path: Path, table: pa.Table, name: str) -> Any:
    if name not in table.column_names:
        needed = ", ".join((*_NUMBERS, *_LISTS))
        raise PolicyError(f"{path}: has no column {name}; a decision log needs {needed}, and may have prefetches")
    column = table[name].combine_chunks()
    if column.null_count:
        raise PolicyError(f"{path}: column {name} has empty cells")
    return column


def _numbers(path: Path, table: pa.Table, name: str) -> NDArray[np.int64]:
    column = _column(path, table, name)
    if not pa.types.is_integer(column.type):
        raise PolicyError(f"{path}: column {name} is of {column.type}, must be whole numbers")
    return column.to_numpy(zero_copy_only=False).astype(np.int64)


def _lists(path: Path, table: pa.Table, name: str) -> Ragged:
    column = _column(path, table, name)
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if not is_list or not pa.types.is_integer(column.type.value_type):
        raise PolicyError(f"{path}: column {name} is of {column.type}, must be lists of whole numbers")
    values, offsets = column.flatten(), column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    if values.null_count:
        raise PolicyError(f"{path}: column {name} has empty cells")
    return Ragged(offsets - offsets[0], values.to_numpy(zero_copy_only=False).astype(np.int64))


def _place(path: Path, table: pa.Table, row: int, num_layers: int) -> str:
    request = f"request {table['request'][row]}, " if "request" in table.column_names else ""
    return f"{path}: {request}forward {row // num_layers}, layer {row % num_layers}"
