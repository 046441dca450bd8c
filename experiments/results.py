"""From an engine's log to one row for each forward: the table that every metric, interval and plot reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from policies.log import PREFETCH_COUNTS, DecisionHash, LogChunk, Ragged, Table
from tracer.schema import ForwardKind


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
        self._num_layers, self._num_experts = num_layers, num_experts
        self._warmup_requests, self._policy_ns, self._is_global = warmup_requests, policy_ns, is_global
        self._seen: dict[int, None] = {}  # requests in order of appearance
        self._frames: list[pl.DataFrame] = []
        nothing = np.zeros((num_layers, num_experts), bool)
        self._last = nothing, nothing  # transfers that were kept, and all, of each layer's last execution
        self._capacity = np.empty((0, num_layers), np.int64)  # of each layer in the last forward, once there is one
        self._hash = DecisionHash()

    def add(self, chunk: LogChunk) -> None:
        """Add the next stretch of whole forwards."""
        layers, forwards = chunk.layers, chunk.forwards
        if not len(forwards):
            return
        requests = forwards.lists["requests"]
        request_warmup = self._request_warmup(requests)
        warmup = np.logical_or.reduceat(request_warmup, requests.offsets[:-1])
        self._hash.update(layers, np.repeat(~warmup, self._num_layers))
        columns: dict[str, Any] = {
            name: forwards.scalars[name] for name in ("forward", "pass_id", "start_ns", "end_ns")
        }
        columns["kind"] = [ForwardKind(kind).name.lower() for kind in forwards.scalars["kind"]]
        columns["time_ns"] = forwards.scalars["end_ns"] - forwards.scalars["start_ns"]
        columns["warmup"] = warmup
        frame = pl.DataFrame(columns | self._sums(layers))
        lists = [_list_series(name, column) for name, column in forwards.lists.items()]
        lists.append(_list_series("request_warmup", Ragged(requests.offsets, request_warmup), pl.Boolean))
        accepted = pl.Series("num_accepted", _row_sums(forwards.lists["accepted"]))
        self._frames.append(frame.with_columns(accepted, *lists))

    def frame(self) -> pl.DataFrame:
        """The table so far: one row for each forward pass, counts summed over its layers."""
        if not self._frames:
            return pl.DataFrame()
        # what became of a forward's transfers is known one forward later; the run's last one is not judged
        judged = [pl.col(name).shift(-1, fill_value=0) for name in ("transfers_judged", "transfers_effective")]
        return pl.concat(self._frames).with_columns(judged)

    @property
    def decision_hash(self) -> str:
        """Hash of the decisions of the counted forwards so far."""
        return self._hash.hexdigest()

    def _request_warmup(self, requests: Ragged) -> NDArray[np.bool_]:
        for request in requests.values.tolist():
            self._seen.setdefault(request)
        first = list(self._seen)[: self._warmup_requests]
        return np.isin(requests.values, first)

    def _sums(self, layers: Table) -> dict[str, NDArray[np.int64] | NDArray[np.float64]]:
        """Per-forward sums; each forward has one row for each layer, in order."""
        scalars, lists = layers.scalars, layers.lists
        num_hits, num_transfers, num_on_cpu = (lists[name].lengths() for name in ("hits", "transfers", "on_cpu"))
        routed = scalars["hit_tokens"] + _row_sums(lists["transfer_loads"]) + _row_sums(lists["cpu_loads"])
        slots = scalars["capacity"] / self._num_layers if self._is_global else scalars["capacity"].astype(float)
        judged = (slots > 0) & (not self._is_global)
        promoted = scalars["num_promoted"]
        effective, transferred, admitted = self._effective(layers)
        columns = {
            "num_activated": scalars["num_activated"].astype(np.int64),
            "num_hits": num_hits,
            "routed_tokens": routed.astype(np.int64),
            "hit_tokens": scalars["hit_tokens"].astype(np.int64),
            "num_slots": slots,
            "utilization_sum": np.divide(num_hits, slots, out=np.zeros(len(slots)), where=judged),
            "utilization_layers": judged.astype(np.int64),
            "num_transfers": num_transfers,
            "num_admitted": admitted,
            "num_promoted": promoted.astype(np.int64),
            "num_on_cpu": num_on_cpu,
            "num_copies": num_transfers - promoted + scalars["prefetch_started"],
            "transfers_judged": transferred,
            "transfers_effective": effective,
            "link_busy_ns": scalars["link_busy_ns"],
            "cpu_busy_ns": scalars["cpu_end_ns"] - scalars["plan_ns"],
            "exposed_stall_ns": scalars["end_ns"] - scalars["hits_end_ns"],
            "policy_ns": np.full(len(slots), self._policy_ns),
            **{name: scalars[name].astype(np.int64) for name in PREFETCH_COUNTS},
        }
        sums = {name: values.reshape(-1, self._num_layers).sum(axis=1) for name, values in columns.items()}
        return sums | {"slots_moved": self._moved(scalars["capacity"].reshape(-1, self._num_layers))}

    def _moved(self, capacity: NDArray[np.int32]) -> NDArray[np.int64]:
        """Slots that other layers have than in the forward before, for each forward; capacity is [forwards, L]."""
        before = np.concatenate([self._capacity if len(self._capacity) else capacity[:1], capacity[:-1]])
        self._capacity = capacity[-1:].astype(np.int64)
        return np.abs(capacity - before).sum(axis=1) // 2

    def _effective(self, layers: Table) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """How many of the layer's last transfers were kept and are activated, of how many; and of the row's, kept."""
        shape = (len(layers), self._num_experts)
        activated, transferred, retained = (np.zeros(shape, bool) for _ in range(3))
        for name in ("hits", "transfers", "on_cpu"):
            activated[_rows(layers.lists[name]), layers.lists[name].values] = True
        column = layers.lists["transfers"]
        transferred[_rows(column), column.values] = True
        column = layers.lists["retained"]
        rows, experts = _rows(column), column.values
        if self._is_global:  # of the whole pool, keep what belongs to the row's layer
            own = experts // self._num_experts == layers.scalars["layer"][rows]
            rows, experts = rows[own], experts[own] % self._num_experts
        retained[rows, experts] = True
        kept = retained & transferred
        previous_kept = np.concatenate([self._last[0], kept[: -self._num_layers]])
        previous_transferred = np.concatenate([self._last[1], transferred[: -self._num_layers]])
        self._last = (kept[-self._num_layers :], transferred[-self._num_layers :])
        return (previous_kept & activated).sum(axis=1), previous_transferred.sum(axis=1), kept.sum(axis=1)


def _rows(column: Ragged) -> NDArray[np.int64]:
    """Row number of each value of a list column."""
    return np.repeat(np.arange(len(column)), column.lengths())


def _row_sums(column: Ragged) -> NDArray[np.int64]:
    sums = np.concatenate([[0], np.cumsum(column.values, dtype=np.int64)])
    return sums[column.offsets[1:]] - sums[column.offsets[:-1]]


def _list_series(name: str, column: Ragged, inner: type[pl.DataType] = pl.Int32) -> pl.Series:
    return pl.Series(name, [column[row].tolist() for row in range(len(column))], dtype=pl.List(inner))
