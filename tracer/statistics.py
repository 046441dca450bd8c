"""Every statistic that a model card gives of one trace, in one record."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

from tracer.locality import (
    ForwardSets,
    Pairs,
    across_blocks,
    across_blocks_floor,
    activated_by_iteration,
    activated_counts,
    between_requests,
    decode_sets,
    within_blocks,
)
from tracer.locality_reuse import hottest_share, layer_heat, reuse_distances, working_sets
from tracer.locality_routes import TokenState, cosines, routes, stability
from tracer.schema import ForwardKind, ModelShape, TraceError, TraceMetadata
from tracer.shipped import find_trace
from tracer.store import TraceReader

WINDOWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Activated:
    """Activated experts of one layer in denoise forwards."""

    layer_id: int  # true number of the layer
    mean: float
    spread: float  # standard deviation over forwards


@dataclass(frozen=True)
class Overlap:
    """Mean over pairs of forwards and over layers; null without pairs."""

    num_pairs: int
    overlap: float | None  # |earlier & later| / |earlier|
    jaccard: float | None


@dataclass(frozen=True)
class Kept:
    """Share of its experts that a token keeps from a denoise forward to the next, mean over tokens and layers."""

    state: str  # masked, accepted or decoded, in between
    low: float  # confidence of the earlier forward, from
    high: float  # to
    num_tokens: int
    ratio: float


@dataclass(frozen=True)
class Statistics:
    """What one trace says of its model's routing; dictionaries are by what their comment names."""

    trace: str
    source: str
    content_hash: str
    hidden: int
    num_layers: int
    num_experts: int
    top_k: int
    training_minutes: float | None
    block_length: int | None
    threshold: float | None
    num_requests: int
    num_decode_forwards: int  # a forward is one request in one pass
    num_denoise_forwards: int
    num_accepted: int  # in decode forwards
    activated: tuple[Activated, ...]  # a layer each
    by_iteration: dict[int, float]  # mean of activated experts by the forward's number in its block
    overlap_by_layer: tuple[float, ...]  # adjacent
    by_gap: dict[int, Overlap]  # forwards between, within a block; 1 is adjacent
    by_accepted: dict[int, Overlap]  # tokens accepted between adjacent forwards
    after_last: Overlap  # the last forward of a block with the first of the next
    after_first: Overlap  # the first forward of a block with the first of the next
    after_last_floor: Overlap  # the same forwards with openings of an unrelated request
    after_first_floor: Overlap
    floor: Overlap  # between unrelated requests
    cos_router_input: tuple[float, ...]  # of adjacent forwards, a layer each; none where none was recorded
    cos_layer_output: tuple[float, ...]
    kept: tuple[Kept, ...]
    working_sets: dict[int, float]  # distinct experts in so many successive decode forwards, mean over layers
    lru_lowest: tuple[float, ...]  # hit ratio of LRU caches of 0, 1, ... slots for each layer, at least
    lru_highest: tuple[
        float, ...
    ]  # at most; in between, it depends on the order in which a forward touches its experts
    sorted_heat: tuple[
        float, ...
    ]  # share of forwards that activate the hottest, the next, ... expert, mean over layers
    hottest_share: float  # of activations, by the hottest tenth of a layer's experts, mean over layers

    @property
    def tokens_per_forward(self) -> float:
        """Accepted positions by decode forwards."""
        return self.num_accepted / self.num_decode_forwards

    @property
    def tokens_per_denoise(self) -> float:
        """Accepted positions by denoise forwards."""
        return self.num_accepted / self.num_denoise_forwards

    @property
    def mean_activated(self) -> float:
        """Activated experts, mean over denoise forwards and layers."""
        return sum(layer.mean for layer in self.activated) / len(self.activated)


def statistics_of(name_or_path: str) -> Statistics:
    """Measure a shipped trace or any other, reading it a few times, each time in a stream.

    Raises:
        TraceError: there is no such trace, or it is damaged.
    """
    path = find_trace(name_or_path)
    return measure(TraceReader(path), path.name.removesuffix(".trace"))


