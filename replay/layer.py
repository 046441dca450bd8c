"""What a forward runs beside routed experts, at true sizes: attention with its cache, gate, shared expert, and the tail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.profile import ProfileError
from replay.device import Work
from replay.expert_kernel import Buffers
from tracer.llada2 import Attention, KVCache, Layer, RmsNorm, rotary_angles, rotate
from tracer.llada2_config import LLaDA2Config
from tracer.moe import Gate, Mlp
from tracer.schema import ModelShape, Pass

ROPE_THETA = 600000.0
Modules = TypeVar("Modules", bound=nn.Module)


class Extent(NamedTuple):
    """Sizes on which a pass's work beside routed experts depends, one entry for each of its requests."""

    num_tokens: tuple[int, ...]
    kv_lens: tuple[int, ...]  # committed positions

    @classmethod
    def of(cls, pass_: Pass) -> Extent:
        """Of a pass."""
        return cls(tuple(pass_.num_tokens.tolist()), tuple(pass_.kv_lens.tolist()))

    @property
    def total(self) -> int:
        """Tokens of all requests."""
        return sum(self.num_tokens)


def config_of(shape: ModelShape) -> LLaDA2Config:
    """A LLaDA2.x of this shape; what a shape does not say takes no time.

    Raises:
        ProfileError: a size is not known.
    """
    needed = ("hidden", "expert_intermediate", "num_heads", "num_kv_heads", "head_dim", "vocab")
    if unknown := [name for name in needed if not getattr(shape, name)]:
        raise ProfileError(
            f"the shape does not say {', '.join(unknown)}, so nothing can be run at it; set shape=llada2.0-mini or another"
        )
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
        rope_theta=ROPE_THETA,
        partial_rotary_factor=0.5,
        rms_norm_eps=1e-6,
        max_position_embeddings=32768,
        initializer_range=0.02,
        pad_token_id=0,
    )


class LayerModules(nn.Module):
    """A MoE layer without its routed experts."""

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, 0)
        self.after = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.gate = Gate(config, torch.float32)
        intermediate = config.num_shared_experts * config.moe_intermediate_size
        self.shared = Mlp(config.hidden_size, intermediate) if intermediate else None

    def forward(self, stream: Tensor, attend: Attend) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the residual stream [T, H]: the stream after attention, the experts' input, and the shared expert's part."""
        stream = stream + attend(self.attention, self.norm(stream))
        x = self.after(stream)
        self.gate(x)  # its choice is what the trace says, its work is done all the same
        return stream, x, None if self.shared is None else self.shared(x)


class TailModules(nn.Module):
    """Embedding, dense layers and head."""

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dense = nn.ModuleList(Layer(config, 0, torch.float32) for _ in range(config.first_k_dense_replace))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, stream: Tensor, token_ids: Tensor, chosen: Tensor, attend: Attend) -> Tensor:
        """Choose tokens by the last layer's stream [T, H], into `chosen`; returns what the first layer is given next."""
        chosen.copy_(self.head(self.norm(stream)).float().softmax(-1).max(-1).indices)
        hidden = self.embeddings(token_ids)
        for layer in cast(Iterable[Layer], self.dense):
            hidden = hidden + attend(layer.attention, layer.input_layernorm(hidden))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden


class Attend:
    """Attention of each request of a pass to its own committed positions and tokens."""

    def __init__(self, config: LLaDA2Config, extent: Extent, storage: Tensor) -> None:
        self._extent = extent
        self._caches = []
        for request, kv_len in enumerate(extent.kv_lens):
            cache = KVCache(config, 1, storage.shape[4], dtype=storage.dtype, device="meta")
            cache.storage, cache.length = storage[:, :, request : request + 1], kv_len
            self._caches.append(cache)
        positions = [
            torch.arange(kv_len, kv_len + count)
            for kv_len, count in zip(extent.kv_lens, extent.num_tokens, strict=True)
        ]
        angles = rotary_angles(torch.cat(positions), config.rotary_dim, config.rope_theta)
        self._cos, self._sin = (angle.to(storage.device) for angle in angles)

    def __call__(self, attention: Attention, x: Tensor) -> Tensor:
        """Attend from [T, H] to [T, H]."""
        x = x.unsqueeze(0)
        if len(self._caches) == 1:
            return attention(x, self._cos, self._sin, None, self._caches[0]).squeeze(0)
        query, key, value = attention.split(x)
        query, key = attention.query_layernorm(query), attention.key_layernorm(key)
        cos, sin = self._cos.to(query.dtype), self._sin.to(query.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        group = attention.heads[0] // attention.heads[1]
        parts = []
        counts = list(self._extent.num_tokens)
        for cache, q, k, v in zip(
            self._caches, *(heads.split(counts, dim=2) for heads in (query, key, value)), strict=True
        ):
            keys, values = (t.repeat_interleave(group, dim=1) for t in cache.extend(0, k, v))
            parts.append(functional.scaled_dot_product_attention(q, keys, values))
        return attention.dense(torch.cat(parts, dim=2).transpose(1, 2).flatten(2)).squeeze(0)


class Model:
    """All layers' work beside routed experts, with weights drawn at random, for some extents.

    Args:
        shape: all sizes known.
        num_layers: MoE layers.
        extents: that will be asked for.
        buffers: between which a layer works; `out` is the stream that it starts from.
        token_ids: [T] input tokens of the pass, on the device.
        where: it runs.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_layers: int,
        extents: set[Extent],
        buffers: Buffers,
        token_ids: Tensor,
        where: torch.device,
    ) -> None:
        config = config_of(shape)
        with torch.device("meta"):
            layers, tail = nn.ModuleList(LayerModules(config) for _ in range(num_layers)), TailModules(config)
        self._layers, self._tail = drawn(layers, where), drawn(tail, where)
        most = max(len(extent.num_tokens) for extent in extents)
        longest = max(k + n for extent in extents for k, n in zip(extent.kv_lens, extent.num_tokens, strict=True))
        size = (num_layers + 1, 1, 2, most, config.num_key_value_heads, longest, config.head_dim)
        self._storage = torch.zeros(size, dtype=torch.bfloat16, device=where).normal_()
        self._config, self._buffers, self._token_ids = config, buffers, token_ids
        self.chosen = torch.zeros(len(token_ids), dtype=torch.int64, device=where)  # token at each position

    def layer(self, extent: Extent, layer: int) -> Work:
        """Attention, gate and shared expert of a layer: from `out` to `stream`, `x` and `shared`."""
        modules, buffers = self._layers[layer], self._buffers
        attend = Attend(self._config, extent, self._storage[layer])
        count = extent.total

        def run() -> None:
            stream, x, shared = modules(buffers.out[:count], attend)
            buffers.stream[:count].copy_(stream)
            buffers.x[:count].copy_(x)
            if shared is not None:
                buffers.shared[:count].copy_(shared)

        return run

    def tail(self, extent: Extent) -> Work:
        """The head on `out`, and what the next forward begins with: embedding and dense layers, into `out`."""
        tail, out, count = self._tail, self._buffers.out, extent.total
        attend = Attend(self._config, extent, self._storage[-1])

        def run() -> None:
            out[:count].copy_(tail(out[:count], self._token_ids[:count], self.chosen[:count], attend))

        return run


def drawn(modules: Modules, device: torch.device) -> Modules:
    """The modules with random weights in bfloat16 on a device."""
    modules = modules.to_empty(device=device).to(torch.bfloat16).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for tensor in (*modules.parameters(), *modules.buffers()):
            tensor.normal_(std=0.02, generator=generator)
    return modules
