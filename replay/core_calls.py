"""Calls of the CUDA driver from compiled code, by the addresses of its functions."""

# pyright: reportCallIssue=false
# (an intrinsic is called without its first argument)

from __future__ import annotations

import ctypes

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

_LIBRARY = "libcuda.so.1"
NOT_READY = 600  # CUDA_ERROR_NOT_READY of a query


CALL_COPY, CALL_RECORD, CALL_WAIT, CALL_LAUNCH, CALL_QUERY, CALL_ELAPSED = range(6)  # places of addresses
_NAMES = (
    "cuMemcpyAsync",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuGraphLaunch",
    "cuEventQuery",
    "cuEventElapsedTime",
)


def driver() -> ctypes.CDLL:
    """The driver's library."""
    return ctypes.CDLL(_LIBRARY)


def driver_calls() -> NDArray[np.int64]:
    """Addresses of the functions that compiled code calls."""
    library = driver()
    return np.array([ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _NAMES])


def no_calls() -> NDArray[np.int64]:
    """What stands for them where there is no GPU."""
    return np.zeros(len(_NAMES), np.int64)


def _caller(count: int):
    """An intrinsic that calls the function at an address with so many arguments of 64 bits; it answers with 32."""

    def codegen(context, builder, _, arguments):
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * count)
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(function, arguments[1:])

    return types.int32(*[types.int64] * (1 + count)), codegen


@intrinsic
def call1(typing_context, function, a):
    """Call with one argument."""
    return _caller(1)


@intrinsic
def call2(typing_context, function, a, b):
    """Call with two."""
    return _caller(2)


@intrinsic
def call3(typing_context, function, a, b, c):
    """Call with three."""
    return _caller(3)


@intrinsic
def call4(typing_context, function, a, b, c, d):
    """Call with four."""
    return _caller(4)