def measure(reader: TraceReader, name: str) -> Statistics:
    """Measure a trace, which is read four times.

    Raises:
        TraceError: the trace is damaged, or has no denoise forwards.
    """
    metadata, shape = reader.metadata, reader.metadata.shape
    decode = list(decode_sets(reader, shape.num_experts))
    denoise = [forward for forward in decode if forward.kind == ForwardKind.DENOISE]
    if not denoise:
        raise TraceError(f"{reader.path}: no denoise forwards; needs one or more")
    counts, adjacent = activated_counts(denoise), within_blocks(denoise)
    cosine, heat = cosines(reader), layer_heat(decode)
    lowest, highest = reuse_distances(reader, shape.num_experts).lru_hits()
    return Statistics(
        trace=name,
        source=metadata.source,
        content_hash=metadata.content_hash,
        hidden=shape.hidden,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        training_minutes=training_minutes(metadata),
        block_length=metadata.decode.get("block_length"),
        threshold=metadata.decode.get("threshold"),
        num_requests=reader.num_requests,
        num_decode_forwards=len(decode),
        num_denoise_forwards=len(denoise),
        num_accepted=sum(forward.num_accepted for forward in decode),
        activated=tuple(
            Activated(layer_id, float(column.mean()), float(column.std()))
            for layer_id, column in zip(shape.layer_ids, counts.T, strict=True)
        ),
        by_iteration=activated_by_iteration(denoise),
        overlap_by_layer=_by_layer(adjacent.overlap),
        by_gap=_by_gap(denoise),
        by_accepted={num: _overlap(pairs) for num, pairs in adjacent.by_accepted().items()},
        after_last=_overlap(across_blocks(denoise, "last")),
        after_first=_overlap(across_blocks(denoise, "first")),
        after_last_floor=_overlap(across_blocks_floor(denoise, "last")),
        after_first_floor=_overlap(across_blocks_floor(denoise, "first")),
        floor=_overlap(between_requests(denoise)),
        cos_router_input=_by_layer(cosine.router_input),
        cos_layer_output=_by_layer(cosine.layer_output),
        kept=_kept(reader, shape),
        working_sets={
            window: float(sizes.mean()) for window in WINDOWS if (sizes := working_sets(decode, window)).size
        },
        lru_lowest=tuple(lowest.tolist()),
        lru_highest=tuple(highest.tolist()),
        sorted_heat=tuple((-np.sort(-heat, axis=1)).mean(axis=0).tolist()),
        hottest_share=float(hottest_share(heat).mean()),
    )


def training_minutes(metadata: TraceMetadata) -> float | None:
    """Minutes that the traced model was trained for; None where that is not recorded."""
    return metadata.details.get("training", {}).get("minutes")


def _by_layer(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Mean of each layer over forwards or pairs, [N, L]; empty without any."""
    return tuple(values.mean(axis=0).tolist()) if values.size else ()


def _overlap(pairs: Pairs) -> Overlap:
    return Overlap(len(pairs.num_accepted), pairs.mean_overlap, pairs.mean_jaccard)


def _by_gap(denoise: list[ForwardSets]) -> dict[int, Overlap]:
    """Of every gap that there are pairs of."""
    gaps = ((gap, _overlap(within_blocks(denoise, gap))) for gap in count(1))
    return dict(takewhile(lambda item: item[1].num_pairs, gaps))


def _kept(reader: TraceReader, shape: ModelShape) -> tuple[Kept, ...]:
    found = stability(routes(reader), shape.num_layers, shape.top_k)
    return tuple(
        Kept(state.name.lower(), low, high, found.num_tokens([state], low, high), ratio)
        for state in TokenState
        for low, high in pairwise(found.edges.tolist())
        if (ratio := found.kept_ratio([state], low, high)) is not None
    )
