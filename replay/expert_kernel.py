"""Experts on the GPU: one grouped kernel over a pool of slots, with empty groups for what is not asked for."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tracer.moe import grouped_mm


class ExpertKernel:
    """SwiGLU of the experts that lie in slots of one allocation, without gathering them.

    Args:
        slots: [S, 3 * H * M] bfloat16, S below 1024 on a GPU; in each an expert: gate [M, H], up [M, H], down [H, M] in a row.
        hidden: H.
        intermediate: M.
    """

    def __init__(self, slots: Tensor, hidden: int, intermediate: int) -> None:
        both = 2 * hidden * intermediate
        self._w13 = slots[:, :both].unflatten(1, (2 * intermediate, hidden)).transpose(1, 2)  # [S, H, 2M]
        self._w2 = slots[:, both:].unflatten(1, (hidden, intermediate)).transpose(1, 2)  # [S, M, H]

    def run(self, x: Tensor, rows: Tensor, ends: Tensor, places: Tensor, out: Tensor) -> None:
        """Compute some rows of x, each by one expert.

        Args:
            x: [T, H] bfloat16.
            rows: row of x of each row of the group, sorted by slot, [N] int64.
            ends: end of each slot's rows within the group, [S] int32.
            places: row of `out` of each row of the group, [N] int64.
            out: [.., H] bfloat16, written at `places` alone.
        """
        gate, up = grouped_mm(x.index_select(0, rows), self._w13, offs=ends).chunk(2, dim=-1)
        out.index_copy_(0, places, grouped_mm(functional.silu(gate) * up, self._w2, offs=ends))
