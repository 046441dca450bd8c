"""LLaDA2.x checkpoints in the Hugging Face layout: config.json, an index, and safetensors shards."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from tracer.checkpoint_layout import (
    CONFIG_NAME,
    INDEX_NAME,
    MATRICES,
    Place,
    expert_prefix,
    locate,
    read_config,
    read_file,
    read_index,
    require_files,
    tensor_shapes,
)
from tracer.llada2 import LLaDA2
from tracer.llada2_config import LLaDA2Config
from tracer.mapped_experts import MappedExperts, Staging, StoredExpert, StoredMatrix
from tracer.memory import free_bytes
from tracer.moe import Experts
from tracer.schema import TraceError
from tracer.shard import Shard, require_finite

TRAINING_NAME = "training.json"
_MAX_HASHING = 8  # threads; a disk is slower than that many


def load(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    expert_bias_dtype: torch.dtype | None = None,
    mapped: bool | None = False,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> LLaDA2:
    """Read a model, shard by shard, one in memory at a time.

    Args:
        directory: Holds config.json, the index and the shards.
        device: Where the model is to be.
        dtype: Of every weight but the expert biases; the gates compute in fp32 regardless.
        expert_bias_dtype: Of the expert biases; None keeps what is stored. Rounding fp32 biases to bfloat16, as the
            released code does, changes the experts of some tokens.
        mapped: Leave routed experts in their files, from which they are read when they are used; None does so if
            the device has no room for them.
        on_bytes: Told how many stored bytes were read, to show progress.

    Raises:
        TraceError: A shard or tensor is missing or damaged, has a wrong shape or dtype, or holds what is not finite,
            which of mapped experts is found when they are used; or the model does not fit into memory.
    """
    config, device = read_config(directory), torch.device(device)
    places = locate(directory, config)
    require_files(place.path for place in places.values())
    size = model_bytes(config, dtype)
    if mapped is None:
        mapped = size.all > free_bytes(device)
    model = _empty(config, directory, size.rest if mapped else size.all, device, dtype, mapped)
    targets = dict(_tensors(model))
    gates = {f"model.layers.{layer_id}.mlp.gate.expert_bias": mlp.gate for layer_id, mlp in model.moe_layers()}
    experts: dict[str, StoredMatrix] = {}
    for where, name, stored in _stored(places):
        if name in gates:
            bias_dtype = expert_bias_dtype or stored.dtype
            require_finite(where, stored, bias_dtype)
            gates[name].expert_bias = stored.to(device, bias_dtype, copy=True)
        elif name in targets:
            require_finite(where, stored, dtype)
            targets[name].copy_(stored)
        else:
            experts[name] = StoredMatrix(where, stored)
            continue
        on_bytes(stored.nbytes)
    if mapped:
        _map_experts(model, experts)
    return model


class ModelBytes(NamedTuple):
    """Memory that the weights of a model take."""

    all: int
    rest: int  # without routed experts


def model_bytes(config: LLaDA2Config, dtype: torch.dtype) -> ModelBytes:
    """Bytes of a model in a dtype."""
    size = sum(map(math.prod, tensor_shapes(config).values()))
    per_expert = 3 * config.hidden_size * config.moe_intermediate_size
    experts = len(config.moe_layer_ids) * config.num_experts * per_expert
    return ModelBytes(size * dtype.itemsize, (size - experts) * dtype.itemsize)


def _empty(
    config: LLaDA2Config, directory: str | Path, num_bytes: int, device: torch.device, dtype: torch.dtype, mapped: bool
) -> LLaDA2:
    """A model whose weights are not set, without experts if they are to be mapped."""
    what = "the model without its routed experts" if mapped else "the model"
    room = free_bytes(device)
    if num_bytes > room:
        raise TraceError(
            f"{directory}: {what} takes {num_bytes / 1e9:.1f} GB in {dtype}, {device} has {room / 1e9:.1f} GB free"
        )
    with torch.device("meta"):
        model = LLaDA2(config).to(dtype)
    if mapped:
        for _, mlp in model.moe_layers():
            mlp.experts = MappedExperts([], Staging())
    try:
        return model.to_empty(device=device)
    except RuntimeError as error:  # the allocators' word
        raise TraceError(f"{directory}: no memory for {what} on {device}: {str(error).splitlines()[0]}") from error


def _stored(places: Mapping[str, Place]) -> Iterator[tuple[str, str, Tensor]]:
    """Where it is, for errors, name and stored values of every tensor; a shard is open while its own are yielded."""
    names_of: dict[Path, list[str]] = defaultdict(list)
    for name, place in places.items():
        names_of[place.path].append(name)
    for path, names in names_of.items():
        shard, prefix = Shard(path), f"{path}: "
        for name in names:
            yield prefix + places[name].name, name, shard.tensor(places[name])


def _map_experts(model: LLaDA2, matrices: Mapping[str, StoredMatrix]) -> None:
    staging = Staging()
    for layer_id, mlp in model.moe_layers():
        prefixes = [expert_prefix(layer_id, expert) for expert in range(model.config.num_experts)]
        stored = [StoredExpert(*(matrices[f"{prefix}.{name}.weight"] for name in MATRICES)) for prefix in prefixes]
        mlp.experts = MappedExperts(stored, staging)


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
    with whole_or_absent(directory) as partial:
        for file, names in zip(files, shards, strict=True):
            # Copied even where dtype and device already agree: safetensors refuses views of one stacked tensor.
            copies = {name: tensors[name].to("cpu", _saved_dtype(name), copy=True) for name in names}
            save_file(copies, partial / file, metadata={"format": "pt"})
        write_json(partial / INDEX_NAME, index)
        write_json(partial / CONFIG_NAME, model.config.to_dict())


@contextmanager
def whole_or_absent(directory: Path) -> Iterator[Path]:
    """A directory to be filled, which takes this name once all is in it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as parent:
        partial = Path(parent) / "whole"
        partial.mkdir()
        yield partial
        partial.rename(directory)


