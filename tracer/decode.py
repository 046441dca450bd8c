"""Decoding: which forward passes a block-diffusion model runs to answer prompts, by the loop of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tracer.decode_dinfer import decode_dinfer
from tracer.decode_hf import decode_hf20, decode_hf21
from tracer.decode_sample import Prediction, predict
from tracer.decode_settings import DecodeError, DecodeSettings
from tracer.decode_sglang import decode_joint_threshold, decode_low_confidence
from tracer.decode_state import Decoding, Ending, ForwardEvent, Reply, Steps, Window
from tracer.schema import ForwardKind

LOOPS: dict[str, Callable[[Decoding], Steps[Ending]]] = {
    "dinfer": decode_dinfer,
    "hf20": decode_hf20,
    "hf21": decode_hf21,
    "sglang_low_confidence": decode_low_confidence,
    "sglang_joint_threshold": decode_joint_threshold,
}


class BatchModel(Protocol):
    """What the loops ask of a model, which answers requests side by side."""

    def open(self, request: int, num_positions: int) -> None:
        """A request begins, which will take this many positions at most."""
        ...

    def forward(self, windows: Sequence[Window]) -> torch.Tensor:
        """Logits [N, V] of the tokens of all windows, one window after the other."""
        ...

    def close(self, request: int) -> None:
        """A request has ended."""
        ...


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
    generated_ids: list[int]  # the answer: at most gen_length new tokens, without an end of text
    returned_ids: list[int]  # what the engine's own call returns


class _Running(NamedTuple):
    """A request that is being decoded, and the forward that it waits for."""

    decoding: Decoding
    steps: Steps[Ending]
    window: Window


def decode_prompts(
    model: BatchModel,
    prompts: Iterable[Sequence[int] | NDArray[np.int64]],
    settings: DecodeSettings,
    on_pass: Callable[[list[ForwardEvent]], None],
    on_result: Callable[[int, DecodeResult], None] = lambda request, result: None,
    first_request: int = 0,
) -> list[DecodeResult]:
    """Decode prompts, `settings.batch` of them side by side, and report every pass as soon as it has run.

    When a request has ended, the next one joins: the forwards before its first block run in passes of their own, then
    it shares the passes of the others. What is written does not depend on who else runs.

    Args:
        model: nothing is open in it.
        prompts: token ids of each; they may be empty, but may not hold the mask.
        settings: loop, lengths, thresholds and special ids.
        on_pass: called with the forwards of a pass, one for each request that took part, ascending.
        on_result: called with each request that has ended.
        first_request: number of the first prompt.

    Returns:
        One result for each prompt, in order.

    Raises:
        DecodeError: a prompt holds a mask, a loop cannot end, or the model's logits are not finite.
    """
    waiting = enumerate(prompts, start=first_request)
    running: dict[int, _Running] = {}
    results: dict[int, DecodeResult] = {}
    events: list[ForwardEvent] = []
    while True:
        while len(running) < settings.batch and (following := next(waiting, None)) is not None:
            running[following[0]] = _start(model, *following, settings, events.append)
        if not running:
            return [results[request] for request in sorted(results)]
        chosen = _next_pass(running)
        replies = _run([running[request].window for request in chosen], model)
        for request, reply in zip(chosen, replies, strict=True):
            decoding, steps, _ = running[request]
            try:
                running[request] = _Running(decoding, steps, steps.send(reply))
            except StopIteration as stop:
                results[request] = _result(decoding, stop.value)
                del running[request]
        on_pass(events.copy())
        events.clear()
        for request in chosen:
            if request in results:
                model.close(request)
                on_result(request, results[request])


def _start(
    model: BatchModel,
    request: int,
    prompt_ids: Sequence[int] | NDArray[np.int64],
    settings: DecodeSettings,
    on_forward: Callable[[ForwardEvent], None],
) -> _Running:
    """Begin a request, up to the first forward that it asks for."""
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    if settings.mask_id in prompt:
        raise DecodeError(
            f"request {request}: the prompt holds the mask token {settings.mask_id}, which stands for tokens to be decoded"
        )
    model.open(request, settings.num_positions(len(prompt)))
    decoding = Decoding(prompt, settings, on_forward, request)
    steps = LOOPS[settings.loop](decoding)
    return _Running(decoding, steps, next(steps))


def _next_pass(running: dict[int, _Running]) -> list[int]:
    """Requests of the next pass: one that is prefilled, or else all."""
    prefilled = [request for request, row in running.items() if row.window.kind == ForwardKind.PREFILL]
    return prefilled[:1] or sorted(running)


def _run(windows: list[Window], model: BatchModel) -> list[Reply]:
    """Run windows in one pass, and cut what it gave."""
    token_ids = np.concatenate([window.token_ids for window in windows])
    began = perf_counter_ns()
    logits = model.forward(windows)
    prediction = predict(logits, token_ids)
    wall_ns = perf_counter_ns() - began
    replies = []
    start = 0
    for window in windows:
        rows = slice(start, start + len(window.token_ids))
        replies.append(Reply(logits[rows], Prediction._make(values[rows] for values in prediction), wall_ns))
        start = rows.stop
    return replies


def _result(decoding: Decoding, ending: Ending) -> DecodeResult:
    return DecodeResult(
        token_ids=decoding.token_ids,
        prompt_length=decoding.prompt_length,
        gen_length=decoding.settings.gen_length,
        eos_id=decoding.settings.eos_id,
        generated_ids=ending.generated_ids.tolist(),
        returned_ids=ending.returned_ids.tolist(),
    )
