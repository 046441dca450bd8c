"""Slots are of one layer, or of all layers together: which pool a layer uses, and how experts are numbered in it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from policies.jit import jit


@jit
def pool_of(capacity, layer):
    """Pool that a layer uses: its index into `capacity`, and at the same time the lowest layer of the pool.

    Args:
        capacity: [L] slots of each layer, or [1] where the pool is global.
        layer: of all.
    """
    return layer if capacity.size > 1 else 0


@jit
def number_in_pool(capacity, num_experts, layer, expert):
    """Number of an expert within its pool: its own id, or layer * E + expert where the pool is global."""
    return (layer - pool_of(capacity, layer)) * num_experts + expert


def part_of_pool(capacity: NDArray[Any], layer: int, experts: NDArray[Any]) -> NDArray[Any]:
    """View of the part of an [L, E] array that is the pool of a layer: [E], or [L * E] where the pool is global."""
    return experts.reshape(capacity.size, -1)[pool_of(capacity, layer)]
