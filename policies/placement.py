"""Which experts are on the GPU from the start, by what was counted beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def first_of_each_layer(capacity: NDArray[np.int64], num_experts: int) -> NDArray[np.bool_]:
    """The experts of lowest id, as many of each layer as it has slots, [L, E]; `capacity` is [L]."""
    return np.arange(num_experts) < capacity[:, None]


def highest_of_each_layer(values: NDArray[Any], capacity: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The experts of highest value, as many of each layer as it has slots, [L, E]; ties to the lower id.

    Args:
        values: [L, E].
        capacity: [L].
    """
    ranks = np.argsort(np.argsort(-values, axis=1, kind="stable"), axis=1)
    return ranks < capacity[:, None]


def highest_of_all(values: NDArray[Any], slots: int) -> NDArray[np.bool_]:
    """The `slots` experts of highest value, whatever their layer, [L, E]; ties to the lower layer, then the lower id."""
    return highest_of_each_layer(values.reshape(1, -1), np.array([slots])).reshape(values.shape)
