"""Block-diffusion training of small LLaDA2-shaped models, within a time limit."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracer import checkpoint
from tracer.corpus import documents, prompts, summary
from tracer.llada2 import LLaDA2
from tracer.pretrain_batches import Pool, draw_batch, encode_documents, pack
from tracer.pretrain_configs import BLOCK_LENGTHS, CONFIGS, PretrainConfig, find_config
from tracer.pretrain_scores import answer_each, answer_together, decode_settings, score, score_summary
from tracer.pretrain_step import Trainer, learning_rate
from tracer.schema import TraceError
from tracer.shipped import find_model
from tracer.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

CURVE_FILE = "loss.jsonl"
SCORES_FILE = "scores.jsonl"
CHECKPOINT = "checkpoint"
_NUM_CURVE_POINTS = 100
_NUM_CHECKPOINTS = 5
_TOKENIZER_DOCUMENTS = 20_000
_NUM_QUICK_PROBLEMS = 64
_QUICK_BLOCK_LENGTH = 16


def prepare(config: PretrainConfig) -> tuple[Tokenizer, dict[str, Pool]]:
    """Train the tokenizer on a part of the corpus, and pack all of it."""
    corpus = {
        workload: list(
            islice(
                documents(workload, "train", config.seed, config.packages, config.max_problems),
                config.num_documents[workload],
            )
        )
        for workload in config.shares
    }
    tokenizer = train_tokenizer(
        (document.text for texts in corpus.values() for document in texts[:_TOKENIZER_DOCUMENTS]), config.vocab_size
    )
    pools = {
        workload: pack(encode_documents(texts, tokenizer, config.context), config.context, tokenizer.eos_id)
        for workload, texts in corpus.items()
    }
    return tokenizer, pools


def save(model: LLaDA2, tokenizer: Tokenizer, directory: Path, training: Mapping[str, Any]) -> None:
    """Write model, tokenizer and facts of the training to a directory, in place of what it holds.

    The new one is complete before it moves.
    """
    fresh, old = directory.with_name(f".{directory.name}-new"), directory.with_name(f".{directory.name}-old")
    for rest in (fresh, old):
        if rest.exists():
            shutil.rmtree(rest)
    checkpoint.save(model, fresh)
    tokenizer.save(fresh)
    (fresh / checkpoint.TRAINING_NAME).write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    if old.exists():
        shutil.rmtree(old)


def train(
    config: PretrainConfig,
    directory: Path,
    *,
    seconds: float,
    device: torch.device,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[LLaDA2, Tokenizer]:
    """Train a model until the time is over, and write what there is as it comes.

    Every step draws its own block length. No step begins at or after the limit. The directory gets the learning
    curve, a line at each hundredth of the time, and the checkpoint, again at each fifth; its training.json says how
    long it was trained.

    Args:
        config: what to train.
        directory: must not exist, or be empty.
        seconds: limit of the whole call, preparation of the corpus included.
        device: bfloat16 weights are used on CUDA, fp32 elsewhere.
        report: takes lines of progress.
        clock: seconds that have passed since some fixed time.

    Raises:
        TraceError: the directory holds something, or the preparation alone takes all the time.
    """
    began = clock()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise TraceError(f"{directory}: is not empty; remove it or name another")
    torch.manual_seed(config.seed)
    tokenizer, pools = prepare(config)
    pools = {workload: pool.to(device) for workload, pool in pools.items()}
    model = LLaDA2(config.model_config(config.vocab_size, tokenizer.eos_id)).to(device)
    trainer = Trainer(model.to(_dtype(device)), config)
    start, limit = clock(), began + seconds
    if start >= limit:
        raise TraceError(f"time limit of {seconds:.0f} s: preparation alone took {start - began:.0f} s")

    def keep(num_steps: int, share: float) -> None:
        training = {
            "config": config.name,
            "seed": config.seed,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "minutes": round((start - began + share * (limit - start)) / 60, 2),
            "steps": num_steps,
            "million_tokens": round(_num_tokens(config, num_steps) / 1e6, 1),
        }
        if config.packages:
            training["corpus"] = summary(config.packages)
        save(model, tokenizer, directory / CHECKPOINT, training)

    report(f"{config.name}: {model.num_parameters():,} parameters, {start - began:.0f} s of preparation")
    with (directory / CURVE_FILE).open("w", encoding="utf-8") as curve:
        for point in _train(trainer, tokenizer, pools, keep, lambda: (clock() - start) / (limit - start)):
            line = json.dumps(point)
            curve.write(line + "\n")
            curve.flush()
            report(line)
    # not the trained one: that is compiled for the shape of its batches
    return checkpoint.load(directory / CHECKPOINT, device=device, dtype=_dtype(device)), tokenizer


def _train(
    trainer: Trainer,
    tokenizer: Tokenizer,
    pools: dict[str, Pool],
    keep: Callable[[int, float], None],
    elapsed: Callable[[], float],
) -> Iterator[dict[str, Any]]:
    """Take steps while the elapsed share of the time is below 1, keep the model, yield points of the learning curve."""
    config, model = trainer.config, trainer.model
    block_lengths = torch.Generator().manual_seed(config.seed)
    noise = torch.Generator(model.device).manual_seed(config.seed)
    quick = prompts("arithmetic", _NUM_QUICK_PROBLEMS) if "arithmetic" in config.shares else []
    settings = decode_settings(tokenizer, _QUICK_BLOCK_LENGTH)
    measured: list[dict[str, Tensor]] = []  # since the last point; on the device, so that no step waits for them
    num_steps, next_point, next_save = 0, 0.0, 1 / _NUM_CHECKPOINTS
    while (share := elapsed()) < 1:
        block_length = BLOCK_LENGTHS[int(torch.randint(len(BLOCK_LENGTHS), (1,), generator=block_lengths))]
        batch = draw_batch(pools, config, block_length, tokenizer.mask_id, noise)
        weight = config.confidence_weight if share >= config.confidence_from else 0.0
        measured.append(trainer.step(batch, learning_rate(config, share), weight))
        num_steps += 1
        if share < next_point:
            continue
        point = _curve_point(config, num_steps, share, measured)
        measured = []
        next_point = (int(share * _NUM_CURVE_POINTS) + 1) / _NUM_CURVE_POINTS
        if share >= next_save:
            next_save = (int(share * _NUM_CHECKPOINTS) + 1) / _NUM_CHECKPOINTS
            keep(num_steps, share)
            if quick:
                with torch.compiler.set_stance("force_eager"):  # every forward has another shape
                    found = score(quick, lambda texts: answer_together(model, tokenizer, texts, settings))
                point |= {"accuracy": found.accuracy, "tokens_per_denoise": round(found.tokens_per_denoise, 3)}
        yield point
    if measured:
        yield _curve_point(config, num_steps, 1.0, measured)
    keep(num_steps, share)


def _curve_point(
    config: PretrainConfig, num_steps: int, share: float, measured: list[dict[str, Tensor]]
) -> dict[str, Any]:
    means = {name: round(float(torch.stack([step[name] for step in measured]).mean()), 4) for name in measured[0]}
    return {"step": num_steps, "tokens": _num_tokens(config, num_steps), "share": round(share, 4), **means}


def _num_tokens(config: PretrainConfig, num_steps: int) -> int:
    return num_steps * config.batch_size * config.context


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a model, or score a checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m tracer.pretrain", description=__doc__)
    parser.add_argument("--config", help=f"what to train: {', '.join(CONFIGS)}")
    parser.add_argument("--minutes", type=float, help="time limit of the training, preparation included")
    parser.add_argument("--out", type=Path, help="directory for the checkpoint, the learning curve and the scores")
    parser.add_argument("--seed", type=int, help="instead of the configuration's")
    parser.add_argument("--batch-size", type=int, help="sequences of a step, instead of the configuration's")
    parser.add_argument(
        "--evaluate", metavar="DIR", help="score this checkpoint, or shipped model, instead of training"
    )
    parser.add_argument("--problems", type=int, default=200, help="held-out word problems to score on")
    parser.add_argument("--block-length", type=int, nargs="+", default=[16], help="block lengths to score at")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if not options.evaluate and not (options.config and options.minutes and options.out):
        parser.error("give --config, --minutes and --out to train, or --evaluate to score a checkpoint")
    if options.problems < 1:
        parser.error(f"--problems {options.problems}: must be at least 1")
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise TraceError("device cuda: there is none here; cpu is allowed")
        if options.evaluate:
            _evaluate(options)
        else:
            _train_and_score(options)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _evaluate(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    directory = find_model(options.evaluate)
    model = checkpoint.load(directory, device=device, dtype=_dtype(device))
    tokenizer = load_tokenizer(directory)
    for block_length in options.block_length:
        print(json.dumps(score_summary(model, tokenizer, options.problems, block_length, answer_each)), flush=True)


def _train_and_score(options: argparse.Namespace) -> None:
    changes = {"seed": options.seed, "batch_size": options.batch_size}
    config = replace(find_config(options.config), **{key: value for key, value in changes.items() if value is not None})
    device = torch.device(options.device)
    model, tokenizer = train(config, options.out, seconds=60 * options.minutes, device=device, report=_to_stderr)
    if "arithmetic" not in config.shares:
        return
    with (options.out / SCORES_FILE).open("w", encoding="utf-8") as file:
        for block_length in options.block_length:
            line = json.dumps(score_summary(model, tokenizer, options.problems, block_length, answer_together))
            file.write(line + "\n")
            file.flush()
            _to_stderr(line)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
