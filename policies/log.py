"""The decision log and its timings: the narrow waist between policies, engines, replay and metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.log_loops import decision_words
from tracer.schema import Pass

# Prefetches, each counted in the execution during which the event happened
PREFETCH_COUNTS = (
    "prefetch_issued",
    "prefetch_started",
    "prefetch_landed",
    "prefetch_late",
    "prefetch_unserved",
    "prefetch_unused",
    "prefetch_dropped_begin",  # its layer began first
    "prefetch_dropped_flag",  # the policy cleared its queue
    "prefetch_dropped_victim",  # no resident scored below it
)
# One row for each layer execution. Decisions first: with these alone, time follows from a profile.
LAYER_COLUMNS: dict[str, type] = {
    "forward": np.int64,  # index of the pass in the run, from 0
    "pass_id": np.int64,
    "request": np.int32,  # lowest in the pass
    "layer": np.int32,  # index of the MoE layer, from 0
    "kind": np.int8,  # ForwardKind of the pass
    "num_tokens": np.int32,
    "kv_len": np.int32,  # summed over the requests of the pass
    "capacity": np.int32,  # slots of the layer at the gate; of the pool where it is global
    "num_resident": np.int32,  # of the layer at the gate
    "num_activated": np.int32,
    "hit_tokens": np.int32,  # sum of the loads of the hits
    "num_promoted": np.int32,  # transfers whose prefetch was already in progress
    # Timings, ns since the start of the run
    "start_ns": np.int64,  # t0: the layer begins
    "plan_ns": np.int64,  # t2: the plan acts
    "hits_end_ns": np.int64,  # kernel over the hits has run (t2 without hits)
    "cpu_end_ns": np.int64,  # CPU results are back (t2 without CPU experts)
    "end_ns": np.int64,
    "link_busy_ns": np.int64,  # durations of the copies that landed during the execution, prefetches included
    **dict.fromkeys(PREFETCH_COUNTS, np.int32),
}
# Lists, stored as values with row offsets
LAYER_LISTS: dict[str, type] = {
    "hits": np.int32,  # ascending
    "transfers": np.int32,  # in issue order
    "transfer_loads": np.int32,
    "transfer_start_ns": np.int64,  # start of the copy; of a promoted one, that of its prefetch
    "transfer_end_ns": np.int64,
    "on_cpu": np.int32,  # ascending
    "cpu_loads": np.int32,
    "retained": np.int32,  # ascending; layer * E + expert where the pool is global
    "prefetch_layers": np.int32,  # the plan's prefetches in order
    "prefetch_experts": np.int32,
}
DECIDED = ("hits", "transfers", "on_cpu", "retained", "prefetch_layers", "prefetch_experts")  # those a policy decides
# One row for each forward pass; requests and what each accepted are parallel lists.
FORWARD_COLUMNS: dict[str, type] = {
    "forward": np.int64,
    "pass_id": np.int64,
    "kind": np.int8,
    "start_ns": np.int64,
    "end_ns": np.int64,  # tail included
}
FORWARD_LISTS: dict[str, type] = {
    "requests": np.int32,
    "blocks": np.int32,
    "iterations": np.int32,
    "accepted": np.int32,  # masked positions that were decoded
}


@dataclass(frozen=True, eq=False)
class Ragged:
    """A column of lists: row i is values[offsets[i]:offsets[i + 1]]."""

    offsets: NDArray[np.int64]  # [rows + 1]
    values: NDArray[Any]

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> NDArray[np.int64]:
        """Number of values in each row."""
        return np.diff(self.offsets)


@dataclass(frozen=True, eq=False)
class Table:
    """Some rows of a log: scalar columns, all of one length, and list columns."""

    scalars: Mapping[str, NDArray[Any]]
    lists: Mapping[str, Ragged]

    def __len__(self) -> int:
        return len(next(iter(self.scalars.values())))


@dataclass(frozen=True, eq=False)
class LogChunk:
    """A stretch of whole forwards of a run, as every engine hands it on."""

    layers: Table
    forwards: Table


class TableBuilder:
    """Collects rows, given as one mapping each, into a Table."""

    def __init__(self, scalars: Mapping[str, type], lists: Mapping[str, type]) -> None:
        self._scalar_types, self._list_types = scalars, lists
        self._rows: list[Mapping[str, Any]] = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row that has a value for every column."""
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._rows)

    def build(self) -> Table:
        """The rows so far, as a Table; the builder is empty afterwards."""
        rows, self._rows = self._rows, []
        scalars = {name: np.array([row[name] for row in rows], dtype=kind) for name, kind in self._scalar_types.items()}
        lists = {}
        for name, kind in self._list_types.items():
            parts = [np.asarray(row[name], dtype=kind) for row in rows]
            offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
            lists[name] = Ragged(offsets, np.concatenate(parts) if parts else np.empty(0, kind))
        return Table(scalars, lists)


