"""What policies learn beforehand from requests that are not evaluated, added up pass by pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.schema import SKETCH_SIZE, Calibration, ModelShape, Pass, TraceError

MAX_REQUEST_LOADS = 120  # MoE-Infinity, section 5.2: the best number of stored request matrices
MAX_MAPS = 1000  # MoE-Infinity's code and FineMoE keep about as many
MAX_TOKENS = 1000
TOKEN_WIDTH = 16  # experts of a token in one layer
MIN_OCCURRENCES = 4  # of a token in decode forwards, before it gets a row
_MAX_LOOSE_TOKENS = 1 << 12


class _Maps(NamedTuple):
    """Expert maps of t tokens, with the hashes that decide which of them stay."""

    hashes: NDArray[np.uint64]  # [t]
    ids: NDArray[np.int64]  # [L, t, S]
    scores: NDArray[np.float64]  # [L, t, S]
    sketches: NDArray[np.float64]  # [t, 16]


class Calibrator:
    """Adds up passes, and keeps what `Calibration` holds of them; memory grows with requests, not with forwards.

    Requests must be numbered alike in all calibrators that are merged. The result does not depend on how requests
    were spread over them, but for the last bits of `importance`. A pass counts as prefill if it is so for all of its
    requests; everything else is a decode forward.

    Args:
        shape: of the traced model.
        name: where the passes are from: a trace's `source`.
        checkpoint_hash: of the model, as in a trace's details; empty where there is none.
    """

    def __init__(self, shape: ModelShape, name: str, checkpoint_hash: str = "") -> None:
        self.shape = shape
        self.name = name
        self.checkpoint_hash = checkpoint_hash
        size = (shape.num_layers, shape.num_experts)
        self._layers = np.arange(shape.num_layers)[:, None, None]
        self._num_activated = 0
        self._prefill_load = np.zeros(size, np.int64)
        self._importance = np.zeros(size)
        self._request_loads: dict[int, NDArray[np.int64]] = {}
        self._has_signals: bool | None = None
        self._maps: list[_Maps] = []
        self._num_maps = 0
        self._bound = np.uint64(np.iinfo(np.uint64).max)  # of the hashes that can still be among the smallest
        # How often each token, layer and expert met; the three make one key. What came last is not counted yet.
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._loose: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # token ids [T], cells [L, T, K]
        self._num_loose = 0

    def add(self, pass_: Pass) -> None:
        """Take a pass; nothing of it is kept by reference.

        Raises:
            TraceError: the passes before had signals and this one has none, or the other way round.
        """
        cells = self._layers * self.shape.num_experts + pass_.expert_ids  # [L, T, K]
        if pass_.is_prefill:
            self._prefill_load += self._count(cells)
            return
        signals = pass_.signals
        if self._has_signals not in (None, signals is not None):
            raise TraceError(f"{self.name}: pass {pass_.pass_id}: signals must be in all decode forwards or in none")
        self._has_signals = signals is not None
        load = np.zeros_like(self._prefill_load)
        ends = np.cumsum(pass_.num_tokens)
        for request, start, end in zip(pass_.requests.tolist(), ends - pass_.num_tokens, ends, strict=True):
            routed = self._count(cells[:, start:end])
            load += routed
            self._request_loads[request] = self._request_loads.get(request, 0) + routed
        self._num_activated += int(np.count_nonzero(load))
        weights = pass_.gates if signals is None else pass_.gates * signals.input_norm[:, :, None]
        self._importance += self._count(cells, weights)
        self._add_maps(pass_)
        known = pass_.token_ids_in >= 0
        if known.any():
            self._loose.append((pass_.token_ids_in[known], cells[:, known]))
            self._num_loose += int(known.sum())
        if self._num_loose > _MAX_LOOSE_TOKENS:
            self._count_loose()

    def merge(self, other: Calibrator) -> None:
        """Take all that another calibrator added up.

        Raises:
            TraceError: it is of another model, saw one of these requests as well, or differs in having signals.
        """
        if (other.shape, other.name, other.checkpoint_hash) != (self.shape, self.name, self.checkpoint_hash):
            raise TraceError(f"{self.name}: calibration of another model, {other.name}, cannot be added")
        if both := self._request_loads.keys() & other._request_loads.keys():
            raise TraceError(f"{self.name}: request {min(both)} is in both parts; must be in one")
        if None not in (self._has_signals, other._has_signals) and self._has_signals != other._has_signals:
            raise TraceError(f"{self.name}: signals must be in all parts or in none")
        self._has_signals = other._has_signals if self._has_signals is None else self._has_signals
        self._num_activated += other._num_activated
        self._prefill_load += other._prefill_load
        self._importance += other._importance
        self._request_loads |= other._request_loads
        self._maps += other._maps
        self._num_maps += other._num_maps
        self._keep_smallest()
        self._count_loose()
        other._count_loose()
        self._keys, self._counts = _summed(
            np.concatenate([self._keys, other._keys]), np.concatenate([self._counts, other._counts])
        )

    def finish(self) -> Calibration:
        """What was learned so far; more can be added afterwards.

        Raises:
            TraceError: there was no decode forward.
        """
        if not self._request_loads:
            raise TraceError(f"{self.name}: no decode forward to calibrate from; needs one or more")
        requests = sorted(self._request_loads)
        num_kept = min(len(requests), MAX_REQUEST_LOADS)
        kept = [requests[i * len(requests) // num_kept] for i in range(num_kept)]
        self._keep_smallest()
        maps = self._maps[0]
        token_ids, token_experts, token_shares = self._token_table()
        return Calibration(
            name=self.name,
            checkpoint_hash=self.checkpoint_hash,
            num_requests=len(requests),
            num_activated=self._num_activated,
            load=np.sum(list(self._request_loads.values()), axis=0),
            prefill_load=self._prefill_load.copy(),
            importance=self._importance.copy(),
            request_loads=np.stack([self._request_loads[request] for request in kept]),
            map_ids=maps.ids.transpose(1, 0, 2).copy(),
            map_scores=maps.scores.transpose(1, 0, 2).copy(),
            map_sketches=maps.sketches.copy(),
            token_ids=token_ids,
            token_experts=token_experts,
            token_shares=token_shares,
        )

    def _count(self, cells: NDArray[np.int64], weights: NDArray[np.float64] | None = None) -> NDArray[Any]:
        """How often each layer's experts occur, [L, E], or the sum of their weights."""
        size = self._prefill_load.shape
        found = np.bincount(cells.ravel(), None if weights is None else weights.ravel(), size[0] * size[1])
        return found.reshape(size)

    def _add_maps(self, pass_: Pass) -> None:
        spread = pass_.token_requests
        hashes = _hashes(spread(pass_.requests), spread(pass_.blocks), spread(pass_.iterations), pass_.positions)
        chosen = np.flatnonzero(hashes < self._bound)
        if not chosen.size:
            return
        signals = pass_.signals
        ids, scores = (pass_.expert_ids, pass_.gates) if signals is None else (signals.score_ids, signals.scores)
        sketches = np.full((chosen.size, SKETCH_SIZE), np.nan) if signals is None else signals.sketch[chosen]
        self._maps.append(_Maps(hashes[chosen], ids[:, chosen], scores[:, chosen], sketches))
        self._num_maps += chosen.size
        if self._num_maps > 2 * MAX_MAPS:
            self._keep_smallest()

    def _keep_smallest(self) -> None:
        """Join the maps, in the order of their hashes, and drop those beyond the limit."""
        if not self._maps:
            return
        hashes = np.concatenate([maps.hashes for maps in self._maps])
        order = np.argsort(hashes, kind="stable")[:MAX_MAPS]
        joined = _Maps(
            hashes[order],
            np.concatenate([maps.ids for maps in self._maps], axis=1)[:, order],
            np.concatenate([maps.scores for maps in self._maps], axis=1)[:, order],
            np.concatenate([maps.sketches for maps in self._maps])[order],
        )
        self._maps, self._num_maps = [joined], order.size
        if order.size == MAX_MAPS:
            self._bound = joined.hashes[-1]

    def _count_loose(self) -> None:
        if not self._loose:
            return
        # Few tokens are distinct, so that counting in a dense table is far quicker than sorting keys.
        tokens, rows = np.unique(np.concatenate([ids for ids, _ in self._loose]), return_inverse=True)
        cells = np.concatenate([cells for _, cells in self._loose], axis=1)
        size = self._prefill_load.size
        table = np.bincount((rows[:, None] * size + cells).ravel())
        found = np.flatnonzero(table)
        keys, counts = tokens[found // size] * size + found % size, table[found]
        self._loose, self._num_loose = [], 0
        self._keys, self._counts = _summed(np.concatenate([self._keys, keys]), np.concatenate([self._counts, counts]))

    def _token_table(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Tokens, most frequent first up to the limit, then ascending; their experts and shares by layer."""
        self._count_loose()
        num_layers, num_experts = self._prefill_load.shape
        token_of = self._keys // (num_layers * num_experts)  # ascending, as the keys are
        is_first = np.diff(token_of, prepend=-1) != 0
        tokens, places = token_of[is_first], np.cumsum(is_first) - 1
        # Every occurrence routes to top_k experts in each layer.
        occurrences = np.bincount(places, self._counts) / (num_layers * self.shape.top_k)
        frequent = np.argsort(-occurrences, kind="stable")[:MAX_TOKENS]
        kept = np.zeros(tokens.size, bool)
        kept[frequent[occurrences[frequent] >= MIN_OCCURRENCES]] = True
        rows = kept[places]
        row_of = np.cumsum(kept) - 1  # of each token, in the table
        counts = self._counts[rows]
        groups = row_of[places[rows]] * num_layers + self._keys[rows] // num_experts % num_layers
        # Stable: of equal counts the lower expert comes first.
        order = np.argsort(groups * (counts.max(initial=0) + 1) - counts, kind="stable")
        groups, counts, experts = groups[order], counts[order], self._keys[rows][order] % num_experts
        ranks = np.arange(groups.size) - np.searchsorted(groups, groups)
        width = min(TOKEN_WIDTH, num_experts)
        first = ranks < width
        num_kept = int(kept.sum())
        token_experts = np.full((num_kept * num_layers, width), -1)
        token_shares = np.zeros(token_experts.shape)
        cell = groups[first], ranks[first]
        token_experts[cell] = experts[first]
        token_shares[cell] = counts[first] / occurrences[kept][groups[first] // num_layers]
        size = (num_kept, num_layers, width)
        return tokens[kept], token_experts.reshape(size), token_shares.reshape(size)


def _summed(keys: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each key once, ascending, with the sum of its counts."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(counts[order], starts)


def _hashes(*values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One hash for each row of whole numbers, the same on every machine.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    mixed = np.zeros(values[0].shape, np.uint64)
    for value in values:
        mixed = mixed + value.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed
