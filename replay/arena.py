"""The experts in host memory, each flat in a row, from where they are copied to the GPU or computed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from policies.profile import ProfileError
from tracer.memory import free_bytes

MIB = 2**20
LARGEST_CHUNK = 4 * 2**30  # larger pinned blocks are refused by some drivers
_BLOCK_STD = 0.02


class Budget(NamedTuple):
    """What an arena needs, before any of it is taken."""

    num_experts: int  # that have memory of their own
    expert_bytes: int
    chunks: tuple[int, ...]  # bytes of each, powers of two

    @property
    def num_bytes(self) -> int:
        """Of all chunks."""
        return sum(self.chunks)

    def __str__(self) -> str:
        return (
            f"{self.num_experts} experts of {self.expert_bytes / MIB:.4g} MiB: {self.num_bytes / MIB:.0f} MiB in "
            f"{len(self.chunks)} chunks"
        )


def plan_arena(num_experts: int, expert_bytes: int, padding: int = 0) -> Budget:
    """Chunks for so many experts: powers of two, since pinned memory is handed out in these, of 4 GiB at most.

    Args:
        num_experts: to be stored.
        expert_bytes: of each.
        padding: experts' worth of bytes that must follow the last expert of a chunk.
    """
    most = LARGEST_CHUNK // expert_bytes - padding
    if most < 1:
        raise ProfileError(
            f"{1 + padding} experts of {expert_bytes / MIB:.0f} MiB in a row: must fit a chunk of {LARGEST_CHUNK / MIB:.0f} MiB"
        )
    full, rest = divmod(num_experts, most)
    sizes = [LARGEST_CHUNK] * full
    if rest:
        sizes.append(1 << ((rest + padding) * expert_bytes - 1).bit_length())
    return Budget(num_experts, expert_bytes, tuple(sizes))


class Arena:
    """Experts of all layers in host memory, pinned where copies are to be fast.

    Where there is less room than experts need, some share memory: `num_distinct` says how many do not.

    Args:
        num_layers: L.
        num_experts: E.
        expert_numel: bfloat16 numbers of an expert: gate [M, H], up [M, H], down [H, M] in a row.
        num_distinct: experts with memory of their own; None is all.
        padding: experts' worth of bytes that can be read beyond any expert: the largest factor of copies, less one.
        pinned: whether the GPU can read it directly.
        allow_pageable: go on with pageable memory where it cannot be pinned; `is_pinned` tells.
        progress: told of the bytes that were taken, of those of `budget`.

    Raises:
        ProfileError: there is not so much memory, or not so much may be pinned.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        expert_numel: int,
        *,
        num_distinct: int | None = None,
        padding: int = 0,
        pinned: bool = False,
        allow_pageable: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        total = num_layers * num_experts
        self.num_distinct = total if num_distinct is None else num_distinct
        if not 1 <= self.num_distinct <= total:
            raise ProfileError(f"{self.num_distinct} distinct experts: must be 1 to {total}, those of all layers")
        self.budget = plan_arena(self.num_distinct, 2 * expert_numel, padding)
        _require_room(self.budget)
        self.is_pinned = pinned
        self._chunks: list[Tensor] = []
        self._progress = progress
        try:
            self._allocate(pinned)
        except RuntimeError as error:
            self._chunks.clear()
            if not pinned:
                raise ProfileError(f"{self.budget} of host memory could not be allocated: {_first(error)}") from None
            _clear_pending_error()
            if not allow_pageable:
                raise ProfileError(
                    f"{self.budget} of host memory could not be pinned: {_first(error)}; raise the limit (ulimit -l), "
                    "let fewer experts be distinct (distinct_experts), or allow pageable memory (allow_pageable)"
                ) from None
            self.is_pinned = False
            self._allocate(False)
        self.padding = padding
        per_chunk = LARGEST_CHUNK // (2 * expert_numel) - padding
        self._places = [divmod(i, per_chunk) for i in range(self.num_distinct)]
        flat = [self._at(i, expert_numel) for i in range(self.num_distinct)]
        every = [flat[i % self.num_distinct] for i in range(total)]
        self.experts = [every[i : i + num_experts] for i in range(0, total, num_experts)]  # [L][E]

    def fill(self, seed: int = 0, progress: Callable[[int], object] | None = None) -> None:
        """Draw weights, all distinct: one block of random numbers, turned by another length for each expert.

        Args:
            seed: of the block.
            progress: told of each expert.
        """
        numel = self.budget.expert_bytes // 2
        block = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(_BLOCK_STD).to(torch.bfloat16)
        for i in range(self.num_distinct):
            expert = self._at(i, numel)
            turn = i * 7919 % numel
            expert[: numel - turn].copy_(block[turn:])
            expert[numel - turn :].copy_(block[:turn])
            if progress is not None:
                progress(1)

    def _allocate(self, pinned: bool) -> None:
        for num_bytes in self.budget.chunks:
            self._chunks.append(torch.empty(num_bytes // 2, dtype=torch.bfloat16, pin_memory=pinned))
            if self._progress is not None:
                self._progress(num_bytes)

    def _at(self, index: int, numel: int) -> Tensor:
        chunk, place = self._places[index]
        return self._chunks[chunk][place * numel : (place + 1) * numel]


def _require_room(budget: Budget) -> None:
    """Refuse what the host has no memory for, before the system starts to end processes."""
    available = free_bytes(torch.device("cpu"))
    if budget.num_bytes > available:
        raise ProfileError(
            f"{budget} of host memory are needed, {available / MIB:.0f} MiB are available; let fewer experts be distinct (distinct_experts)"
        )


def _clear_pending_error() -> None:
    """Take back the error that a failed pinning leaves behind, which the next kernel would report as its own."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaGetLastError()  # pyright: ignore[reportOptionalMemberAccess]  # there is a GPU


def _first(error: BaseException) -> str:
    return str(error).splitlines()[0]
