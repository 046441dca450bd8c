"""Whether tokens keep their experts: by the model's confidence in them, and how far their hidden states move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.schema import ForwardKind, Pass, TraceError

CONFIDENCE_EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


class TokenState(IntEnum):
    """What became of a token between two forwards; only an accepted one has another input in the later."""

    MASKED = 0  # was a mask, and is one still
    ACCEPTED = 1  # has another input: it was accepted, or edited
    DECODED = 2  # had its token before


class Routes(NamedTuple):
    """Tokens of one request in two successive denoise forwards of a block, i - 1 and i. T tokens."""

    confidence: NDArray[np.float64]  # [T] of forward i - 1, NaN where the trace does not know it
    state: NDArray[np.int64]  # [T] TokenState
    num_kept: NDArray[np.int64]  # [L, T] of the K experts of forward i - 1, those chosen in i as well


class Stability(NamedTuple):
    """How many of its experts a token keeps, by its state and its confidence. S states, B bins of confidence."""

    edges: NDArray[np.float64]  # [B + 1] a bin holds its lower edge; the last one holds its upper edge too
    counts: NDArray[np.int64]  # [S, B, L, K + 1] tokens of each layer that keep 0, 1, ... K experts

    def kept_ratio(self, states: Collection[TokenState], low: float = 0.0, high: float = 1.0) -> float | None:
        """Mean share of experts kept over layers and tokens of these states with confidence from low to high, two edges.

        None without such tokens.
        """
        counts = self._of(states, low, high).sum(axis=(0, 1, 2))  # [K + 1]
        num_kept = np.arange(counts.size)
        return float(counts @ num_kept / (counts.sum() * num_kept[-1])) if counts.any() else None

    def num_tokens(self, states: Collection[TokenState], low: float = 0.0, high: float = 1.0) -> int:
        """Number of tokens that `kept_ratio` is the mean of."""
        return int(self._of(states, low, high)[:, :, 0].sum())

    def _of(self, states: Collection[TokenState], low: float, high: float) -> NDArray[np.int64]:
        if low not in self.edges or high not in self.edges:
            raise TraceError(f"confidence from {low} to {high}: allowed are the edges {self.edges.tolist()}")
        first, last = np.searchsorted(self.edges, (low, high))
        return self.counts[sorted(states), first:last]


def routes(passes: Iterable[Pass]) -> Iterator[Routes]:
    """Each denoise forward with the one before it in the same request and block, token by token.

    Confidence is that which forward i - 1 leaves: the probability of the best token where the position was masked or
    was edited, else that of the token which stands there. Positions that are not in both forwards are left out.
    """
    previous: dict[int, tuple[int, Pass, slice]] = {}  # of each request: block, pass, its tokens
    for item in passes:
        stops = np.cumsum(item.num_tokens)
        for row, kind in enumerate(item.kinds):
            if kind != ForwardKind.DENOISE:
                continue
            request, block = int(item.requests[row]), int(item.blocks[row])
            tokens = slice(int(stops[row] - item.num_tokens[row]), int(stops[row]))
            if request in previous and previous[request][0] == block:
                yield _compare(*previous[request][1:], item, tokens)
            previous[request] = block, item, tokens


def _compare(before: Pass, tokens_before: slice, after: Pass, tokens_after: slice) -> Routes:
    _, i, j = np.intersect1d(
        before.positions[tokens_before], after.positions[tokens_after], assume_unique=True, return_indices=True
    )
    i, j = i + tokens_before.start, j + tokens_after.start
    state = np.where(after.is_masked_in[j], TokenState.MASKED, TokenState.DECODED)
    state[before.token_ids_in[i] != after.token_ids_in[j]] = TokenState.ACCEPTED
    kept = before.expert_ids[:, i, :, None] == after.expert_ids[:, j, None, :]  # [L, T, K, K]
    return Routes(before.confidence[i], state, kept.sum(axis=(2, 3)))


def stability(
    compared: Iterable[Routes], num_layers: int, top_k: int, edges: tuple[float, ...] = CONFIDENCE_EDGES
) -> Stability:
    """Count tokens by state, confidence and experts kept; tokens of unknown confidence are left out."""
    counts = np.zeros((len(TokenState), len(edges) - 1, num_layers, top_k + 1), np.int64)
    for one in compared:
        known = ~np.isnan(one.confidence)
        bins = np.digitize(one.confidence[known], edges[1:-1])
        np.add.at(counts, (one.state[known], bins, np.arange(num_layers)[:, None], one.num_kept[:, known]), 1)
    return Stability(np.array(edges), counts)


class Cosines(NamedTuple):
    """Cosine of hidden states to the same request's previous forward, mean over its positions, of N denoise forwards."""

    router_input: NDArray[np.float64]  # [N, L]
    layer_output: NDArray[np.float64]  # [N, L]


def cosines(passes: Iterable[Pass]) -> Cosines:
    """The recorded cosines of all denoise forwards that follow another in their block; the others have none."""
    router_input, layer_output = [], []
    for item in passes:
        rows = (item.kinds == ForwardKind.DENOISE) & ~np.isnan(item.cos_router_input).any(axis=1)
        router_input.append(item.cos_router_input[rows])
        layer_output.append(item.cos_layer_output[rows])
    if not router_input:
        return Cosines(np.empty((0, 0)), np.empty((0, 0)))
    return Cosines(np.concatenate(router_input).astype(np.float64), np.concatenate(layer_output).astype(np.float64))
