"""Small traces that a policy is checked on, from the smallest up: every kind of forward, batches, and signals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from policies.contract import Context
from tracer.schema import MAX_AHEAD_DEPTH, NUM_AHEAD, NUM_SCORES, SKETCH_SIZE, ForwardKind, ModelShape, Pass, Signals

VOCAB = 32
# layers, experts, top_k, tokens of a block, requests, of them at once, slots of a layer
SIZES = (
    (1, 2, 1, 1, 1, 1, 1),
    (1, 4, 2, 1, 1, 1, 2),
    (2, 4, 1, 2, 1, 1, 1),
    (2, 4, 2, 2, 2, 1, 4),
    (2, 6, 2, 3, 2, 2, 3),
    (3, 8, 2, 4, 2, 1, 3),
    (3, 8, 3, 4, 3, 2, 4),
    (2, 6, 6, 2, 2, 2, 6),
    (4, 16, 4, 8, 2, 1, 8),
    (3, 16, 4, 8, 4, 4, 5),
)


@dataclass(frozen=True, eq=False)
class Case:
    """A trace, and the cache that a policy is checked with on it."""

    shape: ModelShape
    passes: Sequence[Pass]
    slots_per_layer: int
    context: Context | None = None  # of a recorded trace

    @property
    def slots(self) -> int:
        """Of all layers together."""
        return self.slots_per_layer * self.shape.num_layers


def cases(num_seeds: int = 2) -> Iterator[Case]:
    """Generated traces, smallest first, and so many of each size; the same each time."""
    for size in SIZES:
        for seed in range(num_seeds):
            yield generated(seed, *size)


@cache
def generated(
    seed: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    block_length: int,
    num_requests: int,
    batch: int,
    slots_per_layer: int,
) -> Case:
    """A trace of requests with a prompt and two blocks each, whose routing drifts from forward to forward.

    Args:
        seed: of all that is drawn.
        num_layers: of the model.
        num_experts: of each layer.
        top_k: experts of a token.
        block_length: tokens that are denoised together, and of a prompt.
        num_requests: of the trace.
        batch: that share their passes.
        slots_per_layer: of the cache.
    """
    rng = np.random.default_rng([seed, num_layers, num_experts, top_k, block_length])
    shape = ModelShape(tuple(range(num_layers)), num_experts, top_k, hidden=8, expert_intermediate=4)
    popularity = rng.standard_normal((num_layers, 1, num_experts))
    passes: list[Pass] = []
    for first in range(0, num_requests, batch):
        requests = np.arange(first, min(first + batch, num_requests))
        for block in (-1, 0, 1):
            size = len(requests) * block_length
            masked = np.full(size, block >= 0)
            taste = rng.standard_normal((num_layers, size, num_experts))
            for iteration in range(1 if block < 0 else 4):
                taste = 0.9 * taste + 0.4 * rng.standard_normal(taste.shape)
                kind = ForwardKind.PREFILL if block < 0 else ForwardKind.DENOISE if masked.any() else ForwardKind.COMMIT
                accepted = masked & ((rng.random(size) < 0.5) | (iteration == 2))
                passes.append(
                    _pass(
                        rng, len(passes), requests, block, iteration, kind, masked, accepted, popularity + taste, top_k
                    )
                )
                masked = masked & ~accepted
    return Case(shape, passes, slots_per_layer)


def _pass(
    rng: np.random.Generator,
    pass_id: int,
    requests: NDArray[np.int64],
    block: int,
    iteration: int,
    kind: ForwardKind,
    masked: NDArray[np.bool_],
    accepted: NDArray[np.bool_],
    logits: NDArray[np.float64],
    top_k: int,
) -> Pass:
    num_layers, size, _ = logits.shape
    num_requests = len(requests)
    block_length = size // num_requests
    start = 0 if block < 0 else (block + 1) * block_length
    chosen = np.sort(np.argsort(-logits, axis=-1, kind="stable")[..., :top_k], axis=-1)
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits, chosen, -1)))
    p_argmax, p_current = rng.random((2, size))
    is_prefill = kind == ForwardKind.PREFILL
    made = Pass(
        pass_id=pass_id,
        requests=requests,
        blocks=np.full(num_requests, block),
        iterations=np.full(num_requests, iteration),
        kinds=np.full(num_requests, int(kind)),
        num_tokens=np.full(num_requests, block_length),
        kv_lens=np.full(num_requests, start),
        num_masked_in=masked.reshape(num_requests, -1).sum(axis=1),
        num_accepted=accepted.reshape(num_requests, -1).sum(axis=1),
        wall_ns=-1,
        cos_router_input=np.full((num_requests, num_layers), np.nan, np.float32),
        cos_layer_output=np.full((num_requests, num_layers), np.nan, np.float32),
        positions=np.tile(np.arange(start, start + block_length), num_requests),
        token_ids_in=np.where(masked, VOCAB - 1, rng.integers(0, VOCAB - 1, size)),
        is_masked_in=masked,
        argmax_ids=rng.integers(0, VOCAB - 1, size),
        p_argmax=np.full(size, np.nan) if is_prefill else p_argmax,
        p_current=np.where(masked | is_prefill, np.nan, p_current),
        accepted=accepted,
        edited=np.zeros(size, np.bool_),
        expert_ids=chosen,
        gates=scores / scores.sum(-1, keepdims=True),
        signals=_signals(rng, logits),
    )
    return frozen(made)


def _signals(rng: np.random.Generator, logits: NDArray[np.float64]) -> Signals:
    num_layers, size, num_experts = logits.shape
    score_ids = np.argsort(-logits, axis=-1, kind="stable")[..., : min(NUM_SCORES, num_experts)]
    ahead = np.full((num_layers, MAX_AHEAD_DEPTH, size, min(NUM_AHEAD, num_experts)), -1)
    for depth in range(1, MAX_AHEAD_DEPTH + 1):
        guess = logits[depth:] + 0.3 * rng.standard_normal(logits[depth:].shape)
        ahead[: max(num_layers - depth, 0), depth - 1] = np.argsort(-guess, axis=-1)[..., : ahead.shape[-1]]
    return Signals(
        score_ids=score_ids,
        scores=1 / (1 + np.exp(-np.take_along_axis(logits, score_ids, -1))),
        input_norm=1 + rng.random((num_layers, size)),
        sketch=rng.standard_normal((size, SKETCH_SIZE)),
        ahead_ids=ahead,
    )


def frozen(pass_: Pass) -> Pass:
    """The pass, with arrays that are read-only, as a reader of traces hands them out."""
    for record in filter(None, (pass_, pass_.signals)):
        for value in vars(record).values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
    return pass_


def other_future(
    rng: np.random.Generator, passes: Sequence[Pass], num_experts: int, forward: int, layer: int
) -> list[Pass]:
    """The same passes up to a gate, and others after it.

    A forward's own tokens are known at its gates; what came of them is not.

    Args:
        rng: source of what comes instead.
        passes: of a run.
        num_experts: that there are.
        forward: of the last gate that stays.
        layer: of that gate.
    """
    future = [
        _changed(rng, pass_, num_experts, layer + 1 if index == 0 else 0)
        for index, pass_ in enumerate(passes[forward:])
    ]
    return [*passes[:forward], *future]


def _changed(rng: np.random.Generator, pass_: Pass, num_experts: int, num_known: int) -> Pass:
    """A pass of which so many layers stay."""
    num_layers, size, top_k = pass_.expert_ids.shape
    ids, gates = pass_.expert_ids.copy(), pass_.gates.copy()
    drawn = rng.permuted(np.tile(np.arange(num_experts), (num_layers, size, 1)), axis=-1)[..., :top_k]
    ids[num_known:] = np.sort(drawn, axis=-1)[num_known:]
    gates[num_known:] = rng.dirichlet(np.ones(top_k), (num_layers, size))[num_known:]
    fields = vars(pass_) | {
        "expert_ids": ids,
        "gates": gates,
        "p_argmax": rng.random(size),
        "p_current": rng.random(size),
        "argmax_ids": rng.integers(0, VOCAB - 1, size),
        "accepted": rng.random(size) < 0.5,
    }
    if num_known == 0:
        fields["token_ids_in"] = rng.integers(0, VOCAB - 1, size)
    if pass_.signals is not None:
        other = _signals(rng, rng.standard_normal((num_layers, size, num_experts)))
        fields["signals"] = _joined(pass_.signals, other, num_known)
    return frozen(Pass(**fields))


def _joined(known: Signals, other: Signals, num_known: int) -> Signals:
    """Signals of the first layers of one, and of the others of the other."""
    of_layers = {
        name: np.concatenate([getattr(known, name)[:num_known], getattr(other, name)[num_known:]])
        for name in ("score_ids", "scores", "input_norm", "ahead_ids")
    }
    return Signals(**of_layers, sketch=known.sketch if num_known else other.sketch)
