"""LLaDA2.x checkpoints in the Hugging Face layout: config.json, an index, and safetensors shards."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tracer.llada2 import LLaDA2
from tracer.llada2_config import LLaDA2Config
from tracer.moe import MoeLayer
from tracer.records import read_object
from tracer.schema import TraceError

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
TRAINING_NAME = "training.json"
_STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NUM_NAMED = 3  # tensors that an error names; a wrong layout has thousands


def tensor_shapes(config: LLaDA2Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, experts one by one, in the order in which they are saved.

    Source: LLaDA2.0-mini and LLaDA2.1-mini, released index files.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    query_rows = config.num_attention_heads * head_dim
    fused_rows = query_rows + 2 * config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (config.vocab_size, hidden)}

    def add_mlp(prefix: str, intermediate: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, intermediate)

    for layer_id in range(config.num_hidden_layers):
        layer = f"model.layers.{layer_id}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.attention.query_key_value.weight"] = (fused_rows, hidden)
        shapes[f"{layer}.attention.query_layernorm.weight"] = (head_dim,)
        shapes[f"{layer}.attention.key_layernorm.weight"] = (head_dim,)
        shapes[f"{layer}.attention.dense.weight"] = (hidden, query_rows)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if layer_id < config.first_k_dense_replace:
            add_mlp(f"{layer}.mlp", config.intermediate_size)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (config.num_experts, hidden)
        shapes[f"{layer}.mlp.gate.expert_bias"] = (config.num_experts,)
        for expert in range(config.num_experts):
            add_mlp(f"{layer}.mlp.experts.{expert}", config.moe_intermediate_size)
        add_mlp(f"{layer}.mlp.shared_experts", config.num_shared_experts * config.moe_intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def read_config(directory: str | Path) -> LLaDA2Config:
    """Read a directory's config.json.

    Raises:
        TraceError: The file is missing, is not JSON, or describes another architecture.
    """
    path = Path(directory) / CONFIG_NAME
    return LLaDA2Config.from_dict(_read_json(path), str(path))


def read_index(directory: str | Path) -> dict[str, Path]:
    """Shard of every tensor of the model that config.json describes; the shards need not be there yet.

    Raises:
        TraceError: There is no index (a single model.safetensors is not enough), or its names are not exactly those
            of `tensor_shapes`.
    """
    directory = Path(directory)
    path = directory / INDEX_NAME
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise TraceError(f"{path}: no object weight_map, which names the shard of every tensor")
    expected = tensor_shapes(read_config(directory))
    for fault, names in (
        ("unknown", [name for name in weight_map if name not in expected]),
        ("missing", [name for name in expected if name not in weight_map]),
    ):
        if names:
            raise TraceError(f"{path}: {_enumerate(names, fault)}; {CONFIG_NAME} asks for {len(expected)} tensors")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise TraceError(f"{path}: shard {shard!r} of {name}: must be the name of a file in this directory")
    return {name: directory / weight_map[name] for name in expected}


def load(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    expert_bias_dtype: torch.dtype | None = None,
) -> LLaDA2:
    """Read a model, shard by shard.

    Args:
        directory: Holds config.json, the index and the shards.
        device: Where the model is to be.
        dtype: Of every weight but the expert biases; the gates compute in fp32 regardless.
        expert_bias_dtype: Of the expert biases; None keeps what is stored. Rounding fp32 biases to bfloat16, as the
            released code does, changes the experts of some tokens.

    Raises:
        TraceError: A shard or tensor is missing or damaged, has a wrong shape or dtype, or holds what is not finite;
            or the model does not fit into memory.
    """
    config = read_config(directory)
    index = read_index(directory)
    _require_files(index.values())
    shapes = tensor_shapes(config)
    num_bytes, room = sum(map(math.prod, shapes.values())) * dtype.itemsize, _room(torch.device(device))
    if num_bytes > room:
        raise TraceError(
            f"{directory}: the model takes {num_bytes / 1e9:.1f} GB in {dtype}, {device} has {room / 1e9:.1f} GB"
        )
    with torch.device("meta"):
        model = LLaDA2(config).to(dtype)
    try:
        model = model.to_empty(device=device)
    except RuntimeError as error:  # the allocators' word
        raise TraceError(f"{directory}: no memory for the model on {device}: {str(error).splitlines()[0]}") from error
    targets = dict(_tensors(model))
    gates = {f"model.layers.{layer_id}.mlp.gate.expert_bias": mlp.gate for layer_id, mlp in model.moe_layers()}
    names_of: dict[Path, list[str]] = defaultdict(list)
    for name, path in index.items():
        names_of[path].append(name)
    for path, names in names_of.items():
        for name, stored in _read_shard(path, {name: shapes[name] for name in names}):
            if name in gates:
                bias_dtype = expert_bias_dtype or stored.dtype
                _require_finite(path, name, stored, bias_dtype)
                gates[name].expert_bias = stored.to(device, bias_dtype)
            else:
                _require_finite(path, name, stored, dtype)
                targets[name].copy_(stored)
    return model


def save(model: LLaDA2, directory: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write a model, weights in bfloat16 and expert biases in fp32; the directory appears whole or not at all.

    Args:
        model: Any dtype, on any device.
        directory: Must not exist, or be empty.
        max_shard_bytes: A shard is closed before it would grow beyond this, unless one tensor alone does.

    Raises:
        TraceError: The directory holds something.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TraceError(f"{directory}: exists and is not an empty directory; remove it or name another")
    shapes = tensor_shapes(model.config)
    num_bytes = {name: math.prod(shape) * _saved_dtype(name).itemsize for name, shape in shapes.items()}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in num_bytes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(num_bytes.values())},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    tensors = dict(_tensors(model))
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as partial:
        whole = Path(partial) / "whole"
        whole.mkdir()
        for file, names in zip(files, shards, strict=True):
            # Copied even where dtype and device already agree: safetensors refuses views of one stacked tensor.
            copies = {name: tensors[name].to("cpu", _saved_dtype(name), copy=True) for name in names}
            save_file(copies, whole / file, metadata={"format": "pt"})
        _write_json(whole / INDEX_NAME, index)
        _write_json(whole / CONFIG_NAME, model.config.to_dict())
        whole.rename(directory)


class Provenance(NamedTuple):
    """What a trace says of the checkpoint that it was recorded from."""

    checkpoint_hash: str  # SHA-256 over names and contents of config.json, the index, and every shard that it names
    total_size: int | None  # bytes of all tensors, as the index has it
    shards: dict[str, str]  # SHA-256 of each shard, by its name
    training: dict[str, Any] | None  # contents of training.json, which only models trained here have


def read_provenance(directory: str | Path) -> Provenance:
    """Read every file of a checkpoint once, for its hashes.

    Raises:
        TraceError: As for `read_index`, or a shard is missing, or training.json is no JSON object.
    """
    directory = Path(directory)
    paths = sorted(set(read_index(directory).values()))
    _require_files(paths)
    described = _read_json(directory / INDEX_NAME).get("metadata")
    training = directory / TRAINING_NAME
    shards = {path.name: _file_hash(path) for path in paths}
    hashes = {name: _file_hash(directory / name) for name in (CONFIG_NAME, INDEX_NAME)} | shards
    whole = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in hashes.items()).encode())
    return Provenance(
        checkpoint_hash=whole.hexdigest(),
        total_size=described.get("total_size") if isinstance(described, dict) else None,
        shards=shards,
        training=_read_json(training) if training.exists() else None,
    )


def checkpoint_hash(directory: str | Path) -> str:
    """The hash of `read_provenance`, by which a trace knows its checkpoint."""
    return read_provenance(directory).checkpoint_hash


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # of reading, which names no file
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None


def _tensors(model: LLaDA2) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its checkpoint name; those of experts are views of the stacked parameters."""
    stacked: set[str] = set()
    for layer_id, mlp in model.moe_layers():
        yield from _expert_tensors(f"model.layers.{layer_id}.mlp.experts", mlp)
        stacked |= {f"layers.{layer_id}.mlp.experts.w13", f"layers.{layer_id}.mlp.experts.w2"}
    for name, tensor in model.state_dict().items():
        if name not in stacked:
            yield name if name.startswith("lm_head.") else f"model.{name}", tensor


