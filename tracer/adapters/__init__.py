"""Adapters that attach to somebody else's running model and write the same trace as `oled-trace`."""

from tracer.adapters.registry import ADAPTERS
from tracer.adapters.session import Session, attach

__all__ = ["ADAPTERS", "Session", "attach"]
