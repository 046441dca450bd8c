"""The LLaDA2.0 and LLaDA2.1 architecture, with a cache of keys and values and an observer of its routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tracer.llada2_config import LLaDA2Config
from tracer.mapped_experts import MappedExperts
from tracer.moe import Mlp, MoeLayer, Routing
from tracer.schema import TraceError


class Observer(Protocol):
    """Sees what a forward pass computes; the tensors are the model's own, on its device, and must not be changed."""

    def embedded(self, embeddings: Tensor) -> None:
        """Take the output [B, T, H] of the embedding layer, once a forward."""

    def moe_layer(self, layer_id: int, router_input: Tensor, routing: Routing, output: Tensor) -> None:
        """Take what one MoE layer did, once a layer and forward, in layer order.

        Args:
            layer_id: True number of the layer.
            router_input: Normalised input of gate and experts, [B, T, H].
            routing: What the gate decided, its fields [B, T, ...]; the model's scale is not applied to the weights.
            output: Residual stream after the layer, [B, T, H].
        """


class KVCache:
    """Keys (normalised and rotated) and values of the committed positions, the first `length` of each request.

    A forward writes its own keys and values behind the committed ones, and the next one overwrites them unless `length`
    was raised meanwhile: those of a denoising forward saw masks and are stale once a token is accepted.
    """

    def __init__(
        self, config: LLaDA2Config, batch_size: int, max_len: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if not 1 <= max_len <= config.max_position_embeddings:
            raise TraceError(f"cache of {max_len} positions: the model allows 1 to {config.max_position_embeddings}")
        heads, dim = config.num_key_value_heads, config.head_dim
        size = (config.num_hidden_layers, 2, batch_size, heads, max_len, dim)
        self.storage = torch.empty(size, dtype=dtype, device=device)  # [layers, 2, B, kv heads, max_len, head_dim]
        self.length = 0

    @property
    def max_len(self) -> int:
        """Positions for which there is room."""
        return self.storage.shape[4]

    def extend(self, layer_id: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's keys and values, [B, kv heads, T, head_dim], and return all, committed ones first."""
        end = self.length + keys.shape[2]
        if end > self.max_len:
            raise TraceError(
                f"layer {layer_id}: {self.length} committed and {keys.shape[2]} new positions, the cache holds {self.max_len}"
            )
        if keys.requires_grad:
            raise TraceError("a forward with a cache has no gradient: run it under torch.no_grad()")
        self.storage[layer_id, 0, :, :, self.length : end] = keys
        self.storage[layer_id, 1, :, :, self.length : end] = values
        return self.storage[layer_id, 0, :, :, :end], self.storage[layer_id, 1, :, :, :end]


def block_causal_mask(num_tokens: int, block_length: int, device: torch.device | str = "cpu") -> Tensor:
    """Mask [T, T] under which a token attends to its own block and those before; blocks start at position 0."""
    blocks = torch.arange(num_tokens, device=device) // block_length
    return blocks.unsqueeze(0) <= blocks.unsqueeze(1)


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and cast back before the weight is applied."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_angles(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine in fp32 of each position's angles.

    Args:
        positions: Absolute, [..., T].
        rotary_dim: Dimensions that rotate, R.
        theta: Base of the frequencies.

    Returns:
        Two tensors [..., T, R / 2]; entry i belongs to the pair of dimensions (i, i + R / 2).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions.unsqueeze(-1).float() * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of heads [B, heads, T, head_dim] by angles [B or 1, 1, T, R / 2]."""
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with norms of query and key before a partial rotation."""

    def __init__(self, config: LLaDA2Config, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.head_dim = config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=False)
        self.query_layernorm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.key_layernorm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value heads, [B, heads, T, head_dim], of a normalised input [B, T, H]."""
        fused = self.query_key_value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = fused.split(self.heads, dim=1)
        return query, key, value

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Attend from [B, T, H] to the committed positions and to itself."""
        query, key, value = self.split(x)
        query = self.query_layernorm(query)
        key = self.key_layernorm(key)
        cos, sin = cos.to(query.dtype), sin.to(query.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.extend(self.layer_id, key, value)
        group = self.heads[0] // self.heads[1]
        # Repeated by hand: enable_gqa would rule out the memory-efficient kernel.
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.dense(context.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One pre-norm transformer layer, dense or MoE."""

    def __init__(self, config: LLaDA2Config, layer_id: int, expert_bias_dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer_id)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        dense = layer_id < config.first_k_dense_replace
        self.mlp = Mlp(config.hidden_size, config.intermediate_size) if dense else MoeLayer(config, expert_bias_dtype)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        """Advance the residual stream [B, T, H] by one layer.

        Returns:
            The stream, the input of the feed-forward part, and the routing of a MoE layer's B * T tokens.
        """
        hidden = hidden + self.attention(self.input_layernorm(hidden), cos, sin, mask, cache)
        normed = self.post_attention_layernorm(hidden)
        if isinstance(self.mlp, Mlp):
            return hidden + self.mlp(normed), normed, None
        update, routing = self.mlp(normed)
        return hidden + update, normed, routing


class LLaDA2(nn.Module):
    """A LLaDA2.x model with freshly drawn weights; `tracer.checkpoint.load` reads trained ones.

    Modules carry the names of the checkpoint, less its leading `model.`, except that experts are stacked. A cast of
    the model (`.to(torch.bfloat16)`) leaves the expert biases as they are.

    Source:
        LLaDA2.0 and LLaDA2.1, released modeling code.
        Differs: Accepts a cache and any mask, where the released forward takes full windows only. Expert biases stay
        in fp32, which the released loader rounds to the dtype of the model.
    """

    def __init__(self, config: LLaDA2Config, *, expert_bias_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        rows = torch.empty(config.vocab_size, config.hidden_size)
        self.word_embeddings = nn.Embedding.from_pretrained(rows, freeze=False)
        self.layers = nn.ModuleList(Layer(config, i, expert_bias_dtype) for i in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1 and not parameter.is_meta:  # norms stay at 1; torch takes seconds to draw nothing
                nn.init.normal_(parameter, std=config.initializer_range)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.lm_head.weight.dtype

    def moe_layers(self) -> Iterator[tuple[int, MoeLayer]]:
        """True number and MoE part of each MoE layer, in order."""
        for layer_id, layer in enumerate(self.layers):
            if isinstance(layer.mlp, MoeLayer):
                yield layer_id, layer.mlp

    @property
    def has_mapped_experts(self) -> bool:
        """Whether routed experts stay in the files of the checkpoint."""
        return any(isinstance(mlp.experts, MappedExperts) for _, mlp in self.moe_layers())

    def num_parameters(self) -> int:
        """Trained numbers in memory; expert biases, which are buffers, and mapped experts are not counted."""
        return sum(parameter.numel() for parameter in self.parameters())

    def new_cache(self, batch_size: int, max_len: int) -> KVCache:
        """An empty cache in the dtype of the model and on its device."""
        return KVCache(self.config, batch_size, max_len, dtype=self.dtype, device=self.device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        mask: Tensor | None = None,
        additive: bool = False,
        cache: KVCache | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """Predict the token at every position.

        Args:
            token_ids: [B, T] int64.
            positions: Absolute positions, [B, T] or [T]; they may repeat.
            mask: Bool, broadcastable to [B, 1, T, S] with S the committed positions and T, in this order; True where
                the query may attend. None lets every query attend to everything.
            additive: The mask holds numbers instead, which are added to the attention scores.
            cache: Committed keys and values; needs a forward without gradients.
            observer: Called with the embeddings and after each MoE layer.

        Returns:
            Logits [B, T, V] in fp32; row p predicts the token at p itself, not the next one.

        Raises:
            TraceError: The mask is not bool though it is not `additive`, or the cache is full.
        """
        return self.head(
            self.hidden_states(token_ids, positions, mask=mask, additive=additive, cache=cache, observer=observer)
        )

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in fp32 of the last layer's output [..., H]."""
        return self.lm_head(self.norm(hidden)).float()

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        mask: Tensor | None = None,
        additive: bool = False,
        cache: KVCache | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """Output [B, T, H] of the last layer, before the head; arguments and errors as of `forward`."""
        if mask is not None and additive:
            mask = mask.to(self.dtype)
        elif mask is not None and mask.dtype != torch.bool:
            raise TraceError(f"attention mask of {mask.dtype}: must be bool, a number would be added to the scores")
        hidden = self.word_embeddings(token_ids)
        if observer is not None:
            observer.embedded(hidden)
        cos, sin = rotary_angles(positions, self.config.rotary_dim, self.config.rope_theta)
        if positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        for layer_id, layer in enumerate(self.layers):
            hidden, normed, routing = layer(hidden, cos, sin, mask, cache)
            if observer is not None and routing is not None:
                routing = Routing._make(values.unflatten(0, hidden.shape[:2]) for values in routing)
                observer.moe_layer(layer_id, normed, routing, hidden)
        return hidden
