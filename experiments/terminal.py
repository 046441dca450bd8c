"""What a shell can do to a command: close or narrow its streams, interrupt it, end it. Imports nothing that is slow."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
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
    """Within it, a signal to end raises Ended, unless somebody else handles or ignores it."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _ENDING}
    ours = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _raise_ended)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _raise_ended(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)


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
