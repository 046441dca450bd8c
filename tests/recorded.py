"""Traces on disk, and passes that must be the same."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import fields
from pathlib import Path

import numpy as np
from strategies import metadata_for

from tracer.schema import ModelShape, Pass, Signals
from tracer.store import TraceReader, TraceWriter


def write(path: Path, shape: ModelShape, passes: Iterable[Pass], gate_dtype: str = "float32") -> TraceReader:
    """Write passes and open the trace."""
    with TraceWriter(path, metadata_for(shape, gate_dtype)) as writer:
        for item in passes:
            writer.write(item)
    return TraceReader(path)


def assert_same(one: Pass, two: Pass, but: Set[str] = frozenset()) -> None:
    """Compare every field of two passes but some."""
    for field in fields(Pass):
        if field.name not in but and field.name != "signals":
            np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name), field.name)
    if "signals" not in but:
        assert (one.signals is None) == (two.signals is None)
        for field in fields(Signals) if one.signals else ():
            np.testing.assert_array_equal(
                getattr(one.signals, field.name), getattr(two.signals, field.name), field.name
            )
