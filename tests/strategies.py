"""Seeded and Hypothesis generators of small traces that are consistent in every column, for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from experiments.check_traces import frozen
from tracer.schema import (
    MAX_AHEAD_DEPTH,
    NUM_AHEAD,
    NUM_SCORES,
    SKETCH_SIZE,
    ForwardKind,
    ModelShape,
    Pass,
    Signals,
    TraceMetadata,
)

VOCAB = 97
MASK_ID = VOCAB - 1


@dataclass
class Forward:
    """What one pass does for one request, before requests are put together. T tokens."""

    kind: ForwardKind
    block: int
    iteration: int
    kv_len: int
    positions: NDArray[np.int64]  # [T]
    token_ids_in: NDArray[np.int64]  # [T]
    is_masked_in: NDArray[np.bool_]  # [T]
    argmax_ids: NDArray[np.int64]  # [T]
    p_argmax: NDArray[np.float64]  # [T]
    p_current: NDArray[np.float64]  # [T]
    accepted: NDArray[np.bool_]  # [T]
    edited: NDArray[np.bool_]  # [T]
    logits: NDArray[np.float64]  # [L, T, E] of the router
    cosines: NDArray[np.float32]  # [2, L]


class _Router:
    """Router logits of one request: a popularity of each layer, a taste of each position, and a drift."""

    def __init__(self, rng: np.random.Generator, popularity: NDArray[np.float64], drift: float) -> None:
        self._rng = rng
        self._popularity = popularity  # [L, E]
        self._drift = drift
        self._taste: NDArray[np.float64] | None = None

    def logits(self, num_tokens: int, fresh: bool, changed: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Logits of the next forward: near the last ones, farther for tokens that changed; new when `fresh`."""
        num_layers, num_experts = self._popularity.shape
        noise = self._rng.standard_normal((num_layers, num_tokens, num_experts))
        if fresh or self._taste is None:
            self._taste = noise
        else:
            keep = np.where(changed, 1 - 4 * self._drift, 1 - self._drift)[None, :, None]
            self._taste = keep * self._taste + np.sqrt(1 - keep**2) * noise
        return self._popularity[:, None, :] + self._taste


