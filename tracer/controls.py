"""Controls of a trace: the same forwards and tokens, with routing that is uniform, or that is out of order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tracer.parts import join, split
from tracer.schema import ModelShape, Pass, TraceError, TraceMetadata


def uniform(passes: Iterable[Pass], shape: ModelShape, seed: int = 0) -> Iterator[Pass]:
    """Passes in which every token of every layer chooses its experts at random: no locality of any kind.

    Each set of top_k experts is as likely as any other, whatever else was chosen, in prefill too, and also where an
    input did not change. The gates of a token keep their values and lose their experts. All other columns stay, but
    there are no signals, and cosines and wall time, which were of another routing, become unknown.
    """
    rng = _generator(seed)
    for item in passes:
        drawn = rng.random((*item.expert_ids.shape[:2], shape.num_experts), np.float32)
        ids = np.argpartition(drawn, shape.top_k - 1, axis=-1)[..., : shape.top_k]
        yield replace(_without_measurements(item), expert_ids=np.sort(ids, axis=-1), signals=None)


def shuffled(passes: Iterable[Pass], seed: int = 0, *, within_requests: bool = False) -> Iterator[Pass]:
    """Passes whose decode forwards have exchanged their routing: the same sets, in an order without temporal locality.

    A forward here is what one pass does for one request. Its routing is ids and gates of all layers and tokens, and
    signals if there are any; it moves as a whole, so each forward's sets, their sizes, and what one layer says of the
    next stay. It takes the place of another's of the same kind and number of tokens, drawn at random over the whole
    trace, or among those of its own request, which leaves each request its popular experts. All else stays where it
    is: tokens, masks, confidences, blocks, and prefill with its routing; cosines and wall time become unknown. The
    trace is held in memory.

    Args:
        passes: of a trace, read once.
        seed: of the order.
        within_requests: exchange routing only among forwards of one request.
    """
    rng = _generator(seed)
    trace = [split(_without_measurements(item)) for item in passes]
    parts = [part for of_pass in trace for part in of_pass]
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, part in enumerate(parts):
        if not part.is_prefill:
            request = int(part.requests[0]) if within_requests else -1
            alike.setdefault((int(part.kinds[0]), int(part.num_tokens[0]), request), []).append(place)
    origin = np.arange(len(parts))
    for places in alike.values():
        origin[places] = rng.permutation(places)
    origins = iter(origin.tolist())
    for of_pass in trace:
        moved = []
        for part in of_pass:
            other = parts[next(origins)]
            moved.append(replace(part, expert_ids=other.expert_ids, gates=other.gates, signals=other.signals))
        yield join(moved, of_pass[0].pass_id)


def control_metadata(metadata: TraceMetadata, control: str, seed: int, **settings: Any) -> TraceMetadata:
    """Metadata of a control: source `synthetic:<control>`, and under `details.control_of` which trace it is of."""
    control_of = {
        "source": metadata.source,
        "content_hash": metadata.content_hash,
        "seed": metadata.seed,
        "details": metadata.details,
    }
    kept = {"lacks": metadata.details["lacks"]} if "lacks" in metadata.details else {}
    details = {"control_of": control_of, **kept, **settings}
    return replace(metadata, source=f"synthetic:{control}", seed=seed, details=details, content_hash="")


def _without_measurements(item: Pass) -> Pass:
    """A pass that does not claim cosines and time of a routing that it will not have."""
    unknown = np.full_like(item.cos_router_input, np.nan)
    return replace(item, cos_router_input=unknown, cos_layer_output=unknown, wall_ns=-1)


def _generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise TraceError(f"seed {seed}: must be at least 0")
    return np.random.default_rng(seed)
