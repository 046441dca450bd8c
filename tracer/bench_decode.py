"""The same decodes with and without tracing, in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tracer.capture import trace_metadata, trace_prompts
from tracer.checkpoint import Provenance
from tracer.decode import DecodeResult, decode_prompts
from tracer.decode_settings import DecodeSettings
from tracer.doctor import check
from tracer.llada2 import LLaDA2
from tracer.observed import ObservedModel
from tracer.schema import Pass, TraceError
from tracer.special_ids import RELEASED_IDS, RELEASED_VOCAB
from tracer.store import TraceWriter


class Pair(NamedTuple):
    """Seconds of one decode without and with tracing, and how many forwards it has."""

    plain_s: float
    traced_s: float
    writing_s: float  # of the traced one, checking passes and writing the files
    num_forwards: int


@dataclass(frozen=True)
class Workload:
    """What is decoded: one random prompt for each pair of decodes, to the last of its new tokens."""

    block_length: int
    gen_length: int
    prompt_length: int
    num_pairs: int
    signals: bool  # traced too

    def settings(self, model: LLaDA2) -> DecodeSettings:
        """Of the decode loop; a model that is not of the released vocabulary has its mask last."""
        vocab, eos_id = model.config.vocab_size, model.config.pad_token_id
        mask_id = RELEASED_IDS["mask"] if vocab == RELEASED_VOCAB else vocab - 1
        lengths = {"block_length": self.block_length, "gen_length": self.gen_length}
        return DecodeSettings(mask_id=mask_id, eos_id=eos_id, early_stop=False, **lengths)

    def prompts(self, settings: DecodeSettings) -> Iterator[list[int]]:
        """One for each pair, and one before them that is not counted."""
        rng = np.random.default_rng(0)
        for _ in range(self.num_pairs + 1):
            yield rng.integers(0, min(settings.mask_id, settings.eos_id), self.prompt_length).tolist()


class TimedWriter:
    """Takes passes for a writer, and the time that it needs."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self.seconds = 0.0

    def write(self, pass_: Pass) -> None:
        """Hand on a pass."""
        began = time.perf_counter()
        self._writer.write(pass_)
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Finish the trace."""
        began = time.perf_counter()
        self._writer.close()
        self.seconds += time.perf_counter() - began


def measure_decodes(model: LLaDA2, workload: Workload, name: str, provenance: Provenance, path: Path) -> dict[str, Any]:
    """Decode every prompt with and without tracing; which goes first takes turns.

    Args:
        model: on its device.
        workload: what is decoded.
        name: of the model.
        provenance: of its checkpoint.
        path: of a trace that is written again and again.

    Raises:
        TraceError: an answer differs between the two, or the doctor finds fault with a trace.
    """
    settings = workload.settings(model)
    metadata = trace_metadata(model, settings, name, provenance, "float16", workload.signals)

    writing_s = 0.0

    def plain(prompt: list[int]) -> DecodeResult:
        unobserved = ObservedModel(model, None, settings.block_length)
        return decode_prompts(unobserved, [prompt], settings, lambda events: None)[0]

    def traced(prompt: list[int]) -> DecodeResult:
        nonlocal writing_s
        with TraceWriter(path, metadata, overwrite=True) as writer:
            timed = TimedWriter(writer)
            result = trace_prompts(model, [prompt], settings, timed, signals=workload.signals)[0]
            timed.close()
        writing_s = timed.seconds
        return result

    on_cuda = model.device.type == "cuda"
    calls = {"plain": plain, "traced": traced}
    pairs: list[Pair] = []
    for nth, prompt in enumerate(workload.prompts(settings)):
        seconds, results = {}, {}
        for label in sorted(calls, reverse=nth % 2 == 1):
            began = time.perf_counter()
            results[label] = calls[label](prompt)
            seconds[label] = time.perf_counter() - began
        if not np.array_equal(results["plain"].token_ids, results["traced"].token_ids):
            raise TraceError(f"pair {nth}: the answers with and without tracing differ")
        report = check(path)
        if report.findings:
            raise TraceError(f"pair {nth}: {report.findings[0]}")
        if nth:
            pairs.append(Pair(seconds["plain"], seconds["traced"], writing_s, sum(report.num_forwards.values())))
        elif on_cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
    return {
        "pairs": [pair._asdict() for pair in pairs],
        "num_layers": len(model.config.moe_layer_ids),
        "block_length": workload.block_length,
        "signals": workload.signals,
        "trace_bytes_per_forward": sum(file.stat().st_size for file in path.iterdir()) / pairs[-1].num_forwards,
        "gpu_bytes": torch.cuda.max_memory_allocated(model.device) if on_cuda else None,
    }
