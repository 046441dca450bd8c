"""A set of positions that gives up the last of them at once: bits, and above them bits of words that are not empty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from simulator.bits import highest

_SIX, _LOW = np.uint64(6), np.uint64(63)


class Positions(NamedTuple):
    """Positions from 1 on; 0 is none."""

    words: NDArray[np.uint64]  # of all levels: a bit for each position, then a bit for each word of the level below
    starts: NDArray[np.uint64]  # of each level; the last has one word
    last: NDArray[np.uint64]  # [1] position, 0 in an empty set


@jit
def empty_positions(size):
    """No position; all that are added are below `size`."""
    num_levels, num_words = 1, (size + 63) // 64
    total = num_words
    while num_words > 1:
        num_words = (num_words + 63) // 64
        total += num_words
        num_levels += 1
    starts = np.zeros(num_levels, np.uint64)
    num_words = size
    for level in range(num_levels - 1):
        num_words = (num_words + 63) // 64
        starts[level + 1] = starts[level] + np.uint64(num_words)
    return Positions(np.zeros(total, np.uint64), starts, np.zeros(1, np.uint64))


@jit
def add(positions, position):
    """Add a position, uint64."""
    words = positions.words
    positions.last[0] = max(positions.last[0], position)
    for start in positions.starts:
        place = start + (position >> _SIX)
        before = words[place]
        words[place] = before | np.uint64(1) << (position & _LOW)
        if before != 0:
            return
        position >>= _SIX


@jit
def remove_last(positions):
    """Remove the last position; there must be one."""
    words, starts = positions.words, positions.starts
    position, level = positions.last[0], 0
    while level < starts.size:  # up to a word that holds another
        place = starts[level] + (position >> _SIX)
        words[place] &= ~(np.uint64(1) << (position & _LOW))
        position >>= _SIX
        if words[place] != 0:
            break
        level += 1
    else:
        positions.last[0] = 0
        return
    while level >= 0:  # and down to the last that is left
        position = (position << _SIX) + highest(words[starts[level] + position])
        level -= 1
    positions.last[0] = position
