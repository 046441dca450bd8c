"""What a cache of experts would have to hold: layer heat, working sets and reuse distances."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.locality import ForwardSets, by_request
from tracer.schema import Pass


def layer_heat(forwards: Iterable[ForwardSets]) -> NDArray[np.float64]:
    """Share of the forwards in which each expert is activated, [L, E]; [0, 0] without forwards."""
    activated = [forward.activated for forward in forwards]
    return np.mean(activated, axis=0) if activated else np.empty((0, 0))


def hottest_share(heat: NDArray[np.float64], part: float = 0.1) -> NDArray[np.float64]:
    """Share of a layer's activations that its hottest experts take, [L], from its heat, [L, E].

    The hottest are `part` of the experts, rounded up. Experts that are used alike give about `part`.
    """
    hottest = -np.sort(-heat, axis=1)[:, : math.ceil(part * heat.shape[1])]
    return hottest.sum(axis=1) / heat.sum(axis=1)


def working_sets(forwards: Iterable[ForwardSets], window: int) -> NDArray[np.int64]:
    """Distinct experts of each layer that `window` successive forwards of one request activate, [N, L].

    There is one row for each place at which the window fits into the request; it moves across the boundaries of
    blocks. Requests of fewer forwards have none; [0, 0] where no request has any.
    """
    sizes = []
    for of_request in by_request(forwards):
        uses = np.cumsum([forward.activated for forward in of_request], axis=0, dtype=np.int32)  # [F, L, E]
        if len(uses) >= window:
            inside = uses[window - 1 :].copy()
            inside[1:] -= uses[:-window]
            sizes.append((inside > 0).sum(axis=2))
    return np.concatenate(sizes) if sizes else np.empty((0, 0), np.int64)


class ReuseDistances(NamedTuple):
    """Uses of experts in decode passes, by how many other experts of the layer came between a use and the one before.

    A pass activates its experts at once, so in which order it touches them is a matter of the cache. `least` counts
    the experts of the passes strictly between the two uses, `most` those of the earlier use's own pass as well. An
    LRU cache of C slots surely holds an expert at most C - 1 of `most`, and surely does not one of C or more of
    `least`, whatever that order is.
    """

    least: NDArray[np.int64]  # [L, E] uses with 0, 1, ... E - 1 others between
    most: NDArray[np.int64]  # [L, E]
    num_first: NDArray[np.int64]  # [L] uses of experts that were not used before

    def lru_hits(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Lowest and highest share of all uses that LRU caches of 0, 1, ... E slots for each layer have at hand, [E + 1]."""
        num_uses = self.least.sum() + self.num_first.sum()
        none = np.zeros(1)
        low, high = (np.concatenate([none, np.cumsum(uses.sum(axis=0)) / num_uses]) for uses in (self.most, self.least))
        return low, high


def reuse_distances(passes: Iterable[Pass], num_experts: int) -> ReuseDistances:
    """Exact reuse distances of every expert of every layer, over the whole trace.

    Passes count in the order of the trace, as a cache sees them: a request follows the one before, and what a
    prefill pass activates is used too; but only the uses in decode passes are counted.
    """
    last: NDArray[np.int64] | None = None  # [L, E] number of the pass of the last use, -1 if never
    least = most = np.zeros((0, num_experts), np.int64)
    num_first = np.zeros(0, np.int64)
    for number, item in enumerate(passes):
        num_layers = len(item.expert_ids)
        if last is None:
            last = np.full((num_layers, num_experts), -1)
            least, most = np.zeros((2, num_layers, num_experts), np.int64)
            num_first = np.zeros(num_layers, np.int64)
        for layer in range(num_layers):
            used = np.unique(item.expert_ids[layer])
            if not item.is_prefill:
                before = last[layer, used]
                num_first[layer] += np.count_nonzero(before < 0)
                before = before[before >= 0]
                times = np.sort(last[layer])
                np.add.at(least[layer], num_experts - np.searchsorted(times, before, side="right"), 1)
                np.add.at(most[layer], num_experts - np.searchsorted(times, before, side="left") - 1, 1)
            last[layer, used] = number
    return ReuseDistances(least, most, num_first)