def _denoise(
    rng: np.random.Generator,
    router: _Router,
    *,
    block_length: int,
    num_blocks: int,
    prompt_length: int,
    accept_ratio: float,
    edits: bool,
) -> Iterator[Forward]:
    """Forwards of one request: prefill, then blocks by threshold decoding with unrolled loops and a commit."""
    num_layers = router._popularity.shape[0]
    no_cosine = np.full((2, num_layers), np.nan, np.float32)

    def forward(kind: ForwardKind, block: int, iteration: int, start: int, tokens: NDArray[np.int64]) -> Forward:
        nonlocal changed
        size = tokens.size
        masked = tokens == MASK_ID
        known = kind != ForwardKind.PREFILL
        p = rng.random((2, size)).astype(np.float32).astype(np.float64)
        drawn = Forward(
            kind=kind,
            block=block,
            iteration=iteration,
            kv_len=start,
            positions=np.arange(start, start + size),
            token_ids_in=tokens.copy(),
            is_masked_in=masked,
            argmax_ids=rng.integers(0, MASK_ID, size) if known else np.full(size, -1),
            p_argmax=p[0] if known else np.full(size, np.nan),
            p_current=np.where(masked, np.nan, p[1]) if known else np.full(size, np.nan),
            accepted=np.zeros(size, bool),
            edited=np.zeros(size, bool),
            logits=router.logits(size, iteration == 0, changed),
            cosines=(no_cosine if iteration == 0 else (0.9 + 0.1 * rng.random((2, num_layers))).astype(np.float32)),
        )
        if masked.any() and known:
            best = np.flatnonzero(masked)[np.argsort(-drawn.p_argmax[masked], kind="stable")]
            drawn.accepted[best[: 1 + rng.binomial(best.size - 1, accept_ratio)]] = True
        if edits and kind in (ForwardKind.DENOISE, ForwardKind.EDIT):
            drawn.edited[:] = ~masked & (drawn.argmax_ids != tokens) & (rng.random(size) < 0.2)
        changed = drawn.accepted | drawn.edited
        tokens[changed] = drawn.argmax_ids[changed]
        return drawn

    changed = np.zeros(prompt_length, bool)
    if prompt_length:
        yield forward(ForwardKind.PREFILL, -1, 0, 0, rng.integers(0, MASK_ID, prompt_length))
    for block in range(num_blocks):
        tokens = np.full(block_length, MASK_ID)
        changed = np.zeros(block_length, bool)
        start = prompt_length + block * block_length
        iteration = 0
        had_masks = True
        while had_masks and (tokens == MASK_ID).any():
            num_masked = int((tokens == MASK_ID).sum())
            for _ in range(1 if edits else max(min(num_masked // 8, 4), 2)):
                had_masks = bool((tokens == MASK_ID).any())
                kind = ForwardKind.DENOISE if had_masks else ForwardKind.IDLE
                yield forward(kind, block, iteration, start, tokens)
                iteration += 1
        if edits:
            while True:
                last = forward(ForwardKind.EDIT, block, iteration, start, tokens)
                yield last
                iteration += 1
                if not last.edited.any():
                    break
        elif had_masks:
            yield forward(ForwardKind.COMMIT, block, iteration, start, tokens)


def _route(logits: NDArray[np.float64], top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of the best experts, ascending, and their sigmoids normalised to sum to 1."""
    ids = np.sort(np.argpartition(-logits, top_k - 1, axis=-1)[..., :top_k], axis=-1)
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits, ids, -1)))
    return ids, scores / scores.sum(-1, keepdims=True)


def _signals(rng: np.random.Generator, logits: NDArray[np.float64]) -> Signals:
    num_layers, num_tokens, num_experts = logits.shape
    score_ids = np.argsort(-logits, axis=-1, kind="stable")[..., : min(NUM_SCORES, num_experts)]
    ahead = np.full((num_layers, MAX_AHEAD_DEPTH, num_tokens, min(NUM_AHEAD, num_experts)), -1)
    for depth in range(1, MAX_AHEAD_DEPTH + 1):
        guess = logits[depth:] + 0.3 * rng.standard_normal(logits[depth:].shape)
        ahead[: max(num_layers - depth, 0), depth - 1] = np.argsort(-guess, axis=-1)[..., : ahead.shape[-1]]
    return Signals(
        score_ids=score_ids,
        scores=1 / (1 + np.exp(-np.take_along_axis(logits, score_ids, -1))),
        input_norm=(1 + rng.random((num_layers, num_tokens))).astype(np.float32).astype(np.float64),
        sketch=rng.standard_normal((num_tokens, SKETCH_SIZE)).astype(np.float32).astype(np.float64),
        ahead_ids=ahead,
    )


def _join(
    rng: np.random.Generator, pass_id: int, forwards: dict[int, Forward], top_k: int, signals: bool, timed: bool
) -> Pass:
    """Put the forwards of several requests into one pass."""
    requests = sorted(forwards)
    parts = [forwards[r] for r in requests]
    logits = np.concatenate([p.logits for p in parts], axis=1)
    expert_ids, gates = _route(logits, top_k)

    def each(name: str) -> NDArray[np.int64]:
        return np.array([int(getattr(p, name)) for p in parts])

    def tokens(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(p, name) for p in parts])

    return frozen(
        Pass(
            pass_id=pass_id,
            requests=np.array(requests),
            blocks=each("block"),
            iterations=each("iteration"),
            kinds=each("kind"),
            num_tokens=np.array([p.positions.size for p in parts]),
            kv_lens=each("kv_len"),
            num_masked_in=np.array([int(p.is_masked_in.sum()) for p in parts]),
            num_accepted=np.array([int(p.accepted.sum()) for p in parts]),
            wall_ns=int(rng.integers(1_000, 1_000_000)) if timed else -1,
            cos_router_input=np.stack([p.cosines[0] for p in parts]),
            cos_layer_output=np.stack([p.cosines[1] for p in parts]),
            positions=tokens("positions"),
            token_ids_in=tokens("token_ids_in"),
            is_masked_in=tokens("is_masked_in"),
            argmax_ids=tokens("argmax_ids"),
            p_argmax=tokens("p_argmax"),
            p_current=tokens("p_current"),
            accepted=tokens("accepted"),
            edited=tokens("edited"),
            expert_ids=expert_ids,
            gates=gates,
            signals=_signals(rng, logits) if signals else None,
        )
    )


def change(pass_: Pass, **fields: Any) -> Pass:
    """A pass with some fields replaced; consistency is the caller's business."""
    return frozen(replace(pass_, **fields))


def random_passes(
    rng: np.random.Generator,
    *,
    num_layers: int = 3,
    num_experts: int = 16,
    top_k: int = 4,
    num_requests: int = 2,
    block_length: int = 4,
    num_blocks: int = 2,
    prompt_length: int | None = None,
    accept_ratio: float = 0.3,
    drift: float = 0.02,
    batch: int = 1,
    signals: bool = False,
    edits: bool = False,
    timed: bool = False,
    first_layer: int = 1,
) -> tuple[ModelShape, list[Pass]]:
    """A trace with falling masks, all kinds of forwards, and routing that stays close between forwards.

    Args:
        rng: the one source of randomness; the same state gives the same trace.
        prompt_length: tokens of every prompt; None draws a multiple of the block length, at least one block, and 0
            leaves prefill out.
        accept_ratio: share of the masks, beyond the best one, that a forward accepts.
        drift: how far routing moves between two forwards of a block, 0 to 0.25.
        batch: most requests in one pass; the next request joins when one has finished.
        edits: the loop edits decoded tokens and ends on edit forwards, without idle and commit.
        timed: draw wall_ns, which is -1 otherwise.
        first_layer: true id of the first MoE layer; the others follow it.
    """
    popularity = rng.standard_normal((num_layers, num_experts))
    shape = ModelShape(
        layer_ids=tuple(range(first_layer, first_layer + num_layers)),
        num_experts=num_experts,
        top_k=top_k,
        hidden=8,
        expert_intermediate=4,
        gate_scale=2.5,
        num_shared_experts=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab=VOCAB,
        dense_intermediate=16,
        num_dense_layers=1,
    )

    def start() -> Iterator[Forward]:
        prompt = int(rng.integers(1, 4)) * block_length if prompt_length is None else prompt_length
        return _denoise(
            rng,
            _Router(rng, popularity, drift),
            block_length=block_length,
            num_blocks=num_blocks,
            prompt_length=prompt,
            accept_ratio=accept_ratio,
            edits=edits,
        )

    waiting = list(range(num_requests))
    running: dict[int, Iterator[Forward]] = {}
    passes: list[Pass] = []
    while waiting or running:
        while waiting and len(running) < batch:
            request = waiting.pop(0)
            running[request] = start()
        forwards = {request: next(stream, None) for request, stream in running.items()}
        running = {request: stream for request, stream in running.items() if forwards[request] is not None}
        live = {request: forward for request, forward in forwards.items() if forward is not None}
        if live:
            passes.append(_join(rng, len(passes), live, top_k, signals, timed))
    return shape, passes


def metadata_for(shape: ModelShape, gate_dtype: str = "float32", **fields: Any) -> TraceMetadata:
    """Metadata of a generated trace."""
    fields = {"source": "synthetic:tests", "decode": {"loop": "dinfer", "block_length": 4}, "seed": 7} | fields
    return TraceMetadata(shape=shape, gate_dtype=gate_dtype, **fields)


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    max_layers: int = 3,
    max_experts: int = 12,
    max_requests: int = 3,
    max_block: int = 5,
    max_batch: int = 3,
    signals: bool | None = False,
) -> tuple[ModelShape, list[Pass]]:
    """Small traces of every form: top_k from 1 to num_experts, with and without prefill, batches, edits."""
    num_experts = draw(st.integers(2, max_experts))
    return random_passes(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        num_layers=draw(st.integers(1, max_layers)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 8))),
        num_requests=draw(st.integers(1, max_requests)),
        block_length=draw(st.integers(1, max_block)),
        num_blocks=draw(st.integers(1, 2)),
        prompt_length=draw(st.sampled_from([None, 0, 3])),
        accept_ratio=draw(st.sampled_from([0.0, 0.3, 1.0])),
        drift=draw(st.sampled_from([0.002, 0.02, 0.25])),
        batch=draw(st.integers(1, max_batch)),
        signals=draw(st.booleans()) if signals is None else signals,
        edits=draw(st.booleans()),
        timed=draw(st.booleans()),
        first_layer=draw(st.integers(0, 2)),
    )
