"""Routed experts of a layer on its device: kernels over groups of slots, and the sum over each token's experts."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from policies.profile import ProfileError
from replay.arrange import Index

_BLOCK_ROWS, _WORDS = 16, 1024


class Buffers(NamedTuple):
    """What the kernels of all layers read and write."""

    slots: Tensor  # [S, .] bfloat16, in each an expert at its start: gate [M, H], up [M, H], down [H, M] in a row
    x: Tensor  # [T, H] bfloat16 normalised input of gate and experts
    stream: Tensor  # [T, H] bfloat16 residual stream after attention
    shared: Tensor  # [T, H] bfloat16 what the shared expert adds
    gates: Tensor  # [T, K] float32, the model's scale applied
    rows: Tensor  # [T * K, H] bfloat16 results of the device, by place token * K + k
    host_rows: Tensor  # [T * K, H] bfloat16 results of the CPU, in host memory
    out: Tensor  # [T, H] bfloat16 residual stream after the layer


def make_buffers(slots: Tensor, num_tokens: int, top_k: int, hidden: int) -> Buffers:
    """Buffers for so many tokens, beside these slots."""
    device = slots.device

    def make(count: int) -> Tensor:
        return torch.zeros(count, hidden, dtype=torch.bfloat16, device=device)

    return Buffers(
        slots,
        x=make(num_tokens),
        stream=make(num_tokens),
        shared=make(num_tokens),
        gates=torch.zeros(num_tokens, top_k, device=device),
        rows=make(num_tokens * top_k),
        host_rows=torch.zeros(num_tokens * top_k, hidden, dtype=torch.bfloat16, pin_memory=device.type == "cuda"),
        out=make(num_tokens),
    )


class ExpertKernels(Protocol):
    """Kernels over what an Index says of a layer; each is put on the device's current stream."""

    def fetch(self) -> None:
        """Bring the index to the device."""
        ...

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy whole words between memory of the device and of the host, pinned where there is a GPU."""
        ...

    def run(self, group: int, most: int) -> None:
        """Compute the experts of a group, `most` or fewer, into their places in `rows`."""
        ...

    def combine(self, num_tokens: int) -> None:
        """Add to `stream` the shared expert and each token's experts in the order of k, into `out`."""
        ...


def expert_kernels(buffers: Buffers, index: Index, hidden: int, intermediate: int) -> ExpertKernels:
    """The kernels of the device that the buffers are on.

    Raises:
        ProfileError: the sizes are not multiples of what the kernels compute at once, or Triton is missing.
    """
    if buffers.slots.device.type == "cuda":
        return _TritonKernels(buffers, index, hidden, intermediate)
    return _PlainKernels(buffers, index, hidden, intermediate)


class _PlainKernels:
    """The same, written for reading, and run where there is no GPU."""

    def __init__(self, buffers: Buffers, index: Index, hidden: int, intermediate: int) -> None:
        self._buffers, self._index, self._hidden, self._intermediate = buffers, index, hidden, intermediate
        self._top_k = buffers.gates.shape[1]

    def fetch(self) -> None:
        pass

    def move(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def run(self, group: int, most: int) -> None:
        slots, x, rows = self._buffers.slots, self._buffers.x, self._buffers.rows
        index, matrix = self._index, self._hidden * self._intermediate
        values = index.host
        for job in range(int(values[group]), int(values[group + 1])):
            first, end = values[index.row_first + job : index.row_first + job + 2].tolist()
            places = values[index.place + first : index.place + end].long()
            weights = slots[int(values[index.slot + job])]
            both = weights[: 2 * matrix].view(2 * self._intermediate, self._hidden)
            gate, up = functional.linear(x[places // self._top_k], both).chunk(2, dim=-1)
            down = weights[2 * matrix : 3 * matrix].view(self._hidden, self._intermediate)
            rows[places] = functional.linear(functional.silu(gate) * up, down)

    def combine(self, num_tokens: int) -> None:
        _, _, stream, shared, gates, rows, host_rows, out = self._buffers
        first = self._index.place + num_tokens * self._top_k
        source = self._index.host[first : first + num_tokens * self._top_k].long()
        found = torch.where(
            (source >= 0).unsqueeze(1), rows[source.clamp(min=0)], host_rows[(-1 - source).clamp(min=0)]
        )
        sums = torch.zeros(num_tokens, self._hidden)
        for k in range(self._top_k):
            sums += gates[:num_tokens, k : k + 1] * found[k :: self._top_k].float()
        out[:num_tokens] = stream[:num_tokens] + (sums.to(torch.bfloat16) + shared[:num_tokens])


class _TritonKernels:
    """Kernels that read weights where they lie: any slot, without a gather, whatever the number of slots."""

    def __init__(self, buffers: Buffers, index: Index, hidden: int, intermediate: int) -> None:
        try:
            from replay import gpu_kernels
        except ImportError:
            raise ProfileError("experts on a GPU need Triton, which comes with PyTorch for CUDA on Linux") from None
        if hidden % 128 or intermediate % 128:
            raise ProfileError(f"experts of {hidden} x {intermediate}: both must be multiples of 128 on a GPU")
        self._kernels, self._buffers, self._index = gpu_kernels, buffers, index
        self._hidden, self._top_k = hidden, buffers.gates.shape[1]
        self._middle = torch.zeros(len(buffers.rows), intermediate, dtype=torch.bfloat16, device=buffers.x.device)
        self._stride = buffers.slots.stride(0)
        self._layout = {
            "slots_at": index.slot,
            "rows_at": index.row_first,
            "places_at": index.place,
            "hidden": hidden,
            "intermediate": intermediate,
            "block_rows": _BLOCK_ROWS,
        }

    def fetch(self) -> None:
        self.move(self._index.host, self._index.device)

    def move(self, source: Tensor, target: Tensor) -> None:
        words, into = (tensor.reshape(-1).view(torch.int32) for tensor in (source, target))
        blocks = -(-len(words) // _WORDS)
        self._kernels.move_kernel[(blocks,)](words, into, len(words), block=_WORDS)

    def run(self, group: int, most: int) -> None:
        buffers, layout, index = self._buffers, self._layout, self._index.device
        shared = {**layout, "block_k": 128, "num_warps": 4, "num_stages": 4}
        self._kernels.gate_up_kernel[(most, layout["intermediate"] // 32)](
            *(buffers.x, buffers.slots, index, self._middle, group, self._stride),
            top_k=self._top_k,
            block_n=32,
            **shared,
        )
        self._kernels.down_kernel[(most, self._hidden // 64)](
            *(self._middle, buffers.slots, index, buffers.rows, group, self._stride), block_n=64, **shared
        )

    def combine(self, num_tokens: int) -> None:
        _, _, stream, shared, gates, rows, host_rows, out = self._buffers
        self._kernels.combine_kernel[(num_tokens, self._hidden // 128)](
            *(self._index.device, rows, host_rows, gates, shared, stream, out),
            sources_at=self._index.place + num_tokens * self._top_k,
            top_k=self._top_k,
            hidden=self._hidden,
            block=128,
            num_warps=1,
        )
