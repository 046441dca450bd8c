"""Entry points of the commands: thin, so that an interrupt while modules are loaded is one line as well."""

from __future__ import annotations

import sys
from importlib import import_module

from experiments.terminal import INTERRUPTED, mend_streams


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
        return import_module(module).main()
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
