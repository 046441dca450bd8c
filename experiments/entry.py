"""Entry points of the commands: thin, so that an interrupt while modules are loaded is one line as well."""

from __future__ import annotations

import sys
from importlib import import_module

from experiments.terminal import INTERRUPTED, mend_streams


def simulate() -> None:
    """Entry point of `oled-simulate`."""
    _start("oled-simulate", "experiments.simulate")


def trace() -> None:
    """Entry point of `oled-trace`."""
    _start("oled-trace", "experiments.trace")


def generate() -> None:
    """Entry point of `oled-generate`."""
    _start("oled-generate", "experiments.generate")


def _start(program: str, module: str) -> None:
    mend_streams()
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
