"""Expert sets of a trace: how many a forward activates, and their overlap by gap, by tokens accepted, across blocks, with its floor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.schema import ForwardKind, Pass


class ForwardSets(NamedTuple):
    """Activated experts of one request in one decode forward."""

    request: int
    block: int
    iteration: int
    num_accepted: int
    activated: NDArray[np.bool_]  # [L, E]
    kind: ForwardKind = ForwardKind.DENOISE


class Pairs(NamedTuple):
    """Pairs of forwards, earlier and later, N of them, compared layer by layer."""

    overlap: NDArray[np.float64]  # [N, L] |earlier & later| / |earlier|
    jaccard: NDArray[np.float64]  # [N, L] |earlier & later| / |earlier | later|
    num_accepted: NDArray[np.int64]  # [N] tokens accepted between the two; -1 where they are of unrelated requests

    @property
    def mean_overlap(self) -> float | None:
        """Unweighted mean over pairs and layers; None without pairs."""
        return float(self.overlap.mean()) if self.overlap.size else None

    @property
    def mean_jaccard(self) -> float | None:
        """Unweighted mean over pairs and layers; None without pairs."""
        return float(self.jaccard.mean()) if self.jaccard.size else None

    def by_accepted(self) -> dict[int, Pairs]:
        """The same pairs, grouped by the number of tokens accepted between, ascending."""
        return {
            int(n): Pairs(
                self.overlap[self.num_accepted == n],
                self.jaccard[self.num_accepted == n],
                self.num_accepted[self.num_accepted == n],
            )
            for n in np.unique(self.num_accepted)
        }


def decode_sets(passes: Iterable[Pass], num_experts: int) -> Iterator[ForwardSets]:
    """Activated sets of every decode forward, in the order of the trace; prefill alone is left out."""
    for item in passes:
        stops = np.cumsum(item.num_tokens)
        for row, kind in enumerate(item.kinds):
            if kind == ForwardKind.PREFILL:
                continue
            ids = item.expert_ids[:, stops[row] - item.num_tokens[row] : stops[row]]
            activated = np.zeros((len(ids), num_experts), np.bool_)
            np.put_along_axis(activated, ids.reshape(len(ids), -1), True, axis=1)
            yield ForwardSets(
                int(item.requests[row]),
                int(item.blocks[row]),
                int(item.iterations[row]),
                int(item.num_accepted[row]),
                activated,
                ForwardKind(int(kind)),
            )


def denoise_sets(passes: Iterable[Pass], num_experts: int) -> Iterator[ForwardSets]:
    """Activated sets of every denoise forward, in the order of the trace; other kinds are left out.

    Prefill sees another number of tokens, and idle and commit forwards repeat an input that no longer changes:
    either would say nothing of how expert sets move while a block is denoised.
    """
    return (forward for forward in decode_sets(passes, num_experts) if forward.kind == ForwardKind.DENOISE)


def activated_counts(forwards: Iterable[ForwardSets]) -> NDArray[np.int64]:
    """Number of activated experts in each forward and layer, [N, L]; [0, 0] without forwards."""
    counts = [forward.activated.sum(axis=1) for forward in forwards]
    return np.array(counts, np.int64) if counts else np.empty((0, 0), np.int64)


def activated_per_layer(forwards: Iterable[ForwardSets]) -> NDArray[np.float64]:
    """Mean number of activated experts of each layer, [L]; empty without forwards."""
    counts = activated_counts(forwards)
    return counts.mean(axis=0) if counts.size else np.empty(0)


def within_blocks(forwards: Iterable[ForwardSets], gap: int = 1) -> Pairs:
    """Each forward with the one `gap` forwards before it in the same request and block; gap 1 is adjacent overlap."""
    pairs = []
    for of_request in by_request(forwards):
        pairs += [
            (earlier, later, _accepted(of_request, i, i + gap))
            for i, (earlier, later) in enumerate(zip(of_request, of_request[gap:], strict=False))
            if earlier.block == later.block
        ]
    return _compare(pairs)


def activated_by_iteration(forwards: Iterable[ForwardSets]) -> dict[int, float]:
    """Mean number of activated experts, over layers and forwards, of the 0th, 1st, ... forward of blocks, ascending."""
    sizes: dict[int, list[float]] = {}
    for forward in forwards:
        sizes.setdefault(forward.iteration, []).append(float(forward.activated.sum(axis=1).mean()))
    return {iteration: float(np.mean(sizes[iteration])) for iteration in sorted(sizes)}


def across_blocks(forwards: Iterable[ForwardSets], earlier: Literal["first", "last"] = "last") -> Pairs:
    """The first or last forward of each block with the first forward of the request's next block."""
    pairs = []
    for of_request in by_request(forwards):
        openings = _openings(of_request)
        for opening, following in zip(openings, openings[1:], strict=False):
            i = following - 1 if earlier == "last" else opening
            pairs.append((of_request[i], of_request[following], _accepted(of_request, i, following)))
    return _compare(pairs)


