"""Runs a command line as a shell would, in this process or its own; and one row of results, as commands make them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple
from unittest.mock import patch

# a run's summary, as far as tables and plots read it
ROW = {
    "policy": "lru",
    "slots_per_layer": 8,
    "hardware": "rtx5090",
    "trace": "t",
    "trace_hash": "ab12cd34" * 8,
    "source": "proxy:proxy-tiny",
    "tpot_ms": 12.345,
    "ttft_ms": 1234.5,
    "utilization": 0.5,
    "utilization_slot_weighted": 0.25,
    "hit_ratio": 1.0,
    "token_hit_ratio": 0.0,
    "effective_transfer_ratio": None,
    "h2d_bytes": 2_500_000_000,
    "exposed_stall_ms": 0.0,
    "decision_hash": "0123456789abcdef" * 4,
    "warmup": 1,
    "calibration": "first 1 of 24 requests of the trace",
    "calibration_chosen": False,
    "variant": "",
    "pool": "layer",
    "misses": "h2d",
    "expert_bytes": 6291456,
    "charged_hidden": 2048,
    "charged_expert_intermediate": 512,
    "provenance": "datasheet",
    "provisional": False,
    "sized": True,
    "hardware_changes": "",
    "profile_hash": "56ef7890" * 8,
    "traced_hidden": 128,
    "training_minutes": 4.45,
    "tokens_per_forward": 5.5,
    "num_requests": 9,
    "lower_bound_tpot_ms": 8.23,
    "gap_to_lower_bound_ratio": 0.5,
    "clairvoyant": False,
    "warnings": [],
}


class Finished(NamedTuple):
    code: int
    out: str
    err: str


def command(main: Callable[[], None], *arguments: str) -> Finished:
    """Call the entry point with these arguments; errors that are not the user's come through."""
    out, err = StringIO(), StringIO()
    with patch.object(sys, "argv", ["command", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Finished(code, out.getvalue(), err.getvalue())


@contextmanager
def interruptible() -> Iterator[None]:
    """As in the foreground of a shell; what a script starts in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def running(line: list[str], **options) -> Iterator[subprocess.Popen]:
    """A process, of this `Popen`, that can be interrupted and does not outlive the block."""
    with interruptible():
        process = subprocess.Popen(line, text=True, **options)
    with process:  # waits, and closes pipes
        try:
            yield process
        finally:
            process.kill()
