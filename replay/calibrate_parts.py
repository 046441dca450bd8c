"""The parts of a forward at one shape, with weights of their own, as CUDA graphs where there is CUDA."""

from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor

from policies.profile import ProfileError
from replay.calibrate_gpu import Work
from replay.calibrate_link import MIB
from replay.expert_kernel import ExpertKernel
from tracer.llada2 import Attention, KVCache, Layer, RmsNorm, rotary_angles
from tracer.llada2_config import LLaDA2Config
from tracer.moe import Gate, Mlp
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
        self._config = config = _config_of(shape)
        expert_bytes = shape.expert_bytes("bfloat16")
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            num_slots = min(num_slots, free // 2 // expert_bytes)
            if num_slots < 64:
                raise ProfileError(
                    f"{device}: 64 experts of {expert_bytes / MIB:.0f} MiB in half of the memory are needed, "
                    f"{free / MIB:.0f} MiB are free"
                )
        make = {"dtype": torch.bfloat16, "device": device}
        with torch.device("meta"):
            modules = torch.nn.ModuleDict(
                {
                    "norm": RmsNorm(config.hidden_size, config.rms_norm_eps),
                    "attention": Attention(config, 0),
                    "after": RmsNorm(config.hidden_size, config.rms_norm_eps),
                    "gate": Gate(config, torch.float32),
                    "shared": Mlp(config.hidden_size, max(1, config.num_shared_experts) * config.moe_intermediate_size),
                    "embeddings": torch.nn.Embedding(config.vocab_size, config.hidden_size),
                    "head": torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False),
                    **{f"dense{i}": Layer(config, i, torch.float32) for i in range(config.first_k_dense_replace)},
                }
            )
        self._modules = modules.to_empty(device=device).to(torch.bfloat16)
        with torch.no_grad():
            for tensor in (*self._modules.parameters(), *self._modules.buffers()):
                tensor.normal_(std=0.02)
        self._slots = torch.empty(num_slots, expert_bytes // 2, **make).normal_(std=0.02)
        self._kernel = ExpertKernel(self._slots, shape.hidden, shape.expert_intermediate)

    def layer(self, num_tokens: int, kv_len: int) -> Work:
        """As `Parts.layer`."""
        parts, shape = self._modules, self._shape
        x = self._hidden(num_tokens).unsqueeze(0)
        cache = KVCache(self._config, 1, kv_len + num_tokens, dtype=torch.bfloat16, device=self._device)
        cache.storage.normal_()
        cache.length = kv_len
        cos, sin = rotary_angles(
            torch.arange(kv_len, kv_len + num_tokens, device=self._device), self._config.rotary_dim, 6e5
        )

        def run() -> None:
            after = x + parts["attention"](parts["norm"](x), cos, sin, None, cache)
            normed = parts["after"](after)
            parts["gate"](normed.flatten(0, 1))
            if shape.num_shared_experts:
                parts["shared"](normed)

        return self._captured(run)

    def kernel(self, num_experts: int, num_rows: int) -> Work:
        """As `Parts.kernel`."""
        num_slots = len(self._slots)
        x = self._hidden(max(1, num_rows))
        rows = torch.arange(num_rows, device=self._device)
        out = torch.empty(num_rows, self._shape.hidden, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator().manual_seed(num_experts)
        runs = []
        for _ in range(_VARIANTS):
            loads = torch.zeros(num_slots, dtype=torch.int32)
            loads[torch.randperm(num_slots, generator=generator)[:num_experts]] = num_rows // num_experts
            ends = loads.cumsum(0).to(torch.int32).to(self._device)
            runs.append(self._captured(lambda ends=ends: self._kernel.run(x, rows, ends, rows, out)))
        variants = cycle(runs)
        return lambda: next(variants)()

    def tail(self, num_tokens: int) -> Work:
        """As `Parts.tail`."""
        parts = self._modules
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=self._device)
        cache = KVCache(self._config, 1, 2 * num_tokens, dtype=torch.bfloat16, device=self._device)
        cos, sin = rotary_angles(torch.arange(num_tokens, device=self._device), self._config.rotary_dim, 6e5)

        def run() -> None:
            hidden = parts["embeddings"](ids)
            for i in range(self._config.first_k_dense_replace):
                hidden = parts[f"dense{i}"](hidden, cos, sin, None, cache)[0]
            parts["head"](parts["norm"](hidden)).float().softmax(-1).max(-1)

        return self._captured(run)

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
        is_cuda = self._device.type == "cuda"
        rows = torch.zeros(num_rows, self._shape.hidden, dtype=torch.bfloat16, pin_memory=is_cuda)
        places = torch.arange(num_rows, device=self._device)
        out = self._hidden(num_rows)

        def run() -> None:
            out.index_copy_(0, places, rows.to(self._device, non_blocking=True))

        return run

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


def _config_of(shape: ModelShape) -> LLaDA2Config:
    """A LLaDA2.x of this shape; what a shape does not say takes no time."""
    unknown = [
        name
        for name in ("hidden", "expert_intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab")
        if not getattr(shape, name)
    ]
    if unknown:
        raise ProfileError(f"the shape does not say {', '.join(unknown)}, so nothing can be measured at it")
    has_groups = shape.num_experts % 8 == 0 and shape.num_experts >= max(16, 2 * shape.top_k)
    return LLaDA2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.num_dense_layers + 1,
        first_k_dense_replace=shape.num_dense_layers,
        intermediate_size=max(1, shape.dense_intermediate),
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        num_shared_experts=shape.num_shared_experts,
        moe_intermediate_size=shape.expert_intermediate,
        n_group=8 if has_groups else 1,
        topk_group=4 if has_groups else 1,
        routed_scaling_factor=shape.gate_scale,
        rope_theta=600000.0,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        initializer_range=0.02,
        pad_token_id=0,
    )
