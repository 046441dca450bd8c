"""Run policies over traces, measure and draw: the Python API is `simulate`, its `Result`, and `sweep`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.run import Result, simulate
    from experiments.sweep_call import sweep

__all__ = ["Result", "simulate", "sweep"]

_MODULES = {"Result": "experiments.run", "simulate": "experiments.run", "sweep": "experiments.sweep_call"}


def __getattr__(name: str) -> Any:
    """The API, loaded when it is asked for: commands import this package before they can say that they were stopped."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
