"""Decode loops: which forward passes a block-diffusion model runs to answer a prompt, and what each of them accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tracer.schema import ForwardKind, TraceError

TIE = np.float32(1e-5)  # dInfer accepts what is this close to the best
TOKENS_PER_FORWARD = 8  # what dInfer expects when it decides how many forwards to unroll
MIN_UNROLL, MAX_UNROLL = 2, 4


class DecodeError(TraceError):
    """A request cannot be decoded to its end; the message says which one, in which block, and why."""


class BlockModel(Protocol):
    """What a loop asks of a model: one forward over consecutive positions, on top of what was committed."""

    def forward(self, token_ids: NDArray[np.int64], start: int, commit: bool) -> torch.Tensor:
        """Logits [T, V] of the tokens at positions start to start + T - 1, which see all committed positions.

        With `commit` their keys and values are stored, and positions below start + T are committed from then on.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How prompts are answered. Greedy; `gen_length` counts new tokens, before rounding up to whole blocks.

    Raises:
        TraceError: a value is out of range, or no loop has this name.
    """

    mask_id: int
    eos_id: int
    loop: str = "dinfer"
    block_length: int = 16
    threshold: float = 0.9
    gen_length: int = 128
    early_stop: bool = True

    def __post_init__(self) -> None:
        if self.block_length < 1:
            raise TraceError(f"block_length {self.block_length}: must be at least 1")
        if self.gen_length < 1:
            raise TraceError(f"gen_length {self.gen_length}: must be at least 1")
        if not 0 <= self.threshold <= 1:
            raise TraceError(f"threshold {self.threshold}: must be from 0 to 1")
        if self.mask_id == self.eos_id:
            raise TraceError(f"mask and end of text have the same id {self.mask_id}: must be different tokens")
        if self.loop not in LOOPS:
            raise TraceError(f"decode loop {self.loop!r}: allowed are {', '.join(LOOPS)}")

    def num_positions(self, prompt_length: int) -> int:
        """Positions of a prompt and its new tokens, rounded up to whole blocks."""
        num_blocks = -(-(prompt_length + self.gen_length) // self.block_length)
        return num_blocks * self.block_length


class Prediction(NamedTuple):
    """What one forward says of each of its positions; probabilities are of the raw logits, in float32."""

    argmax_ids: NDArray[np.int64]  # [T]
    p_argmax: NDArray[np.float32]  # [T]
    p_current: NDArray[np.float32]  # [T] of the token that was fed in


@dataclass(frozen=True, eq=False)
class ForwardEvent:
    """One forward pass of one request, as the loop saw it."""

    request: int
    block: int  # from 0 at the first block that is decoded; -1 in prefill
    iteration: int  # within the block, from 0
    kind: ForwardKind
    positions: NDArray[np.int64]  # [T] absolute
    token_ids_in: NDArray[np.int64]  # [T]
    is_masked_in: NDArray[np.bool_]  # [T]
    argmax_ids: NDArray[np.int64]  # [T]
    p_argmax: NDArray[np.float32]  # [T]
    p_current: NDArray[np.float32]  # [T] NaN for a mask
    accepted: NDArray[np.bool_]  # [T] masks that this forward turned into tokens
    kv_len: int  # committed positions before this forward
    wall_ns: int  # from the call of the model to its probabilities on the host


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """A decoded request: prompt, new tokens, and what rounding up to a block or an early stop put after them.

    Positions from prompt_length + gen_length on are decoded like others, and count as accepted in the trace, but
    are no part of `generated_ids`. What an early stop fills with the end of text was never decoded.
    """

    token_ids: NDArray[np.int64]  # [blocks * block_length]
    prompt_length: int
    gen_length: int
    eos_id: int

    @property
    def generated_ids(self) -> list[int]:
        """The answer: at most gen_length new tokens, every end of text dropped, whatever stands after it kept."""
        answer = self.token_ids[self.prompt_length : self.prompt_length + self.gen_length]
        return answer[answer != self.eos_id].tolist()


def predict(logits: torch.Tensor, token_ids: NDArray[np.int64]) -> Prediction:
    """Read logits [T, V]: the likeliest token, its probability, and that of the token fed in."""
    probabilities = torch.softmax(logits.float(), dim=-1)
    best = logits.argmax(dim=-1)
    current = torch.as_tensor(token_ids, device=logits.device)

    def probability(ids: torch.Tensor) -> NDArray[np.float32]:
        return probabilities.gather(1, ids[:, None])[:, 0].cpu().numpy()

    return Prediction(best.cpu().numpy(), probability(best), probability(current))


def accept_threshold(
    confidence: NDArray[np.float32], eligible: NDArray[np.bool_], threshold: float
) -> NDArray[np.bool_]:
    """Accept what reaches the threshold, and in any case the best and all within 1e-5 of it.

    Args:
        confidence: [T], probability of the likeliest token.
        eligible: [T], positions that may be accepted. None eligible, none accepted.
        threshold: compared in float32, equality counts.
    Source:
        dInfer, ThresholdParallelDecoder.
    """
    if not eligible.any():
        return np.zeros_like(eligible)
    best = confidence[eligible].max()
    return eligible & (confidence >= min(np.float32(threshold), best - TIE))


def accept_dinfer(guess: Prediction, masked: NDArray[np.bool_], settings: DecodeSettings) -> NDArray[np.bool_]:
    """The threshold rule over masked positions, except where the mask itself is the likeliest token."""
    return accept_threshold(guess.p_argmax, masked & (guess.argmax_ids != settings.mask_id), settings.threshold)


AcceptRule = Callable[[Prediction, NDArray[np.bool_], DecodeSettings], NDArray[np.bool_]]


class Decoding:
    """The tokens of a request that is being decoded, and forwards over stretches of them that report themselves."""

    def __init__(
        self,
        model: BlockModel,
        prompt_ids: NDArray[np.int64],
        settings: DecodeSettings,
        on_forward: Callable[[ForwardEvent], None],
        request: int,
    ) -> None:
        self.token_ids = np.full(settings.num_positions(len(prompt_ids)), settings.mask_id, dtype=np.int64)
        self.token_ids[: len(prompt_ids)] = prompt_ids
        self.settings = settings
        self.prompt_length = len(prompt_ids)
        self.request = request
        self._model = model
        self._on_forward = on_forward

    def num_masked(self, start: int, stop: int) -> int:
        """Masks that are left in [start, stop)."""
        return int(np.count_nonzero(self.token_ids[start:stop] == self.settings.mask_id))

    def forward(
        self,
        kind: ForwardKind,
        block: int,
        iteration: int,
        start: int,
        stop: int,
        commit: bool = False,
        accept: AcceptRule | None = None,
    ) -> int:
        """Run positions [start, stop), write what the rule accepts there, if there is one, and report the forward.

        Returns:
            Number of tokens accepted.
        """
        token_ids = self.token_ids[start:stop].copy()
        masked = token_ids == self.settings.mask_id
        began = perf_counter_ns()
        guess = predict(self._model.forward(token_ids, start, commit), token_ids)
        wall_ns = perf_counter_ns() - began
        if not np.isfinite(guess.p_argmax).all():
            raise DecodeError(f"request {self.request}, block {block}, iteration {iteration}: logits are not finite")
        accepted = accept(guess, masked, self.settings) if accept else np.zeros_like(masked)
        self.token_ids[start:stop] = np.where(accepted, guess.argmax_ids, token_ids)
        self._on_forward(
            ForwardEvent(
                request=self.request,
                block=block,
                iteration=iteration,
                kind=kind,
                positions=np.arange(start, stop),
                token_ids_in=token_ids,
                is_masked_in=masked,
                argmax_ids=guess.argmax_ids,
                p_argmax=guess.p_argmax,
                p_current=np.where(masked, np.float32("nan"), guess.p_current),
                accepted=accepted,
                kv_len=start,
                wall_ns=wall_ns,
            )
        )
        return int(np.count_nonzero(accepted))


def decode_dinfer(decoding: Decoding) -> None:
    """Decode as dInfer's BlockDiffusionLLM does: prefill, then block after block on committed keys and values.

    A prompt shorter than a block is prefilled with the masks of its block; nothing is committed then.

    Raises:
        DecodeError: an unroll accepts nothing while masks remain. Differs: dInfer would run for ever.
    Source:
        dInfer, BlockDiffusionLLM and BlockDiffusionRunner.
    """
    length, tokens = decoding.settings.block_length, decoding.token_ids
    first = decoding.prompt_length // length * length
    decoding.forward(ForwardKind.PREFILL, -1, 0, 0, max(first, length), commit=first > 0)
    for block, start in enumerate(range(first, len(tokens), length)):
        stop = start + length
        _decode_block_dinfer(decoding, block, start, stop)
        if decoding.settings.early_stop and decoding.settings.eos_id in tokens[start:stop]:
            tokens[stop:] = decoding.settings.eos_id
            return


def _decode_block_dinfer(decoding: Decoding, block: int, start: int, stop: int) -> None:
    """Denoise one block and commit it: by its last idle forward, or else by a forward of its own."""
    iteration = num_masked = 0
    while remaining := decoding.num_masked(start, stop):
        unroll = max(min(remaining // TOKENS_PER_FORWARD, MAX_UNROLL), MIN_UNROLL)
        num_accepted = 0
        for step in range(unroll):
            num_masked = decoding.num_masked(start, stop)
            kind = ForwardKind.DENOISE if num_masked else ForwardKind.IDLE
            commit = num_masked == 0 and step == unroll - 1
            num_accepted += decoding.forward(kind, block, iteration, start, stop, commit, accept_dinfer)
            iteration += 1
        if num_accepted == 0:
            raise DecodeError(
                f"request {decoding.request}, block {block}, iteration {iteration - 1}: nothing can be accepted, the model predicts a mask at all {remaining} masked positions"
            )
    if num_masked:
        decoding.forward(ForwardKind.COMMIT, block, iteration, start, stop, commit=True)


LOOPS: dict[str, Callable[[Decoding], None]] = {"dinfer": decode_dinfer}


def decode_request(
    model: BlockModel,
    prompt_ids: list[int] | NDArray[np.int64],
    settings: DecodeSettings,
    on_forward: Callable[[ForwardEvent], None],
    request: int = 0,
) -> DecodeResult:
    """Decode one request and report each of its forwards, in order, as soon as it has run.

    Args:
        model: fresh, with nothing committed.
        prompt_ids: [P]; may be empty, may not hold the mask.
        settings: loop, lengths, threshold and special ids.
        on_forward: called once for each forward pass.
        request: index that events and errors carry.

    Raises:
        DecodeError: the prompt holds a mask, the loop cannot end, or the model's logits are not finite.
    """
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    if settings.mask_id in prompt:
        raise DecodeError(
            f"request {request}: the prompt holds the mask token {settings.mask_id}, which stands for tokens to be decoded"
        )
    decoding = Decoding(model, prompt, settings, on_forward, request)
    LOOPS[settings.loop](decoding)
    return DecodeResult(decoding.token_ids, decoding.prompt_length, settings.gen_length, settings.eos_id)
