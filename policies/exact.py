"""Compare similarities exactly, where rounding would decide between equals."""

from __future__ import annotations

import numpy as np

from policies.jit import jit

_BITS = 30
_LOW = (1 << _BITS) - 1


@jit
def more_similar(dot_a, norm_a, dot_b, norm_b):
    """Whether a vector is closer to a third one than another is, by cosine, in whole numbers and without rounding.

    Args:
        dot_a: product with the third vector, at least 0 and below 2**60, as all of these.
        norm_a: square of the length; a vector of length 0 is similar to nothing.
        dot_b: the same of the other.
        norm_b: the same of the other.
    """
    left = float(dot_a) * float(dot_a) * float(norm_b)  # dot_a / sqrt(norm_a) > dot_b / sqrt(norm_b), squared
    right = float(dot_b) * float(dot_b) * float(norm_a)
    if norm_a == 0 or norm_b == 0:
        return norm_b == 0 and dot_a > 0
    if abs(left - right) > 1e-12 * max(left, right):
        return left > right
    exact_left, exact_right = _product(dot_a, dot_a, norm_b), _product(dot_b, dot_b, norm_a)
    for place in range(exact_left.size - 1, -1, -1):
        if exact_left[place] != exact_right[place]:
            return exact_left[place] > exact_right[place]
    return False


@jit
def _product(a, b, c):
    """Product of three whole numbers as digits to the base 2**30, lowest first."""
    digits = np.zeros(6, np.int64)
    digits[0], digits[1] = a & _LOW, a >> _BITS
    for factor in (b, c):
        low, high = factor & _LOW, factor >> _BITS
        below = carry = 0
        for place in range(digits.size):
            here = digits[place]
            total = here * low + below * high + carry
            digits[place], carry, below = total & _LOW, total >> _BITS, here
    return digits
