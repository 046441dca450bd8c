"""A checkpoint's own experts in the arena, in place of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from replay.arena import Arena
from tracer.checkpoint import read_config, read_index
from tracer.llada2_config import LLaDA2Config
from tracer.schema import ModelShape, TraceError

_MATRICES = ("gate_proj", "up_proj", "down_proj")  # in the order of an expert's numbers in the arena


def check_checkpoint(directory: Path, shape: ModelShape) -> LLaDA2Config:
    """The checkpoint's configuration, if its experts are of this shape.

    Raises:
        TraceError: it cannot be read, or its experts are of other sizes or another number.
    """
    config = read_config(directory)
    for name, found, wanted in (
        ("MoE layers", len(config.moe_layer_ids), shape.num_layers),
        ("experts", config.num_experts, shape.num_experts),
        ("hidden size", config.hidden_size, shape.hidden),
        ("expert intermediate size", config.moe_intermediate_size, shape.expert_intermediate),
    ):
        if found != wanted:
            raise TraceError(f"{directory}: {name} {found}, the run needs {wanted}, those of its trace and shape")
    return config


def load_experts(arena: Arena, directory: Path, shape: ModelShape, progress: Callable[[int], None]) -> None:
    """Copy a checkpoint's experts into the arena.

    Args:
        arena: all of whose experts have memory of their own.
        directory: with config.json, the index and the shards.
        shape: of the run.
        progress: told of each expert.

    Raises:
        TraceError: it cannot be read, or is of another shape.
    """
    config, index = check_checkpoint(directory, shape), read_index(directory)
    matrix = shape.hidden * shape.expert_intermediate
    for layer, layer_id in enumerate(config.moe_layer_ids):
        for expert in range(shape.num_experts):
            into = arena.experts[layer][expert]
            for part, name in enumerate(_MATRICES):
                _copy(index, f"model.layers.{layer_id}.mlp.experts.{expert}.{name}.weight", into, part * matrix, matrix)
            progress(1)


def _copy(index: dict[str, Path], name: str, into: torch.Tensor, first: int, numel: int) -> None:
    path = index[name]
    try:
        with safe_open(path, framework="pt") as shard:
            stored = shard.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise TraceError(f"{path}: {name} cannot be read: {error}") from None
    if stored.numel() != numel:
        raise TraceError(f"{path}: {name} has shape {list(stored.shape)}, must hold {numel} numbers")
    into[first : first + numel].copy_(stored.reshape(-1))
