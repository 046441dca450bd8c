"""Entry points of the commands: thin, so that what stops the loading of modules is one line as well."""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from types import ModuleType

from experiments.terminal import INTERRUPTED, mend_streams

_OF_EXTRAS = ("jinja2", "safetensors", "tokenizers", "torch")  # that not every command needs


def simulate() -> int | None:
    """Entry point of `oled-simulate`."""
    return _start("oled-simulate", "experiments.simulate_command")


def trace() -> int | None:
    """Entry point of `oled-trace`."""
    return _start("oled-trace", "experiments.trace")


def generate() -> int | None:
    """Entry point of `oled-generate`."""
    return _start("oled-generate", "experiments.generate")


def import_trace() -> int | None:
    """Entry point of `oled-import`."""
    return _start("oled-import", "experiments.import_command")


def export_trace() -> int | None:
    """Entry point of `oled-export`."""
    return _start("oled-export", "experiments.export_command")


def curves() -> int | None:
    """Entry point of `oled-curves`."""
    return _start("oled-curves", "experiments.curves")


def replay() -> int | None:
    """Entry point of `oled-replay`."""
    return _start("oled-replay", "experiments.replay_command")


def calibrate() -> int | None:
    """Entry point of `oled-calibrate`."""
    return _start("oled-calibrate", "experiments.calibrate")


def compare() -> int | None:
    """Entry point of `oled-compare`."""
    return _start("oled-compare", "experiments.compare")


def check_policy() -> int | None:
    """Entry point of `oled-check-policy`."""
    return _start("oled-check-policy", "experiments.check_policy")


def _start(program: str, module: str) -> int | None:
    mend_streams()
    try:
        return _load(module).main()
    except ModuleNotFoundError as error:
        if error.name not in _OF_EXTRAS:
            raise
        remedy = "in a checkout, pip install '.[trace,replay]' brings it"
        print(f"{program}: error: {error.name} is not installed; {remedy}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _load(name: str) -> ModuleType:
    """Import a module, and spare Python's search for reference cycles what stays until the end anyway.

    Modules, and what numba makes while it compiles, are millions of objects: to search them takes a seventh of the time
    of compiling, and half a second when the process ends.
    """
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)
    module = import_module(name)
    gc.freeze()
    return module
