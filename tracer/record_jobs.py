"""What is recorded of a proxy: the traces and the calibration, as jobs in the order of their importance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch

from tracer.calibration import Calibrator
from tracer.capture import trace_metadata, trace_prompts
from tracer.checkpoint import Provenance
from tracer.decode import DecodeResult
from tracer.decode_settings import DecodeError, DecodeSettings
from tracer.llada2 import LLaDA2
from tracer.pretrain_scores import decode_settings
from tracer.schema import GATE_DTYPES, ForwardKind, Pass, TraceError
from tracer.store import TraceWriter
from tracer.tokenizer import Tokenizer

BLOCK_LENGTH = 16
GATE_DTYPE = "uint8"
NUM_TOKENS = 128  # new tokens of an evaluated request
NUM_CANDIDATES = 40
NUM_EVALUATED = 10
NUM_WITH_SIGNALS = 1  # of each workload: signals take ten times the room of routing
OTHER_BLOCKS = {1: 3, 4: 3, 8: 3, 32: 3, 64: 2}  # requests of each workload, by block length
NUM_CALIBRATION = 70  # of each workload
_CALIBRATION_TOKENS = 64
_CALIBRATION_CHUNK = 7


@dataclass(frozen=True)
class Job:
    """One trace, or one part of the calibration.

    Of `prompts` the first `num_requests` are recorded whose answers have `min_tokens` or more before the end of text;
    should they be too few, the longest of the others are. Where `after` is set, the prompts are instead the first that
    the trace of this name kept.
    """

    name: str
    kind: Literal["trace", "calibration"]
    workload: str
    num_requests: int
    prompts: tuple[str, ...] = ()
    after: str = ""
    block_length: int = BLOCK_LENGTH
    gen_length: int = NUM_TOKENS
    min_tokens: int = 1
    gate_dtype: str = GATE_DTYPE
    signals: bool = False
    first_request: int = 0  # number of the first request of a part of the calibration

    @property
    def num_forwards(self) -> float:
        """About how many forwards it takes; dInfer's loop runs two at least for each block."""
        for_block = max(2.0, self.block_length / 2) + 1
        return self.num_requests * (self.gen_length / self.block_length * for_block + 1)


@dataclass(frozen=True)
class Setup:
    """What every job needs."""

    name: str  # of the proxy
    checkpoint: Path
    directory: Path  # where the results go
    device: str
    provenance: Provenance


class Made(NamedTuple):
    """What a job gave."""

    facts: dict[str, Any]  # ready for JSON
    calibrator: Calibrator | None


def plan(
    name: str, evaluated: Mapping[str, Sequence[str]], calibration: Mapping[str, Sequence[str]], *, only_block_16: bool
) -> list[Job]:
    """All jobs, the most important first.

    Args:
        name: of the proxy; traces are called after it.
        evaluated: candidates for the evaluated requests, by workload.
        calibration: prompts of the calibration, by workload.
        only_block_16: the evaluated requests alone.
    """
    jobs = [
        Job(
            trace_name(name, workload),
            "trace",
            workload,
            min(NUM_EVALUATED, len(prompts)),
            tuple(prompts),
            min_tokens=NUM_TOKENS,
        )
        for workload, prompts in evaluated.items()
    ]
    if only_block_16:
        return jobs
    first = {workload: trace_name(name, workload) for workload in evaluated}
    jobs += [
        Job(f"{trace}-signals", "trace", workload, NUM_WITH_SIGNALS, after=trace, signals=True)
        for workload, trace in first.items()
    ]
    # Numbered workload by workload, recorded in turn: a calibration that is cut short still mixes them.
    parts = []
    start = 0
    for workload, prompts in calibration.items():
        for i in range(0, len(prompts), _CALIBRATION_CHUNK):
            chunk = tuple(prompts[i : i + _CALIBRATION_CHUNK])
            part = Job(
                f"calibration-{workload}-{i // _CALIBRATION_CHUNK}",
                "calibration",
                workload,
                len(chunk),
                chunk,
                gen_length=_CALIBRATION_TOKENS,
                signals=True,
                first_request=start + i,
            )
            parts.append((i, part))
        start += len(prompts)
    jobs += [part for _, part in sorted(parts, key=lambda item: item[0])]
    measured = "code" if "code" in first else next(iter(first))
    jobs += [
        Job(
            f"{first[measured]}-{gate_dtype}",
            "trace",
            measured,
            NUM_EVALUATED,
            after=first[measured],
            gate_dtype=gate_dtype,
        )
        for gate_dtype in GATE_DTYPES
        if gate_dtype != GATE_DTYPE
    ]
    jobs += [
        Job(
            f"{trace}-b{block_length}",
            "trace",
            workload,
            num_requests,
            after=trace,
            block_length=block_length,
            gen_length=max(_CALIBRATION_TOKENS, 2 * block_length),
        )
        for block_length, num_requests in OTHER_BLOCKS.items()
        for workload, trace in first.items()
    ]
    return jobs


def trace_name(name: str, workload: str) -> str:
    """What the trace of the evaluated requests is called."""
    return f"{name}-{workload}"


def trace_path(directory: Path, job: Job) -> Path:
    """Where a job's trace goes; those that are recorded only for their size go where nothing is packed."""
    folder = "traces" if job.gate_dtype == GATE_DTYPE else "sizes"
    return directory / folder / f"{job.name}.trace"


