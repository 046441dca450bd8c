"""Sizes of a machine, and whether its GPU has room for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from policies.profile import ProfileError
from replay.arena import MIB
from tracer.memory import free_bytes
from tracer.schema import ModelShape

FACTORS = (1, 2, 4)


@dataclass(frozen=True)
class Layout:
    """Sizes of a machine."""

    shape: ModelShape  # of the experts and of everything else
    num_layers: int  # MoE layers that routing is for
    num_experts: int
    top_k: int
    num_slots: int
    transfer_chunk: int
    most_h2d_bytes_factor: int = 1  # copies can be so many times the size of an expert
    cpu_workers: int | None = None
    cpu_kernel: str = "rows"

    def __post_init__(self) -> None:
        if self.most_h2d_bytes_factor not in FACTORS:
            raise ProfileError(
                f"h2d_bytes_factor is {self.most_h2d_bytes_factor}, allowed are {', '.join(map(str, FACTORS))}"
            )

    @property
    def expert_numel(self) -> int:
        """Numbers of an expert, in bfloat16."""
        return 3 * self.shape.hidden * self.shape.expert_intermediate

    @property
    def slot_numel(self) -> int:
        """Numbers of a slot."""
        return self.most_h2d_bytes_factor * self.expert_numel

    def require_room(self, where: torch.device) -> None:
        """Refuse more slots than a GPU has memory for.

        Raises:
            ProfileError: with how many fit.
        """
        if where.type != "cuda":
            return
        free, one = int(free_bytes(where)), 2 * self.slot_numel
        if self.num_slots * one > free:
            raise ProfileError(
                f"{self.num_slots} slots of {one / MIB:.4g} MiB need {self.num_slots * one / MIB:.0f} MiB of GPU memory, "
                f"{free / MIB:.0f} MiB are free: at most {free // one} slots fit, staging included"
            )
