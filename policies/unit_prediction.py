"""Which experts a stretch of a run will need: from its input tokens by a table, or as it will be, with some wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import MOST_REQUESTS, PolicyError
from policies.jit import jit
from policies.steps import Steps
from tracer.schema import Calibration, ModelShape, Pass

UNITS = ("request", "block", "iter")
_REQUEST, _ITER = UNITS.index("request"), UNITS.index("iter")


class Rows(NamedTuple):
    """What each token, or each unit, has in each layer: experts with their weights, the highest first, and a rest.

    The rest is of all experts of the layer: `rests * load` is added to each, so `weights` are what is listed less that.
    """

    offsets: NDArray[np.int64]  # [rows * L + 1] into experts and weights
    experts: NDArray[np.int32]
    weights: NDArray[np.float64]
    rests: NDArray[np.float64]  # [rows * L] weight for a token of load
    load: NDArray[np.float64]  # [L, E]


@jit
def begins(unit, members, request, iteration):
    """Whether a unit begins with this forward; to be asked once for each.

    In a batch, units of all its requests begin when one does: what a batch needs is predicted from all it computes.

    Args:
        unit: index into UNITS.
        members: [MOST_REQUESTS] requests of the forward before, then -1; changed to those of this one.
        request: [T].
        iteration: [T].

    Raises:
        PolicyError: more requests in a pass than there is room for.
    """
    is_new, num_before, count = unit == _ITER, 0, 0
    while num_before < members.size and members[num_before] >= 0:
        num_before += 1
    before = members[:num_before].copy()
    members[:] = -1
    for token in range(request.size):
        if token == 0 or request[token] != request[token - 1]:
            if count == members.size:
                raise PolicyError("sida follows up to 256 requests in a pass, and there are more")
            members[count] = request[token]
            count += 1
            is_known = False
            for other in before:
                is_known |= other == request[token]
            is_new |= not is_known
        is_new |= unit != _REQUEST and iteration[token] == 0
    return is_new


def token_rows(calibration: Calibration, top_k: int) -> Rows:
    """A row for each token that calibration knows, and behind them one for all others, of an average token.

    Weights are shares of a token's occurrences. Where its list is as long as calibration keeps any, what is missing
    of the `top_k` experts that each occurrence is routed to is shared by those that are not listed, by their load; an
    average token lists none.

    Differs: of a token no more than 16 experts a layer are counted, and only for the 1000 most frequent tokens that
    occur at least 4 times; SiDA, section 3.4, predicts from a distribution over all experts, for any token.
    """
    load, experts, shares = calibration.load, calibration.token_experts, calibration.token_shares
    known = experts >= 0  # [V, L, W]
    loads = np.where(known, load[np.arange(load.shape[0])[:, None], experts], 0)
    others = load.sum(axis=1) - loads.sum(axis=2)  # [V, L]
    missing = np.maximum(top_k - shares.sum(axis=2), 0.0)
    rests = np.where(known.all(axis=2) & (others > 0), missing / np.maximum(others, 1), 0.0)
    average = top_k / np.maximum(load.sum(axis=1), 1)
    sizes = np.concatenate([known.sum(axis=2).ravel(), np.zeros(load.shape[0], np.int64)])
    return Rows(
        np.concatenate([[0], sizes.cumsum()]),
        experts[known].astype(np.int32),
        (shares - rests[:, :, None] * loads)[known],
        np.concatenate([rests.ravel(), average]),
        load.astype(np.float64),
    )


def true_rows(passes: Iterable[Pass], shape: ModelShape, unit: int, noise: float, seed: int) -> Rows:
    """A row for each unit of a run: what it activates, weighted by tokens, a share `noise` of it replaced.

    An expert is replaced by one that its layer does not activate in the unit, as long as there are such. What a
    lower noise replaces, a higher one replaces too.
    """
    rng = np.random.default_rng(seed)
    sizes, experts, weights = [0], [np.empty(0, np.int32)], [np.empty(0)]
    for load in _unit_loads(passes, shape, unit):
        for tokens in load:
            named = np.argsort(-tokens, kind="stable")[: np.count_nonzero(tokens)]
            weights.append(tokens[named].astype(np.float64))
            is_wrong = rng.random(named.size) < noise
            others = rng.permutation(np.flatnonzero(tokens == 0))
            wrong = np.flatnonzero(is_wrong)[: others.size]
            named[wrong] = others[: wrong.size]
            experts.append(named.astype(np.int32))
            sizes.append(named.size)
    no_rest = np.zeros((shape.num_layers, shape.num_experts))
    return Rows(np.cumsum(sizes), np.concatenate(experts), np.concatenate(weights), np.zeros(len(sizes) - 1), no_rest)


def _unit_loads(passes: Iterable[Pass], shape: ModelShape, unit: int) -> Iterable[NDArray[np.int64]]:
    """Tokens that each unit routes to each expert, [L, E]."""
    steps, members = Steps(shape), np.full(MOST_REQUESTS, -1)
    total: NDArray[np.int64] | None = None
    for pass_ in passes:
        forward = steps.read(pass_)
        if begins(unit, members, forward.request, forward.iteration) or total is None:
            if total is not None:
                yield total
            total = np.zeros_like(forward.load)
        total += forward.load
    if total is not None:
        yield total


@jit
def add_up(rows, chosen, layer, num_layers, sums):
    """Write the sum of the weights of the chosen rows for each expert of a layer to `sums`, [E]."""
    rest = 0.0
    for row in chosen:
        rest += rows.rests[row * num_layers + layer]
    for expert in range(sums.size):
        sums[expert] = rest * rows.load[layer, expert]
    for row in chosen:
        place = row * num_layers + layer
        for index in range(rows.offsets[place], rows.offsets[place + 1]):
            sums[rows.experts[index]] += rows.weights[index]


@jit
def last_in(rows, chosen, layer, num_layers, capacity, num_experts):
    """What a queue of `capacity` experts holds when those that the chosen rows list came in order, first in, first out.

    Returns:
        [E] bool.
    """
    queue = np.empty(capacity, np.int64)
    held = np.zeros(num_experts, np.bool_)
    count = 0  # of all that came
    for row in chosen:
        place = row * num_layers + layer
        for index in range(rows.offsets[place], rows.offsets[place + 1]):
            expert = rows.experts[index]
            if not held[expert]:
                if count >= capacity:
                    held[queue[count % capacity]] = False
                queue[count % capacity] = expert
                held[expert] = True
                count += 1
    return held