def prompts_path(directory: Path, workload: str) -> Path:
    """Where the prompts and answers of the evaluated requests go."""
    return directory / f"prompts-{workload}.jsonl"


class _Answer(NamedTuple):
    prompt: str
    passes: list[Pass]
    text: str
    num_tokens: int  # new ones before the end of text


class _List:
    """Where the passes of one request go until it is known whether they are kept."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def write(self, pass_: Pass, /) -> None:
        """Keep the pass."""
        self.passes.append(pass_)


def run_job(job: Job, setup: Setup, model: LLaDA2, tokenizer: Tokenizer) -> Made:
    """Decode the job's prompts one by one; write the trace, or add up the calibration.

    Raises:
        TraceError: none of the prompts can be decoded, or the trace cannot be written.
    """
    settings = decode_settings(tokenizer, job.block_length, job.gen_length)
    answers, failures = _answers(job, setup, model, tokenizer, settings)
    if not answers:
        raise TraceError(f"{job.name}: no prompt can be decoded: {failures[0]}")
    facts: dict[str, Any] = {"num_requests": len(answers), **_rates(answers)}
    if failures:
        facts["failures"] = failures
    metadata = trace_metadata(model, settings, setup.name, setup.provenance, job.gate_dtype, job.signals)
    if job.kind == "calibration":
        calibrator = Calibrator(metadata.shape, metadata.source, setup.provenance.checkpoint_hash)
        for pass_ in _numbered(answers, job.first_request):
            calibrator.add(pass_)
        return Made(facts, calibrator)
    path = trace_path(setup.directory, job)
    with TraceWriter(path, metadata, overwrite=True) as writer:
        for pass_ in _numbered(answers, 0):
            writer.write(pass_)
        if not job.after:  # before the trace takes its name, so that none is without them
            lines = [json.dumps({"prompt": a.prompt, "num_tokens": a.num_tokens, "answer": a.text}) for a in answers]
            write_text(prompts_path(setup.directory, job.workload), "\n".join(lines) + "\n")
    facts["num_short"] = sum(answer.num_tokens < job.min_tokens for answer in answers)
    return Made(facts | _sizes(path, metadata.shape.top_k), None)


def _answers(
    job: Job, setup: Setup, model: LLaDA2, tokenizer: Tokenizer, settings: DecodeSettings
) -> tuple[list[_Answer], list[str]]:
    """Answers in the order of their prompts, and why prompts could not be answered."""
    if job.after:
        lines = prompts_path(setup.directory, job.workload).read_text(encoding="utf-8").splitlines()
        prompts: Sequence[str] = [json.loads(line)["prompt"] for line in lines[: job.num_requests]]
    else:
        prompts = job.prompts
    kept: list[tuple[int, _Answer]] = []
    short: list[tuple[int, _Answer]] = []
    failures = []
    for index, prompt in enumerate(prompts):
        if len(kept) == job.num_requests:
            break
        sink = _List()
        try:
            [result] = trace_prompts(model, [tokenizer.encode(prompt)], settings, sink, signals=job.signals)
        except DecodeError as error:
            failures.append(f"prompt {index}: {error}")
            continue
        num_tokens = _num_tokens(result)
        answer = _Answer(prompt, sink.passes, tokenizer.decode(result.generated_ids), num_tokens)
        (kept if num_tokens >= job.min_tokens else short).append((index, answer))
    short.sort(key=lambda item: -item[1].num_tokens)
    kept += short[: job.num_requests - len(kept)]
    return [answer for _, answer in sorted(kept, key=lambda item: item[0])], failures


def _num_tokens(result: DecodeResult) -> int:
    answer = result.token_ids[result.prompt_length : result.prompt_length + result.gen_length]
    ends = np.flatnonzero(answer == result.eos_id)
    return int(ends[0]) if ends.size else len(answer)


def _numbered(answers: Sequence[_Answer], first_request: int) -> list[Pass]:
    """All passes, numbered from 0, each with the number of its request."""
    passes = [(first_request + i, pass_) for i, answer in enumerate(answers) for pass_ in answer.passes]
    return [replace(pass_, pass_id=i, requests=np.array([request])) for i, (request, pass_) in enumerate(passes)]


def _rates(answers: Sequence[_Answer]) -> dict[str, Any]:
    passes = [pass_ for answer in answers for pass_ in answer.passes if not pass_.is_prefill]
    num_accepted = sum(int(pass_.num_accepted.sum()) for pass_ in passes)
    num_denoise = sum(pass_.kind == ForwardKind.DENOISE for pass_ in passes)
    return {
        "num_tokens": [answer.num_tokens for answer in answers],
        "num_forwards": sum(len(answer.passes) for answer in answers),
        "tokens_per_forward": round(num_accepted / len(passes), 3),
        "tokens_per_denoise": round(num_accepted / num_denoise, 3),
    }


def _sizes(path: Path, top_k: int) -> dict[str, Any]:
    """Bytes of a trace, and of its routing by (id, gate) pair."""
    routing = path / "routing.parquet"
    num_pairs = pq.read_metadata(routing).num_rows * top_k
    num_bytes = {file.stem: file.stat().st_size for file in sorted(path.iterdir())}
    return {"num_bytes": num_bytes, "bytes_per_pair": round(num_bytes["routing"] / num_pairs, 4)}


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or absent."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def weight_dtype(device: str) -> torch.dtype:
    """In which the model is run: bfloat16 on a GPU, fp32 elsewhere."""
    return torch.float32 if device == "cpu" else torch.bfloat16
