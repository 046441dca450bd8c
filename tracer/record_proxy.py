"""Train a proxy, score it, and record its traces and its calibration, within a time limit."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from tracer import calibration_file, checkpoint
from tracer.calibration import Calibrator
from tracer.corpus import prompts
from tracer.files import first_line
from tracer.llada2 import LLaDA2
from tracer.pretrain import CHECKPOINT, train
from tracer.pretrain_configs import CONFIGS, PretrainConfig, find_config
from tracer.pretrain_scores import answer_together, score_summary
from tracer.record_jobs import BLOCK_LENGTH, NUM_CALIBRATION, NUM_CANDIDATES, Setup, plan, weight_dtype, write_text
from tracer.record_pack import pack
from tracer.record_workers import Outcome, run_jobs
from tracer.schema import TraceError
from tracer.text_scores import heldout_loss, text_summary
from tracer.tokenizer import Tokenizer, load_tokenizer

REPORT_FILE = "report.json"
SCORES_FILE = "scores.jsonl"
TRAINING = "training"
_PACK_EVERY_S = 60.0
_NUM_PROBLEMS = 200
_NUM_TEXTS = 64


class Recording:
    """What one run of the script has made so far; the report and the packed files say it at any time.

    Args:
        config: of the proxy.
        directory: of all results.
        device: cpu or cuda.
        packed: where results are packed as they come, if anywhere.
    """

    def __init__(self, config: PretrainConfig, directory: Path, device: str, packed: Path | None) -> None:
        self._config = config
        self._directory = directory
        self._device = device
        self._packed = packed
        self._last_packed = 0.0
        self._calibrator: Calibrator | None = None
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()  # scores come from a thread of their own
        self.facts: dict[str, Any] = {"config": config.name, "seed": config.seed, "device": device, "scores": []}

    def train(self, minutes: float) -> None:
        """Train until the time is over."""
        began = time.monotonic()
        self._draw()  # what would refuse them must do so before the training, which needs the same sources
        left = 60 * minutes - (time.monotonic() - began)
        device = torch.device(self._device)
        train(self._config, self._directory / TRAINING, seconds=left, device=device, report=_to_stderr)
        gc.collect()  # the optimiser's memory is for the workers now
        torch.cuda.empty_cache()
        self.facts["training_s"] = round(time.monotonic() - began, 1)

    def record(self, minutes: float, num_workers: int, *, only_block_16: bool) -> None:
        """Record all that is wanted of the trained model, and score it meanwhile."""
        began = time.monotonic()
        directory = self._directory / TRAINING / CHECKPOINT
        evaluated, calibrating = self._draw()
        jobs = plan(self._config.name, evaluated, calibrating, only_block_16=only_block_16)
        provenance = checkpoint.read_provenance(directory)
        setup = Setup(self._config.name, directory, self._directory, self._device, provenance)
        self.facts["num_workers"] = num_workers
        self._outcomes = [Outcome(job) for job in jobs]
        scoring = threading.Thread(target=self._score, args=(directory,), daemon=True)
        scoring.start()
        left = 60 * minutes - (time.monotonic() - began)
        run_jobs(self._outcomes, setup, num_workers, left, self._changed, _to_stderr)
        scoring.join(max(0.0, 60 * minutes - (time.monotonic() - began)))
        if scoring.is_alive():
            self.facts["scores_not_done"] = "killed when the time was over"
        self.facts["recording_s"] = round(time.monotonic() - began, 1)

    def _draw(self) -> list[dict[str, list[str]]]:
        """Prompts of each workload: candidates for the evaluated requests, and those of the calibration."""
        source = {"packages": self._config.packages, "num_problems": self._config.max_problems}  # the longest answers
        return [
            {
                workload: [document.prompt for document in prompts(workload, n, split, **source)]
                for workload in self._config.shares
            }
            for n, split in ((NUM_CANDIDATES, "heldout"), (NUM_CALIBRATION, "calibration"))
        ]

    def write_report(self) -> dict[str, Any]:
        """Write report.json, pack again if that is wanted, and return the report."""
        with self._lock:
            facts = dict(self.facts) | {"scores": list(self.facts["scores"])}
        done = [outcome for outcome in self._outcomes if outcome.state == "done"]
        facts["jobs"] = {o.job.name: {"seconds": o.seconds, **o.facts} for o in done}
        facts["not_done"] = {o.job.name: f"{o.state}: {o.error}" for o in self._outcomes if o.state != "done"}
        _write_json(self._directory / REPORT_FILE, facts)
        if self._packed:
            self._last_packed = time.monotonic()
            facts["packed"] = pack(self._directory, self._packed)
        return facts

    def _changed(self, outcome: Outcome, part: Calibrator | None) -> None:
        """Keep what a job gave, so that the files are whole after each of them."""
        if part is not None:
            if self._calibrator is None:
                self._calibrator = part
            else:
                self._calibrator.merge(part)
            path = self._directory / f"{self._config.name}.calibration.npz"
            found = self._calibrator.finish()
            calibration_file.save(path, found)
            self.facts["calibration"] = {
                "num_requests": found.num_requests,
                "num_maps": len(found.map_ids),
                "num_tokens_known": len(found.token_ids),
                "num_bytes": path.stat().st_size,
            }
        if self._packed and time.monotonic() - self._last_packed > _PACK_EVERY_S:
            self.write_report()

    def _score(self, directory: Path) -> None:
        try:
            model = checkpoint.load(directory, device=self._device, dtype=weight_dtype(self._device))
            tokenizer = load_tokenizer(directory)
            with (self._directory / SCORES_FILE).open("w", encoding="utf-8") as file:
                for found in score_workloads(model, tokenizer, self._config):
                    file.write(json.dumps(found) + "\n")
                    file.flush()
                    with self._lock:
                        self.facts["scores"].append(found)
        except (TraceError, RuntimeError) as error:  # torch's errors, out of memory among them, are RuntimeErrors
            self.facts["scores_not_done"] = first_line(error)


def score_workloads(model: LLaDA2, tokenizer: Tokenizer, config: PretrainConfig) -> Iterator[dict[str, Any]]:
    """Score a model on each workload of its training; numbers and three samples of each, ready for JSON."""
    for workload in config.shares:
        if workload == "arithmetic":
            found = score_summary(model, tokenizer, _NUM_PROBLEMS, BLOCK_LENGTH, answer_together)
            loss = heldout_loss(model, tokenizer, config, workload, BLOCK_LENGTH)
            yield {"workload": workload, **found, "heldout_loss": loss}
        else:
            yield text_summary(model, tokenizer, config, workload, _NUM_TEXTS, BLOCK_LENGTH)


def clean(directory: Path) -> None:
    """Remove what writers that were killed left behind."""
    for folder in ("traces", "sizes"):
        for rest in (directory / folder).glob(".*.partial-*"):
            shutil.rmtree(rest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(prog="python -m tracer.record_proxy", description=__doc__)
    parser.add_argument("--config", help=f"what to train: {', '.join(CONFIGS)}")
    parser.add_argument(
        "--minutes", type=float, help="time limit of the training; without it, what --out holds is used"
    )
    parser.add_argument("--record-minutes", type=float, help="time limit of recording and scoring; 0: train only")
    parser.add_argument("--out", type=Path, required=True, help="directory of all results")
    parser.add_argument("--pack", type=Path, help="directory for tar files of all results but the weights")
    parser.add_argument("--seed", type=int, help="instead of the configuration's")
    parser.add_argument("--workers", type=int, default=8, help="processes that record")
    parser.add_argument("--only-block-16", action="store_true", help="record the evaluated requests at block 16 alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if not options.config and not options.pack:
        parser.error("give --config to train and record, or --pack to pack what there is")
    if options.config and options.record_minutes is None:
        parser.error("give --record-minutes with --config")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: must be at least 1")
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise TraceError("device cuda: there is none here; cpu is allowed")
        if not options.config:
            print(json.dumps(pack(options.out, options.pack)))
            return 0
        config = find_config(options.config)
        if options.seed is not None:
            config = replace(config, seed=options.seed)
        report = run(config, options)
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report))
    return 0


def run(config: PretrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Train, record and pack as the options say; the report is written however this ends."""
    before = signal.signal(signal.SIGTERM, _stop)
    recording = Recording(config, options.out, options.device, options.pack)
    try:
        if options.minutes is not None:
            recording.train(options.minutes)
        if options.record_minutes:
            recording.record(options.record_minutes, options.workers, only_block_16=options.only_block_16)
    except BaseException as error:
        recording.facts["interrupted"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        clean(options.out)
        report = recording.write_report()
    return report


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def script() -> NoReturn:
    """Run `main`, and end the process even where a thread still scores, which torch aborts otherwise."""
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(values, indent=2) + "\n")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    script()