def _expert_tensors(prefix: str, mlp: MoeLayer) -> Iterator[tuple[str, Tensor]]:
    w13, w2 = mlp.experts.w13.detach(), mlp.experts.w2.detach()
    for expert, (gate, up, down) in enumerate(zip(*w13.chunk(2, dim=1), w2, strict=True)):
        yield f"{prefix}.{expert}.gate_proj.weight", gate
        yield f"{prefix}.{expert}.up_proj.weight", up
        yield f"{prefix}.{expert}.down_proj.weight", down


def _read_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of one shard, their shapes and dtypes checked."""
    try:
        with safe_open(path, framework="pt") as shard:
            for name, shape in shapes.items():
                found = tuple(shard.get_slice(name).get_shape())
                if found != shape:
                    raise TraceError(f"{path}: {name} has shape {list(found)}, {CONFIG_NAME} asks for {list(shape)}")
                stored = shard.get_tensor(name)
                if stored.dtype not in _STORED_DTYPES:
                    allowed = ", ".join(str(dtype) for dtype in _STORED_DTYPES)
                    raise TraceError(f"{path}: {name} is stored as {stored.dtype}, allowed are {allowed}")
                yield name, stored
    except (SafetensorError, OSError) as error:  # safetensors names no file
        raise TraceError(f"{path}: cannot be read as a shard: {error}") from None


def _require_finite(path: Path, name: str, stored: Tensor, dtype: torch.dtype) -> None:
    """Refuse NaN and infinity, and values that become infinite in the dtype of the model."""
    for extreme in torch.aminmax(stored):  # both are NaN where one value is, and much quicker than isfinite
        if not extreme.isfinite():
            raise TraceError(f"{path}: {name} holds {extreme.item():g}, allowed are finite numbers")
        if not extreme.to(dtype).isfinite():
            raise TraceError(f"{path}: {name} holds {extreme.item():g}, which {dtype} cannot hold")


def _room(device: torch.device) -> float:
    """Bytes that a model on this device can take at most: all memory, which others may use too."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return math.inf


def _saved_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(".expert_bias") else torch.bfloat16


def _require_files(shards: Iterable[Path]) -> None:
    missing = sorted({path for path in shards if not path.is_file()})
    if missing:
        names = _enumerate([path.name for path in missing], "missing", what="shard")
        raise TraceError(f"{missing[0].parent}: {names}, which {INDEX_NAME} names")


def _enumerate(names: list[str], fault: str, what: str = "tensor") -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{len(names)} {fault} {what}{'s' if len(names) > 1 else ''}: {', '.join(names[:_NUM_NAMED])}{more}"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise TraceError(
            f"{path.parent}: no {path.name}; a checkpoint directory holds {CONFIG_NAME}, {INDEX_NAME} and its shards"
        )
    return read_object(path)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
