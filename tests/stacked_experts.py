"""Checkpoints whose experts are stacked, as others' tools write them."""

import json

import torch
from llada2_models import TINY
from safetensors.torch import load_file, save_file

from tracer.checkpoint_layout import INDEX_NAME, read_index


def experts_of(tensors, layer, matrix):
    names = [f"model.layers.{layer}.mlp.experts.{e}.{matrix}.weight" for e in range(TINY["num_experts"])]
    return torch.stack([tensors[name] for name in names])


def stack(directory, names, layers=(1, 2, 3)):
    """Replace the experts of layers by stacked tensors of these names, in a shard of their own."""
    tensors = {}
    for path in set(read_index(directory).values()):
        tensors |= load_file(path)
    weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    stacked = {}
    for layer in layers:
        parts = {letter: experts_of(tensors, layer, f"{word}_proj") for letter, word in zip("gud", ("gate", "up", "down"), strict=True)}  # fmt: skip
        for name, letters in names.items():
            stacked[f"model.layers.{layer}.mlp.{name}"] = torch.cat([parts[letter] for letter in letters], dim=1)
        weight_map = {k: v for k, v in weight_map.items() if not k.startswith(f"model.layers.{layer}.mlp.experts.")}
    save_file(stacked, directory / "stacked.safetensors")
    weight_map |= dict.fromkeys(stacked, "stacked.safetensors")
    write_map(directory, weight_map)


def write_map(directory, weight_map):
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
