"""Single bits of words, which numba has no names for; in the numba subset."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from policies.jit import jit

_IF_ZERO = ir.Constant(ir.IntType(1), 1)  # a word of 0 has no answer


def _lowest(context: Any, word: Any) -> Any:
    """Place of the lowest bit of a uint64 that is set; the word must not be 0."""
    return types.uint64(types.uint64), lambda _, builder, __, given: builder.cttz(given[0], _IF_ZERO)


def _num_leading_zeros(context: Any, word: Any) -> Any:
    return types.uint64(types.uint64), lambda _, builder, __, given: builder.ctlz(given[0], _IF_ZERO)


lowest: Any = intrinsic(_lowest)
_leading_zeros: Any = intrinsic(_num_leading_zeros)


@jit
def highest(word):
    """Place of the highest bit of a uint64 that is set; the word must not be 0."""
    return np.uint64(63) - _leading_zeros(word)


@jit
def mask_from(place):
    """A uint64 with all bits set from a place on, which is a uint64 below 64."""
    return ~np.uint64(0) << place