def across_blocks_floor(forwards: Iterable[ForwardSets], earlier: Literal["first", "last"] = "last") -> Pairs:
    """The floor of `across_blocks`: the same forwards, each with an opening of the request after it.

    A block opens with fewer experts than it ends with, so that `between_requests`, which is over all forwards, is no
    floor for boundaries. Requests stand in a ring; the n-th block of each meets the opening of block n + 1 of the
    next, counted round where that has fewer. Without a second request there are no pairs.
    """
    requests = by_request(forwards)
    if len(requests) < 2:
        return _compare([])
    pairs = []
    for of_request, other in zip(requests, requests[1:] + requests[:1], strict=True):
        openings, others = _openings(of_request), _openings(other)
        for n, (opening, following) in enumerate(zip(openings, openings[1:], strict=False)):
            i = following - 1 if earlier == "last" else opening
            pairs.append((of_request[i], other[others[(n + 1) % len(others)]], -1))
    return _compare(pairs)


def between_requests(forwards: Iterable[ForwardSets]) -> Pairs:
    """The floor: forwards that have nothing in common, of one request and of the request after it.

    Requests stand in a ring in the order of the trace. The n-th forward of each meets the n-th of the next, counted
    round where that has fewer. Without a second request there are no pairs.
    """
    requests = by_request(forwards)
    if len(requests) < 2:
        return _compare([])
    return _compare(
        [
            (earlier, following[n % len(following)], -1)
            for of_request, following in zip(requests, requests[1:] + requests[:1], strict=True)
            for n, earlier in enumerate(of_request)
        ]
    )


def by_request(forwards: Iterable[ForwardSets]) -> list[list[ForwardSets]]:
    """Forwards of each request in the order of the trace."""
    requests: dict[int, list[ForwardSets]] = {}
    for forward in forwards:
        requests.setdefault(forward.request, []).append(forward)
    return list(requests.values())


def _openings(of_request: list[ForwardSets]) -> list[int]:
    """Where in a request each block begins."""
    return [i for i, f in enumerate(of_request) if i == 0 or of_request[i - 1].block != f.block]


def _accepted(forwards: list[ForwardSets], earlier: int, later: int) -> int:
    """Tokens by which the inputs of two forwards differ: a forward accepts after it has routed."""
    return sum(forward.num_accepted for forward in forwards[earlier:later])


def _compare(pairs: list[tuple[ForwardSets, ForwardSets, int]]) -> Pairs:
    """Overlap and Jaccard of each pair; every set holds at least the experts of one token."""
    if not pairs:
        return Pairs(np.empty((0, 0)), np.empty((0, 0)), np.empty(0, np.int64))
    shared = np.array([(a.activated & b.activated).sum(axis=1) for a, b, _ in pairs])  # [N, L]
    either = np.array([(a.activated | b.activated).sum(axis=1) for a, b, _ in pairs])
    earlier = np.array([a.activated.sum(axis=1) for a, _, _ in pairs])
    return Pairs(shared / earlier, shared / either, np.array([pair[2] for pair in pairs], np.int64))
