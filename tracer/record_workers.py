"""Run recording jobs in processes that each hold the model, within a time limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from tracer import checkpoint
from tracer.calibration import Calibrator
from tracer.files import first_line
from tracer.record_jobs import Job, Made, Setup, run_job, weight_dtype
from tracer.tokenizer import load_tokenizer

_CAUTION = 1.3  # how much longer than the others a job may take by the forward before it is late


@dataclass
class Outcome:
    """What became of a job: waiting, running, done or failed; at the end also stopped or not begun."""

    job: Job
    state: str = "waiting"
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)  # of a job that is done
    error: str = ""


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    is_ready: bool = False
    running: Outcome | None = None
    began: float = 0.0


def run_jobs(
    outcomes: Sequence[Outcome],
    setup: Setup,
    num_workers: int,
    seconds: float,
    on_change: Callable[[Outcome, Calibrator | None], None],
    report: Callable[[str], None],
) -> None:
    """Run jobs in their order, as many at once as there are workers.

    None starts that is not likely to end in time; a later one that is may take its place. What still runs when the
    time is over is killed. Workers die with this process, however it ends; a trace is then absent, never in part.

    Args:
        outcomes: of the jobs to be run, the most important first; a job starts after the one that it names. What
            becomes of them is written here.
        setup: what all of them need.
        num_workers: processes; on a GPU each forward waits mostly for its own launches, so that several share it well.
        seconds: from now on, loading of the model included.
        on_change: called for each job that is over, with its part of the calibration.
        report: takes lines of progress.
    """
    limit = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    try:
        for _ in range(min(num_workers, len(outcomes))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, setup), daemon=True)
            process.start()
            theirs.close()
            workers.append(_Worker(process, ours))
        _dispatch(outcomes, workers, limit, on_change, report)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        _close(outcomes)


def _close(outcomes: Sequence[Outcome]) -> None:
    """Say of the jobs that are not over that they will not be done, and why."""
    states = {outcome.job.name: outcome.state for outcome in outcomes}
    for outcome in outcomes:
        if outcome.state == "running":
            outcome.state, outcome.error = "stopped", "it still ran"
        elif outcome.state == "waiting":
            before = outcome.job.after
            is_first_missing = before and states[before] != "done"
            outcome.state = "not begun"
            outcome.error = f"{before} is not there" if is_first_missing else "too little time, or no process, was left"


def _dispatch(
    outcomes: Sequence[Outcome],
    workers: list[_Worker],
    limit: float,
    on_change: Callable[[Outcome, Calibrator | None], None],
    report: Callable[[str], None],
) -> None:
    alive = list(workers)
    while alive and (left := limit - time.monotonic()) > 0:
        for worker in alive:
            if worker.is_ready and worker.running is None and (found := _next(outcomes, left)):
                worker.running, worker.began = found, time.monotonic()
                found.state = "running"
                worker.connection.send(found.job)
        if not any(outcome.state == "running" for outcome in outcomes) and all(worker.is_ready for worker in alive):
            return  # nothing that is left can start
        ready = wait([worker.connection for worker in alive], timeout=left)
        for worker in [worker for worker in alive if worker.connection in ready]:
            try:
                received = worker.connection.recv()
            except (EOFError, OSError):
                alive.remove(worker)
                worker.process.join()
                received = f"its process ended with code {worker.process.exitcode}"
                if worker.running is None:
                    report(f"a worker is gone: {received}")
            if worker.is_ready and worker.running is not None:
                _finish(worker.running, received, time.monotonic() - worker.began, on_change, report)
                worker.running = None
            worker.is_ready = True


def _next(outcomes: Sequence[Outcome], left: float) -> Outcome | None:
    """The first job that may start and is likely to end in time."""
    states = {outcome.job.name: outcome.state for outcome in outcomes}
    done = [outcome for outcome in outcomes if outcome.state == "done"]
    num_forwards = sum(outcome.job.num_forwards for outcome in done)
    seconds_per_forward = sum(outcome.seconds for outcome in done) / num_forwards if num_forwards else 0.0
    for outcome in outcomes:
        job = outcome.job
        if outcome.state != "waiting" or (job.after and states[job.after] != "done"):
            continue
        if _CAUTION * job.num_forwards * seconds_per_forward < left:
            return outcome
    return None


def _finish(
    outcome: Outcome,
    received: Made | str,
    seconds: float,
    on_change: Callable[[Outcome, Calibrator | None], None],
    report: Callable[[str], None],
) -> None:
    outcome.seconds = round(seconds, 2)
    if isinstance(received, str):
        outcome.state, outcome.error = "failed", received
    else:
        outcome.state, outcome.facts = "done", received.facts
    report(f"{outcome.job.name}: {outcome.state} in {seconds:.1f} s{': ' * bool(outcome.error)}{outcome.error}")
    on_change(outcome, None if isinstance(received, str) else received.calibrator)


def _work(connection: Connection, setup: Setup) -> None:
    """Load the model, then run jobs until the parent has no more."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to all of the terminal; the parent sees to us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    model = checkpoint.load(setup.checkpoint, device=setup.device, dtype=weight_dtype(setup.device))
    tokenizer = load_tokenizer(setup.checkpoint)
    connection.send("ready")
    while True:
        job = connection.recv()
        try:
            made: Made | str = run_job(job, setup, model, tokenizer)
        except Exception as error:  # whatever it is, the other jobs can go on
            made = f"{type(error).__name__}: {first_line(error)}"
        connection.send(made)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
