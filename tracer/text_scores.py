"""How well a small model writes code and prose: what compiles, its loss on held-out documents, and samples."""

from __future__ import annotations

import codeop
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from tracer.corpus import documents, prompts
from tracer.llada2 import LLaDA2
from tracer.pretrain_batches import draw_batch, encode_documents, pack
from tracer.pretrain_configs import PretrainConfig
from tracer.pretrain_scores import Answer, answer_together, decode_settings
from tracer.tokenizer import Tokenizer

NUM_TOKENS = 128
_NUM_LOSS_DOCUMENTS = 1000
_NUM_LOSS_BATCHES = 4


def compiles(prompt: str, answer: str, is_ended: bool) -> bool:
    """Whether a prompt and its answer are Python, as far as they go.

    An answer that came to its end must compile as it stands, behind its prompt. One that was cut off by the limit
    loses its last line, which may be part of one, and lines before it that a backslash continues; the rest must hold a
    line of code or comment, and either compile or be a beginning of something that does: all that may be wrong with it
    is that it stops.
    """
    if not is_ended:
        lines = answer[: answer.rfind("\n") + 1].splitlines(keepends=True)
        while lines and lines[-1].endswith("\\\n"):
            lines.pop()
        answer = "".join(lines)
    if not answer.strip():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as a comparison with `is`
        try:
            code = codeop.compile_command(prompt + answer, "<answer>", "exec")
        except (SyntaxError, ValueError, OverflowError):
            return False
    return code is not None or not is_ended


def text_summary(
    model: LLaDA2,
    tokenizer: Tokenizer,
    config: PretrainConfig,
    workload: str,
    num_prompts: int,
    block_length: int,
    answer: Answer = answer_together,
) -> dict[str, Any]:
    """Have held-out prompts of code or prose continued by up to 128 tokens; ready for JSON.

    Returns:
        Tokens per denoising forward, how many answers ended, for code how many compile (`compiles` says which those
        are) and how many of the ended ones do, the held-out loss, and three prompts with their answers.
    """
    chosen = [document.prompt for document in prompts(workload, num_prompts, packages=config.packages)]
    settings = decode_settings(tokenizer, block_length, NUM_TOKENS)
    texts, tokens_per_denoise, is_ended = answer(model, tokenizer, chosen, settings)
    summary = {
        "workload": workload,
        "block_length": block_length,
        "threshold": settings.threshold,
        "num_prompts": num_prompts,
        "num_ended": sum(is_ended),
        "tokens_per_denoise": tokens_per_denoise,
        "heldout_loss": heldout_loss(model, tokenizer, config, workload, block_length),
    }
    if workload == "code":
        right = [compiles(*given) for given in zip(chosen, texts, is_ended, strict=True)]
        summary["num_compiled"] = sum(right)
        summary["num_compiled_ended"] = sum(r and e for r, e in zip(right, is_ended, strict=True))
    return summary | {"samples": _samples(chosen[:3], texts[:3])}


@torch.inference_mode()
def heldout_loss(
    model: LLaDA2, tokenizer: Tokenizer, config: PretrainConfig, workload: str, block_length: int = 16
) -> float:
    """Mean cross-entropy (nats) of the masked tokens of held-out documents, masked as in training.

    Each block has a ratio of its own, prompts are mostly given, and every masked token counts alike, whatever its
    ratio: the training's loss has weights, and block lengths of all kinds. Always of the same documents and masks.

    Args:
        model: to measure.
        tokenizer: of the model.
        config: of its training.
        workload: one of the corpus's.
        block_length: of the blocks.
    """
    heldout = documents(workload, "heldout", seed=1, packages=config.packages, max_problems=config.max_problems)
    chosen = islice(heldout, _NUM_LOSS_DOCUMENTS)
    pool = pack(encode_documents(chosen, tokenizer, config.context), config.context, tokenizer.eos_id)
    pools = {workload: pool.to(model.device)}
    alone = replace(config, shares={workload: 1.0})
    generator = torch.Generator(model.device).manual_seed(0)
    total, num_masked = 0.0, 0
    for _ in range(_NUM_LOSS_BATCHES):
        batch = draw_batch(pools, alone, block_length, tokenizer.mask_id, generator)
        hidden = model.hidden_states(batch.token_ids, batch.positions, mask=batch.mask)
        is_masked = batch.weights > 0
        logits = model.head(hidden[:, : batch.targets.shape[1]][is_masked])
        total += float(torch.nn.functional.cross_entropy(logits, batch.targets[is_masked], reduction="sum"))
        num_masked += int(is_masked.sum())
    return total / num_masked


def _samples(chosen: Sequence[str], texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "answer": text} for prompt, text in zip(chosen, texts, strict=True)]
