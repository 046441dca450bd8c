"""From an engine's log to one row for each forward: the table that every metric, interval and plot reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from policies.log import PREFETCH_COUNTS, DecisionHash, LogChunk, Ragged, Table
from policies.log_loops import follow_transfers
from tracer.schema import ForwardKind

_MOST_CHUNKS = 64  # of the log that wait to become rows: a frame of each would be slow to read
_JUDGED = "transfers_judged", "transfers_effective"
_KINDS = np.array([kind.name.lower() for kind in ForwardKind], dtype=object)


class Warmup:
    """The first requests of a run, in order of appearance, which are simulated but not counted."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._found: set[int] = set()

    def of(self, forwards: Table) -> tuple[Ragged, NDArray[np.bool_]]:
        """Of the next forwards of the run, which of their requests are warm-up, and which hold any that are."""
        requests = forwards.lists["requests"]
        for request in requests.values.tolist():
            if len(self._found) == self._num_requests:
                break
            self._found.add(request)
        is_warmup = np.isin(requests.values, list(self._found))
        return Ragged(requests.offsets, is_warmup), np.logical_or.reduceat(is_warmup, requests.offsets[:-1])


class ForwardTable:
    """Sums a log, chunk by chunk, into one row for each forward.

    The first `warmup_requests` requests of the run are simulated but not counted; a forward that several requests
    share is counted only if none of them is a warm-up request.

    Args:
        num_layers, num_experts: of the trace.
        policy_ns: charged decision time of one layer.
        is_global: one pool for all layers; capacity then is the pool's.
    """

    def __init__(
        self, num_layers: int, num_experts: int, warmup_requests: int, policy_ns: int, is_global: bool
    ) -> None:
        self._num_layers, self._warmup = num_layers, Warmup(warmup_requests)
        self._policy_ns, self._is_global = policy_ns, is_global
        self._columns: list[dict[str, Any]] = []  # of each chunk not yet in a frame, arrays and lists of lists
        self._frames: list[pl.DataFrame] = []
        # of each layer's last execution
        self._fate = np.zeros((num_layers, num_experts), np.int8)
        self._num_transfers = np.zeros(num_layers, np.int64)
        self._capacity = np.empty((0, num_layers), np.int64)  # of each layer in the last forward, once there is one
        self._hash = DecisionHash()

    def add(self, chunk: LogChunk) -> None:
        """Add the next stretch of whole forwards."""
        layers, forwards = chunk.layers, chunk.forwards
        if not len(forwards):
            return
        request_warmup, warmup = self._warmup.of(forwards)
        self._hash.update(layers, np.repeat(~warmup, self._num_layers))
        scalars, sums = forwards.scalars, self._sums(layers)
        for name in _JUDGED:  # what became of a forward's transfers is known one forward later
            if self._columns:
                self._columns[-1][name][-1] = sums[name][0]
            sums[name] = np.append(sums[name][1:], 0)
        if len(self._columns) == _MOST_CHUNKS:
            self._frames.append(_frame(self._columns))
            self._columns.clear()
        self._columns.append(
            {
                **{name: scalars[name] for name in ("forward", "pass_id", "start_ns", "end_ns")},
                "kind": _KINDS[scalars["kind"]],
                "time_ns": scalars["end_ns"] - scalars["start_ns"],
                "warmup": warmup,
                **sums,
                "num_accepted": _row_sums(forwards.lists["accepted"]),
                **forwards.lists,
                "request_warmup": request_warmup,
            }
        )

    def frame(self) -> pl.DataFrame:
        """The table so far: one row for each forward pass, counts summed over its layers.

        The transfers of the last one are not judged.
        """
        if not self._columns:
            return pl.DataFrame()
        return pl.concat([*self._frames, _frame(self._columns)])

    @property
    def decision_hash(self) -> str:
        """Hash of the decisions of the counted forwards so far."""
        return self._hash.hexdigest()

    def _sums(self, layers: Table) -> dict[str, NDArray[Any]]:
        """Per-forward sums; each forward has one row for each layer, in order."""
        scalars, lists = layers.scalars, layers.lists
        num_hits, num_transfers, num_on_cpu = (lists[name].lengths() for name in ("hits", "transfers", "on_cpu"))
        slots = scalars["capacity"] / self._num_layers if self._is_global else scalars["capacity"].astype(float)
        judged = (slots > 0) & (not self._is_global)
        promoted = scalars["num_promoted"]
        judged_transfers, effective, admitted = self._followed(layers)
        columns = {
            "num_activated": scalars["num_activated"],
            "num_hits": num_hits,
            "routed_tokens": routed_tokens(layers),
            "hit_tokens": scalars["hit_tokens"],
            "num_slots": slots,
            "utilization_sum": np.divide(num_hits, slots, out=np.zeros(len(slots)), where=judged),
            "utilization_layers": judged,
            "num_transfers": num_transfers,
            "num_admitted": admitted,
            "num_promoted": promoted,
            "num_on_cpu": num_on_cpu,
            "num_copies": num_transfers - promoted + scalars["prefetch_started"],
            "transfers_judged": judged_transfers,
            "transfers_effective": effective,
            "link_busy_ns": scalars["link_busy_ns"],
            "cpu_busy_ns": scalars["cpu_end_ns"] - scalars["plan_ns"],
            "exposed_stall_ns": scalars["end_ns"] - scalars["hits_end_ns"],
            "policy_ns": np.full(len(slots), self._policy_ns),
            **{name: scalars[name] for name in PREFETCH_COUNTS},
        }
        # numpy sums whole numbers as int64
        sums = {name: values.reshape(-1, self._num_layers).sum(axis=1) for name, values in columns.items()}
        return sums | {"slots_moved": self._moved(scalars["capacity"].reshape(-1, self._num_layers))}

    def _moved(self, capacity: NDArray[np.int32]) -> NDArray[np.int64]:
        """Slots that other layers have than in the forward before, for each forward; capacity is [forwards, L]."""
        before = np.concatenate([self._capacity if len(self._capacity) else capacity[:1], capacity[:-1]])
        self._capacity = capacity[-1:].astype(np.int64)
        return np.abs(capacity - before).sum(axis=1) // 2

    def _followed(self, layers: Table) -> NDArray[np.int64]:
        """Of each row, [3, rows]: the layer's last transfers, those kept and activated now; and its own that are kept."""
        lists = {name: (column.offsets, column.values) for name, column in layers.lists.items()}
        return follow_transfers(
            layers.scalars["layer"],
            lists["transfers"],
            lists["retained"],
            (lists["hits"], lists["transfers"], lists["on_cpu"]),
            self._is_global,
            self._fate,
            self._num_transfers,
        )


def routed_tokens(layers: Table) -> NDArray[np.int64]:
    """Token and expert pairs of each layer execution, [rows]."""
    lists = layers.lists
    return layers.scalars["hit_tokens"] + _row_sums(lists["transfer_loads"]) + _row_sums(lists["cpu_loads"])


def _row_sums(column: Ragged) -> NDArray[np.int64]:
    sums = np.concatenate([[0], np.cumsum(column.values, dtype=np.int64)])
    return sums[column.offsets[1:]] - sums[column.offsets[:-1]]


def _frame(chunks: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows of successive chunks. Columns of a table are split alike, or whoever reads it makes a copy of all."""
    return pl.DataFrame([_series(name, [columns[name] for columns in chunks]) for name in chunks[0]])


def _series(name: str, parts: list[Any]) -> pl.Series:
    """One column of the table from its parts in order, which are all arrays or all lists of lists."""
    if not isinstance(parts[0], Ragged):
        return pl.Series(name, np.concatenate(parts))
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([part.lengths() for part in parts]))])
    values = pa.array(np.concatenate([part.values for part in parts]))
    return pl.Series(name, pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values))
