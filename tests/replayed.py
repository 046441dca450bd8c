"""A machine without a GPU that is small enough for tests, and what a layer's routed experts must give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from replay.arena import Arena
from replay.device import open_device
from replay.machine import Layout, Machine
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
    machine = Machine(layout, open_device(device), arena, passes)
    machine.set_factor(factor)
    return machine


def dense_reference(arena: Arena, layer: int, shape: ModelShape, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    """The sum over each token's experts in float32, [T, H]."""
    size, intermediate = shape.hidden, shape.expert_intermediate
    out = torch.zeros(hidden.shape)
    for token in range(len(hidden)):
        for k in range(ids.shape[1]):
            weights = arena.experts[layer][int(ids[token, k])].float()
            gate, up, down = weights.split(size * intermediate)
            x = hidden[token].float()
            middle = functional.silu(gate.view(intermediate, size) @ x) * (up.view(intermediate, size) @ x)
            out[token] += gates[token, k] * (down.view(size, intermediate) @ middle)
    return out
