"""Gates as a trace stores them: 32 or 16 bits of floating point, or 8 bits of fixed point."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.schema import GATE_DTYPES, NO_GATES, TraceError

FIXED_POINT_SUM = 255
INPUT_SUM_TOLERANCE = 1e-5  # how far from 1 the gates that are to be written may sum
STORED_SUM_TOLERANCE = {"float32": 2e-5, "float16": 1e-3, "uint8": 0.0}  # of 1, or of 255 where uint8


def quantise_gates(gates: NDArray[np.float64], gate_dtype: str) -> NDArray[Any]:
    """Gates of the last axis, which sum to 1 or are NaN, in the type that they are stored in.

    With uint8 each row sums to exactly 255: every gate is rounded down, and what is left goes one by one to the
    gates that lost most, the first of equal ones before the others (largest remainder).
    """
    if gate_dtype == NO_GATES:
        return gates.astype(np.float16)
    if gate_dtype not in GATE_DTYPES:
        raise TraceError(f"gate_dtype {gate_dtype!r}: allowed are {', '.join(GATE_DTYPES)}")
    if gate_dtype != "uint8":
        return gates.astype(gate_dtype)
    exact = gates / gates.sum(axis=-1, keepdims=True) * FIXED_POINT_SUM
    floor = np.floor(exact)
    left = FIXED_POINT_SUM - floor.sum(axis=-1, keepdims=True)
    order = np.argsort(floor - exact, axis=-1, kind="stable")
    extra = np.zeros_like(floor)
    np.put_along_axis(extra, order, np.arange(gates.shape[-1]) < left, axis=-1)
    return (floor + extra).astype(np.uint8)


def restore_gates(stored: NDArray[Any]) -> NDArray[np.float64]:
    """Stored gates as float64, each row of the last axis divided by its sum."""
    gates = stored.astype(np.float64)
    gates /= gates.sum(axis=-1, keepdims=True)
    return gates
