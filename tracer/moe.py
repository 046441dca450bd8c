"""The mixture-of-experts layer of LLaDA2.x: group-limited sigmoid gate, stacked experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tracer.llada2_config import LLaDA2Config

if TYPE_CHECKING:
    from tracer.mapped_experts import MappedExperts

grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]  # private before 2.10


class Routing(NamedTuple):
    """What the gate decided for N tokens."""

    ids: Tensor  # [N, K] int64, best biased score first
    weights: Tensor  # [N, K] fp32, each row sums to 1
    scores: Tensor  # [N, E] fp32, sigmoid
    biased: Tensor  # [N, E] fp32, scores plus expert bias


def route(scores: Tensor, expert_bias: Tensor, *, num_groups: int, top_groups: int, top_k: int) -> Routing:
    """Choose the experts of each token, and their weights.

    A group of consecutive experts is worth the sum of its two largest biased scores; experts are chosen by biased
    score within the best groups, and weighted by their unbiased scores. Ties go to the lower id.

    Args:
        scores: Sigmoid of the router logits, [N, E] fp32.
        expert_bias: [E], added to the scores for the choice only.
        num_groups: Groups of E / num_groups experts, at least two each.
        top_groups: Groups from which a token may choose.
        top_k: Experts of a token.

    Source:
        LLaDA2.0, released modeling code, the gate's group-limited top-k.
    """
    with torch.no_grad():
        biased = scores + expert_bias.float()
        best_groups = _best(group_values(biased, num_groups), top_groups)
        groups = biased.unflatten(-1, (num_groups, -1))
        closed = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best_groups, False)
        ids = _best(groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2), top_k)
    weights = scores.gather(-1, ids)
    return Routing(ids, weights / (weights.sum(-1, keepdim=True) + 1e-20), scores, biased)


def group_values(biased: Tensor, num_groups: int) -> Tensor:
    """What each group of consecutive experts is worth, [N, G]: the sum of its two largest biased scores [N, E]."""
    largest, place = biased.unflatten(-1, (num_groups, -1)).max(-1, keepdim=True)
    second = biased.unflatten(-1, (num_groups, -1)).scatter(-1, place, float("-inf")).amax(-1)
    return largest.squeeze(-1) + second


def _best(values: Tensor, count: int) -> Tensor:
    """Ids of the largest of each row, ties to the lower one, which topk breaks differently from device to device."""
    if not torch.compiler.is_compiling():
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    places = torch.arange(values.shape[-1], device=values.device)
    found = []
    for _ in range(count):  # the same; compiled, all of it is one kernel
        found.append(values.argmax(-1, keepdim=True))
        values = values.masked_fill(places == found[-1], float("-inf"))
    return torch.cat(found, dim=-1)


class Gate(nn.Module):
    """Router of one MoE layer, in fp32 whatever the dtype of the model."""

    expert_bias: Tensor

    def __init__(self, config: LLaDA2Config, expert_bias_dtype: torch.dtype) -> None:
        super().__init__()
        self.num_groups = config.n_group
        self.top_groups = config.topk_group
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=expert_bias_dtype))

    def scores(self, router_input: Tensor) -> Tensor:
        """Sigmoid scores [..., E] in fp32 of a router input [..., H]."""
        with torch.autocast(router_input.device.type, enabled=False):
            return functional.linear(router_input.float(), self.weight.float()).sigmoid()

    def forward(self, router_input: Tensor) -> Routing:
        """Route N tokens, [N, H]."""
        sizes = {"num_groups": self.num_groups, "top_groups": self.top_groups, "top_k": self.top_k}
        return route(self.scores(router_input), self.expert_bias, **sizes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        # A cast of the model must not round the bias: that alone changes the experts of many tokens.
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


class Experts(nn.Module):
    """All routed experts of one layer, their matrices stacked."""

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        experts, hidden, intermediate = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.w13 = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))  # [E, 2M, H] gate rows first
        self.w2 = nn.Parameter(torch.empty(experts, hidden, intermediate))  # [E, H, M]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts, as `weighted_sum` has it."""
        return weighted_sum(x, ids, weights, len(self.w13), self._outputs)

    def _outputs(self, rows: Tensor, ends: Tensor) -> Tensor:
        if self._can_group(rows):
            return self._grouped(rows, ends)
        matrices = list(zip(self.w13.unbind(), self.w2.unbind(), strict=True))
        return one_by_one(rows, ends, matrices.__getitem__)

    def _can_group(self, rows: Tensor) -> bool:
        if not rows.is_cuda or self._compute_dtype(rows) != torch.bfloat16:
            return False
        aligned = self.w13.shape[1] % 16 == 0 and self.w13.shape[2] % 8 == 0  # rows of 16 bytes
        return aligned and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)

    @staticmethod
    def _compute_dtype(rows: Tensor) -> torch.dtype:
        kind = rows.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype

    def _grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        dtype = self._compute_dtype(rows)
        gate, up = grouped_mm(rows.to(dtype), self.w13.to(dtype).transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return grouped_mm(functional.silu(gate) * up, self.w2.to(dtype).transpose(1, 2), offs=ends)


def weighted_sum(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, outputs: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Weighted sum of each token's experts.

    Args:
        x: [N, H].
        ids: Experts of each token, [N, K].
        weights: fp32, the model's scale applied, [N, K].
        num_experts: E.
        outputs: What the experts make of rows [N * K, H], sorted by expert, of which the last of each expert ends
            before `ends` [E] int32; [N * K, H].

    Returns:
        [N, H] in the dtype of x; summed in fp32, in the order of ids.
    """
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(
        sorted_ids, torch.arange(num_experts, device=ids.device), right=True, out_int32=True
    )  # [E]
    # Repeated before it is permuted: the gradient of a token is then summed over its experts in a fixed order.
    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1).flatten(0, 1).index_select(0, order)
    rows = outputs(rows, ends)
    rows = torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, ids.shape)
    return (rows.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def one_by_one(rows: Tensor, ends: Tensor, matrices: Callable[[int], tuple[Tensor, Tensor]]) -> Tensor:
    """Outputs of rows sorted by expert, one expert after the other.

    Args:
        rows: [R, H].
        ends: Where each expert's rows end, [E].
        matrices: [2M, H], gate rows first, and [H, M] of an expert; asked of those that have rows, in order, and
            used until the next is asked for.
    """
    outputs = []
    # Split at once: the gradient of each slice on its own would be as long as all rows.
    parts = rows.split(ends.diff(prepend=ends.new_zeros(1)).tolist())
    for expert, part in enumerate(parts):
        if len(part):
            w13, w2 = matrices(expert)
            gate, up = functional.linear(part, w13).chunk(2, dim=-1)
            outputs.append(functional.linear(functional.silu(gate) * up, w2))
    return torch.cat(outputs)


class Mlp(nn.Module):
    """SwiGLU feed-forward network: the dense layers, and the shared expert."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoeLayer(nn.Module):
    """Gate, routed experts and shared expert."""

    experts: Experts | MappedExperts

    def __init__(self, config: LLaDA2Config, expert_bias_dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = config.routed_scaling_factor
        self.gate = Gate(config, expert_bias_dtype)
        self.experts = Experts(config)
        self.shared_experts = Mlp(config.hidden_size, config.num_shared_experts * config.moe_intermediate_size)

    def forward(self, router_input: Tensor) -> tuple[Tensor, Routing]:
        """Output [B, T, H] of a router input [B, T, H], and its routing of the B * T tokens."""
        x = router_input.flatten(0, 1)
        routing = self.gate(x)
        routed = self.experts(x, routing.ids, routing.weights * self.scale)
        # The shared expert is neither gated nor scaled.
        return routed.view_as(router_input) + self.shared_experts(router_input), routing
