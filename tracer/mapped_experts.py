"""Routed experts that stay in the files of a checkpoint, for machines whose memory cannot hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tracer.moe import one_by_one, weighted_sum
from tracer.shard import require_finite


class StoredMatrix(NamedTuple):
    """One matrix of an expert, a view of a mapped file."""

    where: str  # file and name, for errors
    tensor: Tensor


class StoredExpert(NamedTuple):
    """The three matrices of an expert, which need not be in one file."""

    gate: StoredMatrix  # [M, H]
    up: StoredMatrix  # [M, H]
    down: StoredMatrix  # [H, M]


class Staging:
    """Room for one expert in the dtype and on the device that the model computes in; all layers share it."""

    def __init__(self) -> None:
        self._w13 = self._w2 = torch.empty(0)

    def matrices(self, expert: StoredExpert, like: Tensor) -> tuple[Tensor, Tensor]:
        """Copy an expert here: [2M, H], gate rows first, and [H, M]; the next call overwrites them."""
        num_rows, hidden = expert.gate.tensor.shape
        kept = self._w13
        if (kept.shape, kept.dtype, kept.device) != ((2 * num_rows, hidden), like.dtype, like.device):
            self._w13 = like.new_empty(2 * num_rows, hidden)
            self._w2 = like.new_empty(hidden, num_rows)
        self._w13[:num_rows].copy_(expert.gate.tensor)
        self._w13[num_rows:].copy_(expert.up.tensor)
        self._w2.copy_(expert.down.tensor)
        return self._w13, self._w2


class MappedExperts(nn.Module):
    """All routed experts of one layer, each read from its files when tokens are routed to it; for inference only.

    What was read stays in memory as long as the system sees fit. Outputs are bit by bit those of `Experts`, except
    where that has a kernel for all experts at once. They follow the dtype and device of their input: a cast or a
    move of the model leaves them where they are.
    """

    def __init__(self, stored: Sequence[StoredExpert], staging: Staging) -> None:
        super().__init__()
        self.stored = stored
        self._staging = staging
        self._checked: set[tuple[int, torch.dtype]] = set()

    @torch.no_grad()
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts, as `weighted_sum` has it.

        Raises:
            TraceError: An expert that is used for the first time holds what is not finite.
        """
        return weighted_sum(x, ids, weights, len(self.stored), self._outputs)

    def _outputs(self, rows: Tensor, ends: Tensor) -> Tensor:
        def matrices(expert: int) -> tuple[Tensor, Tensor]:
            self._check(expert, rows.dtype)
            return self._staging.matrices(self.stored[expert], rows)

        return one_by_one(rows, ends, matrices)

    def _check(self, expert: int, dtype: torch.dtype) -> None:
        if (expert, dtype) not in self._checked:
            for matrix in self.stored[expert]:
                require_finite(matrix.where, matrix.tensor, dtype)
            self._checked.add((expert, dtype))
