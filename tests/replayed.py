"""A machine without a GPU that is small enough for tests, and what a layer's routed experts must give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from replay.arena import Arena
from replay.layout import Layout
from replay.machine import Machine
from tracer.schema import ModelShape, Pass


def small_shape(num_layers: int, num_experts: int, top_k: int, hidden: int = 64) -> ModelShape:
    return ModelShape(
        tuple(range(1, 1 + num_layers)),
        num_experts,
        top_k,
        hidden=hidden,
        expert_intermediate=hidden // 2,
        gate_scale=2.5,
        num_shared_experts=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab=128,
        dense_intermediate=64,
        num_dense_layers=1,
    )


def small_machine(
    passes: Sequence[Pass],
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_slots: int,
    *,
    factor: int = 1,
    hidden: int = 64,
    device: str = "cpu",
) -> Machine:
    shape = small_shape(num_layers, num_experts, top_k, hidden)
    layout = Layout(shape, num_layers, num_experts, top_k, num_slots, 4, factor, cpu_workers=1)
    arena = Arena(num_layers, num_experts, layout.expert_numel, padding=factor - 1, pinned=device != "cpu")
    arena.fill()
    machine = Machine(layout, device, arena, passes)
    machine.set_factor(factor)
    return machine


def dense_reference(arena: Arena, layer: int, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """The sum over each token's experts in float32, [T, H]."""
    out = torch.zeros(hidden.shape)
    for token in range(len(hidden)):
        for k in range(ids.shape[1]):
            out[token] += gates[token, k] * swiglu(arena.experts[layer][int(ids[token, k])], hidden[token])
    return out


def swiglu(expert: Tensor, x: Tensor) -> Tensor:
    """An expert's output in float32, [.., H]: gate [M, H], up [M, H] and down [H, M] in a row."""
    x = x.float()
    gate, up, down = expert.float().view(3, -1)
    gate, up = (matrix.view(-1, x.shape[-1]) for matrix in (gate, up))
    return (functional.silu(x @ gate.t()) * (x @ up.t())) @ down.view(x.shape[-1], -1).t()
