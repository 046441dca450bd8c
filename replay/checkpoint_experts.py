"""A checkpoint's own experts in the arena, in place of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from replay.arena import Arena
from tracer.checkpoint_layout import MATRICES, Place, expert_prefix, locate, read_config, require_files
from tracer.schema import ModelShape, TraceError
from tracer.shard import Shard, require_finite


def find_experts(directory: Path, shape: ModelShape) -> list[list[list[Place]]]:
    """Where a checkpoint's experts are, if they are of this shape: [L][E], and of each its matrices.

    Raises:
        TraceError: a file is missing or damaged, or the experts are of other sizes or another number.
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
    places = locate(directory, config)
    require_files(place.path for place in places.values())
    experts = range(config.num_experts)
    return [
        [[places[f"{expert_prefix(layer_id, expert)}.{name}.weight"] for name in MATRICES] for expert in experts]
        for layer_id in config.moe_layer_ids
    ]


def load_experts(arena: Arena, directory: Path, shape: ModelShape, progress: Callable[[int], object]) -> None:
    """Copy a checkpoint's experts into the arena.

    Args:
        arena: all of whose experts have memory of their own.
        directory: with config.json, the index and the shards.
        shape: of the run.
        progress: told of each expert.

    Raises:
        TraceError: it cannot be read, is of another shape, or holds what is not finite.
    """
    found = find_experts(directory, shape)
    shards = {path: Shard(path) for path in {place.path for layer in found for expert in layer for place in expert}}
    for layer, targets in zip(found, arena.experts, strict=True):
        for expert, target in zip(layer, targets, strict=True):
            parts = target.chunk(len(MATRICES))  # all of one size, one after the other
            for place, part in zip(expert, parts, strict=True):
                stored = shards[place.path].tensor(place)
                require_finite(f"{place.path}: {place.name}", stored, torch.bfloat16)
                part.copy_(stored.reshape(-1))
            progress(1)
