"""A router without a model: logits that drift from forward to forward, and the solve that gives them stated statistics."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.schema import TraceError

NUM_TOKENS = 4096  # at least, in the simulated forwards that a solve rests on
MAX_WEIGHT = 32.0  # of popularity against taste: nearly all tokens choose the same experts
MAX_KNOB = 10  # beyond which knobs that stand in an exponent change nothing any more
MIN_KEPT = 1e-6  # correlation that is as good as none


class RouterShape(NamedTuple):
    """How many experts a token chooses from, and how: only among the best groups, where there is more than one."""

    num_layers: int
    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1

    def check(self) -> None:
        """Refuse groups that cannot be chosen from."""
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise TraceError(f"num_groups {self.num_groups}: must divide the {self.num_experts} experts")
        size = self.num_experts // self.num_groups
        if self.num_groups > 1 and size < 2:
            raise TraceError(f"num_groups {self.num_groups}: leaves {size} expert in a group, must be at least 2")
        if not 1 <= self.top_groups <= self.num_groups or self.top_groups * size < self.top_k:
            raise TraceError(
                f"top_groups {self.top_groups}: must be from {-(-self.top_k // size)}, which hold top_k {self.top_k} experts, to {self.num_groups}"
            )


def choose(logits: NDArray[np.float32], shape: RouterShape) -> NDArray[np.int64]:
    """Experts of each token, ascending, [..., K], from logits [..., E], which it overwrites.

    A group of consecutive experts is worth the sum of its two largest logits; experts are the best of the best groups.

    Source:
        LLaDA2.0, released modeling code, the gate's group-limited top-k. Differs: on logits, there is no bias.
    """
    if shape.top_groups < shape.num_groups:
        groups = logits.reshape(*logits.shape[:-1], shape.num_groups, -1)
        values = np.partition(groups, -2, axis=-1)[..., -2:].sum(axis=-1)
        closed = np.argpartition(values, -shape.top_groups, axis=-1)[..., : -shape.top_groups]
        np.put_along_axis(groups, closed[..., None], -np.inf, axis=-2)
    return np.sort(np.argpartition(logits, -shape.top_k, axis=-1)[..., -shape.top_k :], axis=-1)


def popularity(rng: np.random.Generator, *size: int) -> NDArray[np.float32]:
    """Popularity of the experts, [..., E]: normal quantiles in random order, so that each row is spread alike."""
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / size[-1]) for i in range(size[-1])], np.float32)
    return rng.permuted(np.broadcast_to(quantiles, size), axis=-1)


def mixed(share: float, common: NDArray[np.float32], own: NDArray[np.float32]) -> NDArray[np.float32]:
    """Two independent normal arrays as one of the same variance, to which `own` contributes this share."""
    return (np.float32(np.sqrt(1 - share)) * common + np.float32(np.sqrt(share)) * own).astype(np.float32)


def stir(
    rng: np.random.Generator, taste: NDArray[np.float32], kept: NDArray[np.float64] | float
) -> NDArray[np.float32]:
    """The next taste of tokens, [L, T, E], correlated with the last one by `kept`, [T, 1] or one number."""
    return drifted(taste, rng.standard_normal(taste.shape, np.float32), kept)


def drifted(
    taste: NDArray[np.float32], fresh: NDArray[np.float32], kept: NDArray[np.float64] | float
) -> NDArray[np.float32]:
    """Independent normal arrays mixed into one of the same variance, correlated with the first by `kept`."""
    weight, rest = np.float32(kept), np.sqrt(1 - np.square(kept)).astype(np.float32)
    return (weight * taste + rest * fresh).astype(np.float32)


class Knobs(NamedTuple):
    """What a router is to show on average, and three things that nobody published, from 0 up."""

    activated: float  # experts of a layer in a denoise forward
    overlap: float  # of adjacent forwards in a block
    boundary_overlap: float  # of a block's last denoise forward with the next block's first
    layer_heterogeneity: float = 0.0  # spread of the logarithm of popularity's weight over layers, to either side
    confidence_coupling: float = 0.0  # how many times e slower a token of confidence 1 drifts than one of confidence 0
    request_share: float = 0.0  # part of popularity's variance that is the request's own, 0 to 1


class Router(NamedTuple):
    """Parameters of the logits: weight times popularity, plus a taste of each token, which drifts.

    From one forward to the next the taste of a token keeps the correlation exp(-drift * exp(-coupling * confidence)),
    if the forward's input has changed at all, and `carry` from a block's last denoise forward to the next block's first,
    position by position.
    """

    weight: NDArray[np.float64]  # [L] standard deviation of popularity, where that of taste is 1
    drift: float
    carry: float
    coupling: float
    request_share: float

    def kept(self, confidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Correlation of tastes over one forward that left this confidence, elementwise."""
        return np.exp(-self.drift * np.exp(-self.coupling * confidence))


