"""How well a small model answers word problems it never saw, beside the best constant answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from tracer.capture import trace_prompts
from tracer.corpus import Document, prompts
from tracer.decode_accept import TIE
from tracer.decode_settings import DecodeSettings
from tracer.decode_state import ForwardEvent
from tracer.llada2 import LLaDA2, block_causal_mask
from tracer.problems import OPERATIONS, final_answer
from tracer.schema import ForwardKind, Pass
from tracer.tokenizer import Tokenizer


class Answers(NamedTuple):
    """What a model wrote to some prompts."""

    texts: list[str]  # up to their ends
    tokens_per_denoise: float  # accepted by a denoising forward of one request
    is_ended: list[bool]  # whether the text came to its end, and was not cut off by the limit


Answer = Callable[[LLaDA2, Tokenizer, Sequence[str], DecodeSettings], Answers]


@dataclass(frozen=True)
class Score:
    """Exact final answers among problems that nobody trained on."""

    num_problems: int
    num_right: int
    num_right_constant: int  # the most frequent answer of these very problems, given to all of them
    right_by_operations: dict[int, tuple[int, int]]  # right and all, by number of operations
    right_by_sign: dict[str, tuple[int, int]]  # right and all of those with this sign in their solution
    tokens_per_denoise: float
    texts: list[str]

    @property
    def accuracy(self) -> float:
        """Share of the problems answered right."""
        return self.num_right / self.num_problems


def decode_settings(tokenizer: Tokenizer, block_length: int, gen_length: int = 64) -> DecodeSettings:
    """Greedy decoding at threshold 0.9; 64 tokens are enough for every worked solution."""
    return DecodeSettings(
        mask_id=tokenizer.mask_id,
        eos_id=tokenizer.eos_id,
        block_length=block_length,
        threshold=0.9,
        gen_length=gen_length,
    )


def score(problems: Sequence[Document], answer: Callable[[Sequence[str]], Answers]) -> Score:
    """Have problems answered, and count the answers that are right."""
    texts, tokens_per_denoise, _ = answer([problem.prompt for problem in problems])
    right = [final_answer(text) == problem.answer for text, problem in zip(texts, problems, strict=True)]
    operations = [problem.num_operations for problem in problems]

    def right_among(chosen: list[bool]) -> tuple[int, int]:
        return sum(r for r, c in zip(right, chosen, strict=True) if c), sum(chosen)

    return Score(
        num_problems=len(problems),
        num_right=sum(right),
        num_right_constant=Counter(problem.answer for problem in problems).most_common(1)[0][1],
        right_by_operations={
            number: right_among([n == number for n in operations]) for number in sorted(set(operations))
        },
        right_by_sign={
            sign: right_among([f" {sign} " in problem.completion for problem in problems]) for sign in OPERATIONS
        },
        tokens_per_denoise=tokens_per_denoise,
        texts=texts,
    )


def score_summary(
    model: LLaDA2, tokenizer: Tokenizer, num_problems: int, block_length: int, answer: Answer
) -> dict[str, Any]:
    """Score a model on held-out word problems; numbers and three of the answers, ready for JSON."""
    problems = prompts("arithmetic", num_problems)
    settings = decode_settings(tokenizer, block_length)
    found = score(problems, lambda texts: answer(model, tokenizer, texts, settings))
    texts = [problem.prompt + text for problem, text in zip(problems[:3], found.texts[:3], strict=True)]
    summary = {"block_length": block_length, "threshold": settings.threshold, "accuracy": round(found.accuracy, 4)}
    return summary | asdict(found) | {"texts": texts}


class _Discard:
    """Where the passes of a scored model go."""

    def write(self, pass_: Pass, /) -> None:
        """Keep nothing."""


def answer_each(model: LLaDA2, tokenizer: Tokenizer, texts: Sequence[str], settings: DecodeSettings) -> Answers:
    """Answer prompts one by one, by the decode loop that traces are recorded with."""
    num_accepted = num_forwards = 0

    def count(event: ForwardEvent) -> None:
        nonlocal num_accepted, num_forwards
        if event.kind == ForwardKind.DENOISE:
            num_accepted += int(event.accepted.sum())
            num_forwards += 1

    encoded = [tokenizer.encode(text) for text in texts]
    results = trace_prompts(model, encoded, settings, _Discard(), on_forward=count)
    answers = [result.token_ids[result.prompt_length :].tolist() for result in results]
    return _answers(answers, num_accepted / num_forwards, tokenizer, settings)


@torch.inference_mode()
def answer_together(model: LLaDA2, tokenizer: Tokenizer, texts: Sequence[str], settings: DecodeSettings) -> Answers:
    """Answer prompts in one batch without a cache, which is quick on a GPU; the rule is that of `answer_each`.

    Differs: the mask is never predicted, so that an untrained model comes to an end as well.
    """
    device, length = model.device, settings.block_length
    encoded = [tokenizer.encode(text) for text in texts]
    num_positions = torch.tensor([settings.num_positions(len(prompt_ids)) for prompt_ids in encoded], device=device)
    ids = torch.full((len(texts), int(num_positions.max())), settings.mask_id)
    for row, prompt_ids in zip(ids, encoded, strict=True):
        row[: len(prompt_ids)] = torch.tensor(prompt_ids)
    ids = ids.to(device)
    is_done = torch.zeros(len(texts), dtype=torch.bool, device=device)
    num_accepted = num_forwards = 0
    for start in range(0, ids.shape[1], length):
        stop = start + length
        block = ids[:, start:stop]  # a view: what is accepted stands in ids at once
        is_done |= num_positions <= start
        is_active = (block == settings.mask_id).any(1) & ~is_done
        was_active = is_active
        while is_active.any():
            mask = block_causal_mask(stop, length, device)
            hidden = model.hidden_states(ids[:, :stop], torch.arange(stop, device=device), mask=mask)
            logits = model.head(hidden[:, start:])
            logits[..., settings.mask_id] = -torch.inf
            confidence, best = logits.softmax(-1).max(-1)
            eligible = (block == settings.mask_id) & is_active[:, None]
            highest = confidence.masked_fill(~eligible, 0).amax(1, keepdim=True)
            accepted = eligible & (confidence >= (highest - float(TIE)).clamp(max=settings.threshold))
            block.copy_(torch.where(accepted, best, block))
            num_accepted += int(accepted.sum())
            num_forwards += int(is_active.sum())
            is_active = (block == settings.mask_id).any(1) & ~is_done
        is_done |= was_active & (block == settings.eos_id).any(1)
        if is_done.all():
            break
    answers = [row[len(prompt_ids) :] for row, prompt_ids in zip(ids.tolist(), encoded, strict=True)]
    return _answers(answers, num_accepted / num_forwards, tokenizer, settings)


def _answers(
    answers: list[list[int]], tokens_per_denoise: float, tokenizer: Tokenizer, settings: DecodeSettings
) -> Answers:
    """Cut ids at the end of text or at the limit, whichever comes first."""
    cut = [answer[: settings.gen_length] for answer in answers]
    texts = [tokenizer.decode(takewhile(lambda i: i != settings.eos_id, answer)) for answer in cut]
    return Answers(texts, tokens_per_denoise, [settings.eos_id in answer for answer in cut])
