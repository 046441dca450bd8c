"""A checkpoint of random weights in the layout of a released model, written without holding the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tracer.checkpoint import whole_or_absent, write_json
from tracer.checkpoint_layout import CONFIG_NAME, INDEX_NAME, MATRICES, expert_prefix, tensor_shapes
from tracer.llada2_config import LLaDA2Config
from tracer.schema import TraceError

_MAX_POOL = 1 << 24  # numbers that are drawn; drawing all of a large model's would take minutes
_BIAS_SPREAD = 0.02


def write_random(
    config: LLaDA2Config,
    directory: Path,
    *,
    num_shards: int = 8,
    seed: int = 0,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> int:
    """Write a checkpoint that routes and decodes, to no sense; the directory appears whole or not at all.

    Every tensor starts somewhere else in one pool of normal numbers, so no two are alike. Shards are numbered from 0
    and hold some experts of every layer each, the first one all else, as those of LLaDA2.1-mini.

    Args:
        config: sizes; `initializer_range` is the spread of the weights.
        directory: must not exist.
        num_shards: at most the number of experts.
        seed: of the numbers.
        on_bytes: told the size of each shard that was written, to show progress.

    Returns:
        Bytes of all tensors.

    Raises:
        TraceError: the directory exists, there are more shards than experts, or the disk refuses.
    """
    if directory.exists():
        raise TraceError(f"{directory}: exists already; name a directory that is to be made")
    if not 1 <= num_shards <= config.num_experts:
        raise TraceError(f"{num_shards} shards: must be 1 to {config.num_experts}, the experts of a layer")
    shards = [f"model-{i:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = _weight_map(config, shards)
    shapes = tensor_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(min(_MAX_POOL, sum(map(math.prod, shapes.values()))), generator=generator)
    total = 0
    with whole_or_absent(directory) as partial:
        weights = (pool * config.initializer_range).bfloat16()
        for shard in shards:
            tensors = {}
            for name in (name for name, found in weight_map.items() if found == shard):
                start = int(torch.randint(len(pool), (), generator=generator))
                if name.endswith("expert_bias"):
                    tensors[name] = _taken(pool, start, shapes[name]) * _BIAS_SPREAD
                elif len(shapes[name]) == 1:  # norms
                    tensors[name] = torch.ones(shapes[name], dtype=torch.bfloat16)
                else:
                    tensors[name] = _taken(weights, start, shapes[name])
            try:
                save_file(tensors, partial / shard, metadata={"format": "pt"})
            except SafetensorError as error:  # its word for a full disk, too
                raise TraceError(f"{directory}: {shard} cannot be written: {error}") from None
            size = sum(tensor.nbytes for tensor in tensors.values())
            total += size
            on_bytes(size)
        write_json(partial / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        write_json(partial / CONFIG_NAME, config.to_dict())
    return total


def _weight_map(config: LLaDA2Config, shards: list[str]) -> dict[str, str]:
    """Shard of every tensor: as many experts of each layer in every shard, by their numbers, and all else in the first."""
    places = dict.fromkeys(tensor_shapes(config), shards[0])
    for layer_id in config.moe_layer_ids:
        for expert in range(config.num_experts):
            for matrix in MATRICES:
                name = f"{expert_prefix(layer_id, expert)}.{matrix}.weight"
                places[name] = shards[expert * len(shards) // config.num_experts]
    return places


def _taken(pool: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers of the pool from `start` on, which goes on at its beginning, as a tensor of its own."""
    size = math.prod(shape)
    taken = pool.new_empty(size)
    done = 0
    while done < size:
        part = pool[(start + done) % len(pool) :][: size - done]
        taken[done : done + len(part)] = part
        done += len(part)
    return taken.view(shape)
