"""The parts of a forward at one shape, with weights of their own, as CUDA graphs where there is CUDA."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from policies.profile import ProfileError
from replay.arrange import Index
from replay.calibrate_gpu import Work
from replay.calibrate_link import MIB
from replay.expert_kernel import expert_kernels, make_buffers
from replay.layer import Attend, Extent, LayerModules, TailModules, config_of, drawn
from tracer.schema import ModelShape

_VARIANTS = 4  # of the experts of a kernel, so that caches of the GPU do not hold them


class LLaDA2Parts:
    """Parts of LLaDA2.x, drawn at random: what they take does not depend on the weights.

    Args:
        shape: all sizes known.
        device: where they run.
        num_slots: of the pool that the grouped kernel goes through, at most as many as half of the free memory holds.

    Raises:
        ProfileError: a size is not known, or the device has too little memory.
    """

    def __init__(self, shape: ModelShape, device: torch.device, num_slots: int = 128) -> None:
        self._shape, self._device = shape, device
        self._config = config = config_of(shape)
        expert_bytes = shape.expert_bytes("bfloat16")
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            num_slots = min(num_slots, free // 2 // expert_bytes)
            if num_slots < 64:
                raise ProfileError(
                    f"{device}: 64 experts of {expert_bytes / MIB:.0f} MiB in half of the memory are needed, "
                    f"{free / MIB:.0f} MiB are free"
                )
        with torch.device("meta"):
            layer, tail = LayerModules(config), TailModules(config)
        self._layer, self._tail = drawn(layer, device), drawn(tail, device)
        self._slots = torch.empty(num_slots, expert_bytes // 2, dtype=torch.bfloat16, device=device).normal_(std=0.02)

    def layer(self, num_tokens: int, kv_len: int) -> Work:
        """As `Parts.layer`."""
        stream, out = self._hidden(num_tokens), make_buffers(self._slots, num_tokens, 1, self._shape.hidden)
        attend = self._attend(num_tokens, kv_len)

        def run() -> None:
            after, x, shared = self._layer(stream, attend)
            out.stream.copy_(after)
            out.x.copy_(x)
            if shared is not None:
                out.shared.copy_(shared)

        return self._captured(run)

    def kernel(self, num_experts: int, num_rows: int) -> Work:
        """As `Parts.kernel`."""
        shape, num_slots = self._shape, len(self._slots)
        buffers = make_buffers(self._slots, num_rows, 1, shape.hidden)
        buffers.x.copy_(self._hidden(num_rows))
        generator = np.random.default_rng(num_experts)
        experts, runs = np.arange(num_experts), []
        ids = np.sort(np.arange(num_rows, dtype=np.int32) % num_experts)[:, None]
        for _ in range(_VARIANTS):
            index = Index(1, num_experts, num_rows, self._device)
            slots = generator.permutation(num_slots)[:num_experts].astype(np.int32)
            index.write(ids, experts, np.array([num_experts]), slots, experts[:0])
            kernels = expert_kernels(buffers, index, shape.hidden, shape.expert_intermediate)
            kernels.fetch()
            runs.append(self._captured(lambda kernels=kernels: kernels.run(0, num_experts)))
        variants = cycle(runs)
        return lambda: next(variants)()

    def tail(self, num_tokens: int) -> Work:
        """As `Parts.tail`."""
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        stream, chosen, attend = self._hidden(num_tokens), torch.zeros_like(ids), self._attend(num_tokens, 0)
        return self._captured(lambda: self._tail(stream, ids, chosen, attend))

    def read_gate(self, num_tokens: int) -> Work:
        """As `Parts.read_gate`."""
        shape, is_cuda = self._shape, self._device.type == "cuda"
        ids = torch.zeros(num_tokens, shape.top_k, dtype=torch.int32, device=self._device)
        hidden = self._hidden(num_tokens)
        found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=is_cuda) for t in (ids, hidden)]
        event = torch.cuda.Event() if is_cuda else None

        def run() -> None:
            found[0].copy_(ids, non_blocking=True)
            found[1].copy_(hidden, non_blocking=True)
            if event is not None:
                event.record()
                event.synchronize()

        return run

    def return_rows(self, num_rows: int) -> Work:
        """As `Parts.return_rows`."""
        shape = self._shape
        buffers = make_buffers(self._slots, num_rows, 1, shape.hidden)
        index = Index(1, 1, num_rows, self._device)
        none = np.empty(0, np.int64)
        ids = np.zeros((num_rows, 1), np.int32)
        index.write(ids, none, np.array([0]), none.astype(np.int32), np.array([0]))
        kernels = expert_kernels(buffers, index, shape.hidden, shape.expert_intermediate)
        kernels.fetch()
        return self._captured(lambda: kernels.combine(num_rows))

    def _attend(self, num_tokens: int, kv_len: int) -> Attend:
        config = self._config
        size = (1, 2, 1, config.num_key_value_heads, kv_len + num_tokens, config.head_dim)
        storage = torch.zeros(size, dtype=torch.bfloat16, device=self._device).normal_()
        return Attend(config, Extent((num_tokens,), (kv_len,)), storage)

    def _hidden(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self._shape.hidden, device=self._device).to(torch.bfloat16)

    def _captured(self, run: Work) -> Work:
        """The same work as a graph, which the host launches in one call."""
        if self._device.type != "cuda":
            return run
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        kept = (graph, run)  # a graph does not keep the tensors that it reads
        return lambda: kept[0].replay()
