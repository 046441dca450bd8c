"""What a shell can do to a command: close or narrow its streams, interrupt it, end it. Imports nothing that is slow."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
_TIDYING_S = 10.0
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Ended(BaseException):
    """The process was told to end; passes what handles errors, so that only what cleans up runs."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)
        self.code = 128 + number


def mend_streams() -> None:
    """Have streams to write to: a closed one swallows everything, and what it cannot encode is escaped."""
    for name in ("stdin", "stdout", "stderr"):  # in this order: each takes the lowest number that is free
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115, PTH123 - for good
        elif isinstance(stream, TextIOWrapper) and name == "stdout":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def ending_as_error() -> Iterator[None]:
    """Within it, a signal to end raises Ended, unless somebody else handles or ignores it.

    It and an interrupt raise once: when they come again within seconds, the command is tidying up.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    ours = [number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    handle = _raising_once()
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _raising_once() -> Callable[[int, FrameType | None], None]:
    quiet_until = 0.0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal quiet_until
        now = time.monotonic()
        if now < quiet_until:
            return
        quiet_until = now + _TIDYING_S
        raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)

    return handle


def flush() -> None:
    """Write out what stdout holds back; what it refuses is thrown away, or Python would complain at its exit.

    Raises:
        OSError: nobody reads any more, or the disk is full.
    """
    try:
        sys.stdout.flush()
    except OSError:
        if isinstance(sys.stdout, TextIOWrapper):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        raise
