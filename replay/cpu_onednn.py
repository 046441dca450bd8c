"""Experts of a batch on the CPU through PyTorch's oneDNN, one expert a thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


class OneDnn:
    """A pool of threads, each of which computes whole experts with one thread of oneDNN.

    Threads of a pool inherit the width of the process's OpenMP, so that as many teams as workers would fight for the
    cores: each is set to one.
    """

    def __init__(self, hidden: int, intermediate: int, num_workers: int) -> None:
        self._hidden, self._intermediate = hidden, intermediate
        self._pool = ThreadPoolExecutor(num_workers, "onednn", initializer=torch.set_num_threads, initargs=(1,))

    def run(
        self, experts: Sequence[Tensor], ends: NDArray[np.int64], rows: NDArray[np.int64], hidden: Tensor, out: Tensor
    ) -> None:
        """Compute a batch; arguments as of `cpu_experts.Batch`."""
        x = hidden[torch.from_numpy(rows)]
        bounds = [0, *ends.tolist()]
        parts = [
            self._pool.submit(self._expert, expert, x[first:end], out[first:end])
            for expert, first, end in zip(experts, bounds[:-1], bounds[1:], strict=True)
            if end > first
        ]
        for part in parts:
            part.result()

    @torch.inference_mode()
    def _expert(self, weights: Tensor, x: Tensor, out: Tensor) -> None:
        matrix = self._hidden * self._intermediate
        both = weights[: 2 * matrix].view(2 * self._intermediate, self._hidden)
        gate, up = functional.linear(x, both).chunk(2, dim=-1)
        down = weights[2 * matrix :].view(self._hidden, self._intermediate)
        torch.mm(functional.silu(gate) * up, down.t(), out=out)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