class Provenance(NamedTuple):
    """What a trace says of the checkpoint that it was recorded from."""

    checkpoint_hash: str  # SHA-256 over names and contents of config.json, the index, and every shard that it names
    total_size: int | None  # bytes of all tensors, as the index has it
    shards: dict[str, str]  # SHA-256 of each shard, by its name
    training: dict[str, Any] | None  # contents of training.json, which only models trained here have


def read_provenance(directory: str | Path, on_bytes: Callable[[int], object] = lambda num_bytes: None) -> Provenance:
    """Read every file of a checkpoint once, for its hashes.

    Args:
        directory: As for `load`.
        on_bytes: Told the size of each shard when it was read, to show progress; called by this thread only.

    Raises:
        TraceError: As for `read_index`, or a shard is missing, or training.json is no JSON object.
    """
    directory = Path(directory)
    paths = sorted(set(read_index(directory).values()))
    require_files(paths)
    described = read_file(directory / INDEX_NAME).get("metadata")
    training = directory / TRAINING_NAME
    shards: dict[str, str] = {}
    with ThreadPoolExecutor(_MAX_HASHING) as threads:  # hashing lets go of the interpreter
        for path, digest in zip(paths, threads.map(_file_hash, paths), strict=True):
            shards[path.name] = digest
            on_bytes(path.stat().st_size)
    hashes = {name: _file_hash(directory / name) for name in (CONFIG_NAME, INDEX_NAME)} | shards
    whole = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in hashes.items()).encode())
    return Provenance(
        checkpoint_hash=whole.hexdigest(),
        total_size=described.get("total_size") if isinstance(described, dict) else None,
        shards=shards,
        training=read_file(training) if training.exists() else None,
    )


def model_name(directory: str | Path) -> str:
    """What a checkpoint is called: its directory's name, or the model's in the cache of the Hugging Face hub."""
    path = Path(directory).absolute()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--")[-1]
    return path.resolve().name


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
    """Every tensor under its checkpoint name; those of experts are views of the stacked parameters, or of files."""
    stacked: set[str] = set()
    for layer_id, mlp in model.moe_layers():
        for expert, matrices in enumerate(_experts(mlp.experts)):
            for name, matrix in zip(MATRICES, matrices, strict=True):
                yield f"{expert_prefix(layer_id, expert)}.{name}.weight", matrix
        stacked |= {f"layers.{layer_id}.mlp.experts.w13", f"layers.{layer_id}.mlp.experts.w2"}
    for name, tensor in model.state_dict().items():
        if name not in stacked:
            yield name if name.startswith("lm_head.") else f"model.{name}", tensor


def _experts(experts: Experts | MappedExperts) -> Iterator[Sequence[Tensor]]:
    """Gate, up and down matrix of each expert."""
    if isinstance(experts, MappedExperts):
        return ([matrix.tensor for matrix in expert] for expert in experts.stored)
    w13, w2 = experts.w13.detach(), experts.w2.detach()
    return zip(*w13.chunk(2, dim=1), w2, strict=True)


def _saved_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(".expert_bias") else torch.bfloat16


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file of a checkpoint directory."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