def solve_router(
    rng: np.random.Generator, knobs: Knobs, shape: RouterShape, confidences: NDArray[np.float64]
) -> Router:
    """Find the router that shows these averages over layers, by simulating pairs of forwards.

    Weight, carry and drift are found in this order by bisection, each from one statistic that it moves in one
    direction; the same random numbers serve every step.

    Args:
        rng: the source of the simulated pairs.
        knobs: targets and assumptions.
        shape: of the router.
        confidences: [N, T] of forwards that another of their block follows, which drift depends on.

    Raises:
        TraceError: a knob is out of range, or no router shows such an average; the message says which are within reach.
    """
    for name in ("layer_heterogeneity", "confidence_coupling", "request_share"):
        high = 1 if name == "request_share" else MAX_KNOB
        if not 0 <= getattr(knobs, name) <= high:
            raise TraceError(f"{name} {getattr(knobs, name)}: must be from 0 to {high}")
    tilts = np.exp(knobs.layer_heterogeneity * rng.permutation(np.linspace(-1, 1, shape.num_layers)))
    pairs = _Pairs(rng, knobs, shape, confidences)
    scale = _solve(
        "activated", knobs.activated, lambda x: pairs.first(x * tilts), 0, MAX_WEIGHT, 0.002 * knobs.activated
    )
    pairs.first(scale * tilts)
    router = Router(scale * tilts, 0.0, 0.0, knobs.confidence_coupling, knobs.request_share)
    carry = _solve("boundary_overlap", knobs.boundary_overlap, pairs.overlap, 0, 1, 0.001)

    def with_drift(kept_at_zero: float) -> Router:
        return router._replace(drift=float(-np.log(kept_at_zero)), carry=carry)

    def adjacent(kept_at_zero: float) -> float:
        return pairs.overlap(with_drift(kept_at_zero).kept(pairs.confidence)[..., None])

    return with_drift(_solve("overlap", knobs.overlap, adjacent, MIN_KEPT, 1, 0.001))


class _Pairs:
    """Pairs of forwards of single layers, each pair with a popularity of its own. N pairs."""

    def __init__(
        self, rng: np.random.Generator, knobs: Knobs, shape: RouterShape, confidences: NDArray[np.float64]
    ) -> None:
        pairs_of_layer = -(-NUM_TOKENS // (confidences.shape[1] * shape.num_layers))
        num_pairs = pairs_of_layer * shape.num_layers
        rows = (num_pairs, shape.num_experts)
        self._shape = shape
        self._popularity = mixed(knobs.request_share, popularity(rng, *rows), popularity(rng, *rows))
        self.confidence = confidences[rng.integers(0, len(confidences), num_pairs)]  # [N, T]
        size = (*self.confidence.shape, shape.num_experts)
        self._taste, self._fresh = (rng.standard_normal(size, np.float32) for _ in range(2))
        self._common = np.empty(0)  # [N, 1, E] weighted popularity
        self._earlier = np.empty(0, np.bool_)  # [N, E] activated

    def first(self, weight: NDArray[np.float64]) -> float:
        """Mean number of experts that the earlier forwards activate with this weight, [L], of popularity."""
        weights = np.resize(weight, len(self._popularity)).astype(np.float32)
        self._common = (weights[:, None] * self._popularity)[:, None]
        self._earlier = self._activated(self._taste)
        return float(self._earlier.sum(axis=1).mean())

    def overlap(self, kept: NDArray[np.float64] | float) -> float:
        """Mean overlap of the earlier forwards, as `first` left them, with later ones that kept this much of the taste."""
        shared = (self._earlier & self._activated(drifted(self._taste, self._fresh, kept))).sum(axis=1)
        return float((shared / self._earlier.sum(axis=1)).mean())

    def _activated(self, taste: NDArray[np.float32]) -> NDArray[np.bool_]:
        ids = choose(self._common + taste, self._shape)
        activated = np.zeros((len(ids), self._shape.num_experts), np.bool_)
        np.put_along_axis(activated, ids.reshape(len(ids), -1), True, axis=1)
        return activated


def _solve(
    name: str, target: float, value_at: Callable[[float], float], low: float, high: float, tolerance: float
) -> float:
    """Where a monotone function is within tolerance of the target, by bisection."""
    ends = value_at(low), value_at(high)
    if not min(ends) - tolerance <= target <= max(ends) + tolerance:
        raise TraceError(
            f"{name} {target:g}: out of reach with the other settings, which allow {min(ends):.3g} to {max(ends):.3g}"
        )
    for end, value in zip((low, high), ends, strict=True):
        if abs(value - target) <= tolerance:
            return end
    rises = ends[0] < ends[1]
    while True:
        middle = (low + high) / 2
        value = value_at(middle)
        if abs(value - target) <= tolerance or high - low < 1e-6:
            return middle
        if (value < target) == rises:
            low = middle
        else:
            high = middle