def layer_builder() -> TableBuilder:
    """An empty builder of layer-execution rows."""
    return TableBuilder(LAYER_COLUMNS, LAYER_LISTS)


def forward_builder() -> TableBuilder:
    """An empty builder of forward rows."""
    return TableBuilder(FORWARD_COLUMNS, FORWARD_LISTS)


def pass_columns(number: int, pass_: Pass) -> dict[str, Any]:
    """What all layer executions of a pass share; `number` is its index in the run, from 0."""
    return {
        "forward": number,
        "pass_id": pass_.pass_id,
        "request": int(pass_.requests.min()),
        "kind": int(pass_.kind),
        "num_tokens": int(pass_.num_tokens.sum()),
        "kv_len": int(pass_.kv_lens.sum()),
    }


def decided_columns(
    load: NDArray[np.int64],
    hits: NDArray[np.int64],
    transfers: NDArray[np.int64],
    on_cpu: NDArray[np.int64],
    retained: NDArray[np.int64],
    prefetches: NDArray[np.int64],
) -> dict[str, Any]:
    """What a layer execution was decided to be.

    Args:
        load: [E] of the layer.
        hits: experts, ascending.
        transfers: in the order of the log.
        on_cpu: ascending.
        retained: ascending numbers within the pool.
        prefetches: [P, 2] of the plan, which may use its arrays again.
    """
    return {
        "num_activated": len(hits) + len(transfers) + len(on_cpu),
        "hit_tokens": int(load[hits].sum()),
        "hits": hits,
        "transfers": transfers,
        "transfer_loads": load[transfers],
        "on_cpu": on_cpu,
        "cpu_loads": load[on_cpu],
        "retained": retained,
        "prefetch_layers": prefetches[:, 0].copy(),
        "prefetch_experts": prefetches[:, 1].copy(),
    }


def forward_row(number: int, pass_: Pass, start_ns: int, end_ns: int) -> dict[str, Any]:
    """The row of a forward pass."""
    return {
        "forward": number,
        "pass_id": pass_.pass_id,
        "kind": int(pass_.kind),
        "start_ns": start_ns,
        "end_ns": end_ns,
        "requests": pass_.requests,
        "blocks": pass_.blocks,
        "iterations": pass_.iterations,
        "accepted": pass_.num_accepted,
    }


class DecisionHash:
    """SHA-256 over the decisions of the counted requests, in execution order.

    Each execution contributes, as little-endian int32: lowest request, forward, layer, number of hits, then each
    with its count before it the transfers, CPU experts and retained experts ascending, and the prefetch pairs in order.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, layers: Table, counted: NDArray[np.bool_]) -> None:
        """Add the rows of a chunk for which `counted`, [rows], is true."""
        scalars, lists = layers.scalars, layers.lists
        prefetch_layers = lists["prefetch_layers"]
        words = decision_words(
            np.flatnonzero(counted),
            (scalars["request"], scalars["forward"], scalars["layer"], lists["hits"].offsets),
            tuple((lists[name].offsets, lists[name].values) for name in ("transfers", "on_cpu", "retained")),
            (prefetch_layers.offsets, prefetch_layers.values, lists["prefetch_experts"].values),
        )
        self._digest.update(words.astype("<i4", copy=False).data)

    def hexdigest(self) -> str:
        """The hash so far, 64 hexadecimal digits."""
        return self._digest.hexdigest()
