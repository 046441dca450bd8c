"""The forwards of made-up requests: what a threshold loop would feed in and accept, without a model behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.decode_accept import accept_threshold, num_unrolled
from tracer.schema import ForwardKind, TraceError

MAX_LENGTH = 1 << 20  # tokens; far more than any model attends to
MAX_VOCAB = 1 << 31  # what a trace has token ids for


class DecodeScript(NamedTuple):
    """How made-up requests are decoded. No published number: all of it is assumed, but block length and threshold.

    Raises:
        TraceError: by `check`, for a value out of range.
    """

    block_length: int = 16
    gen_length: int = 128  # new tokens of a request, before rounding up to whole blocks
    threshold: float = 0.9
    prompt_length: int = 64  # mean; each request's own is drawn from half to one and a half times it
    accept_ratio: float = 0.25  # chance of a masked position to reach the threshold in a forward
    vocab: int = 157184  # the last token id is the mask

    def check(self) -> None:
        """Refuse values that no loop could run with."""
        for name in ("block_length", "gen_length", "prompt_length"):
            if not 1 <= getattr(self, name) <= MAX_LENGTH:
                raise TraceError(f"{name} {getattr(self, name)}: must be 1 to {MAX_LENGTH}")
        for name in ("threshold", "accept_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise TraceError(f"{name} {getattr(self, name)}: must be from 0 to 1")
        if not 2 <= self.vocab <= MAX_VOCAB:
            raise TraceError(f"vocab {self.vocab}: must be 2, a token and the mask, to {MAX_VOCAB}")

    @property
    def mask_id(self) -> int:
        """Token id that stands for a token to be decoded."""
        return self.vocab - 1


class Forward(NamedTuple):
    """What one pass does for one request, all but its routing. T tokens."""

    request: int
    block: int
    iteration: int
    kind: ForwardKind
    kv_len: int
    positions: NDArray[np.int64]  # [T]
    token_ids_in: NDArray[np.int64]  # [T]
    is_masked_in: NDArray[np.bool_]  # [T]
    argmax_ids: NDArray[np.int64]  # [T]
    p_argmax: NDArray[np.float64]  # [T] of the token that stands there, where one does
    accepted: NDArray[np.bool_]  # [T]

    @property
    def p_current(self) -> NDArray[np.float64]:
        """Probability of the token that was fed in, [T]; NaN for a mask."""
        return np.where(self.is_masked_in, np.nan, self.p_argmax)


def script_request(rng: np.random.Generator, request: int, script: DecodeScript) -> Iterator[Forward]:
    """The forwards of one request: prefill, then block after block.

    Each masked position reaches the threshold with probability `accept_ratio`, and what is accepted follows from the
    confidences by the loop's own rule, so at least one token a forward. A decoded position stays above it. Token ids
    are uniform. There is no early stop.

    Source:
        dInfer, BlockDiffusionRunner and ThresholdParallelDecoder, for the order of forwards and the rule.
    """
    low, high = -(-script.prompt_length // 2), script.prompt_length * 3 // 2
    length = script.block_length
    prompt = int(rng.integers(low, high + 1))
    num_blocks = -(-(prompt + script.gen_length) // length)
    tokens = np.full(num_blocks * length, script.mask_id)
    tokens[:prompt] = rng.integers(0, script.mask_id, prompt)

    def forward(kind: ForwardKind, block: int, iteration: int, start: int, stop: int) -> Forward:
        here = tokens[start:stop]
        masked = here == script.mask_id
        p = _confidences(rng, masked, script)
        accepted = accept_threshold(p, masked & (kind == ForwardKind.DENOISE), script.threshold)
        made = Forward(
            request,
            block,
            iteration,
            kind,
            start,
            np.arange(start, stop),
            here.copy(),
            masked,
            np.where(masked, rng.integers(0, script.mask_id, here.size), here),
            p.astype(np.float64),
            accepted,
        )
        here[accepted] = made.argmax_ids[accepted]
        return made

    first = prompt // length * length
    yield forward(ForwardKind.PREFILL, -1, 0, 0, max(first, length))
    for block, start in enumerate(range(first, tokens.size, length)):
        stop = start + length
        iteration, had_masks = 0, False
        while remaining := int(np.count_nonzero(tokens[start:stop] == script.mask_id)):
            for _ in range(num_unrolled(remaining)):
                had_masks = bool((tokens[start:stop] == script.mask_id).any())
                yield forward(ForwardKind.DENOISE if had_masks else ForwardKind.IDLE, block, iteration, start, stop)
                iteration += 1
        if had_masks:
            yield forward(ForwardKind.COMMIT, block, iteration, start, stop)


def _confidences(rng: np.random.Generator, masked: NDArray[np.bool_], script: DecodeScript) -> NDArray[np.float32]:
    """Above the threshold where a token stands, and for a share of the masks; uniform within either part."""
    reaches = ~masked | (rng.random(masked.size) < script.accept_ratio)
    drawn = rng.random(masked.size)
    p = np.where(reaches, script.threshold + (1 - script.threshold) * drawn, script.threshold * drawn)
    return p.astype(np.float32)
