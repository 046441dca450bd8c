"""Numbers between the matrices of an expert: rounding to bfloat16, and SiLU."""

# pyright: reportCallIssue=false
# (an intrinsic is called without its first argument)

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from policies.jit import jit


@intrinsic
def _bits(typing_context, value):
    """The 32 bits of a float32."""

    def codegen(context, builder, _, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@jit
def rounded(value):
    """Nearest bfloat16 of a float32, ties to even, as its 16 bits."""
    bits = _bits(np.float32(value))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@jit
def silu(value):
    """X * sigmoid(x) in float32."""
    return value / (np.float32(1) + np.exp(-value))
