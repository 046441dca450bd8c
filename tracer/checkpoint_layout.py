"""Which tensors a LLaDA2.x checkpoint holds, and where: names, shapes, and the layouts that stack a layer's experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tracer.llada2_config import LLaDA2Config
from tracer.records import read_object
from tracer.schema import TraceError, counted

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
MATRICES = ("gate_proj", "up_proj", "down_proj")  # of an expert, in the order in which they are saved
_NUM_NAMED = 3  # tensors that an error names; a wrong layout has thousands

# Names below `model.layers.N.mlp.` of tensors [E, rows, columns] that stack all experts, and whose rows they hold, in order.
_STACKED: dict[str, tuple[str, ...]] = {
    "experts.gate_proj": ("gate_proj",),  # dFactory's merge script
    "experts.up_proj": ("up_proj",),
    "experts.down_proj": ("down_proj",),  # and transformers 5
    "experts.gate_up_proj": ("gate_proj", "up_proj"),  # transformers 5
    "experts.w13_weight": ("gate_proj", "up_proj"),  # dInfer, SGLang
    "experts.w2_weight": ("down_proj",),
    "w1": ("gate_proj", "up_proj"),  # dInfer's fused files
    "w2": ("down_proj",),
}
_STACKED_NAME = re.compile(
    rf"model\.layers\.(0|[1-9]\d{{0,5}})\.mlp\.({'|'.join(re.escape(name) for name in _STACKED)})"
)


class Place(NamedTuple):
    """Where one tensor of the model is stored: a whole tensor of a shard, or rows of one expert in a stacked one."""

    path: Path
    name: str  # in the shard
    shape: tuple[int, ...]  # of what is stored under that name
    expert: int | None = None  # of a stacked tensor
    rows: slice = slice(None)  # of that expert

    def of(self, stored: Tensor) -> Tensor:
        """The model's tensor, a view of the stored one."""
        return stored if self.expert is None else stored[self.expert, self.rows]


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
            add_mlp(expert_prefix(layer_id, expert), config.moe_intermediate_size)
        add_mlp(f"{layer}.mlp.shared_experts", config.num_shared_experts * config.moe_intermediate_size)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def expert_prefix(layer_id: int, expert: int) -> str:
    """What the names of one expert's three tensors start with."""
    return f"model.layers.{layer_id}.mlp.experts.{expert}"


def read_config(directory: str | Path) -> LLaDA2Config:
    """Read a directory's config.json.

    Raises:
        TraceError: The file is missing, is not JSON, or describes another architecture.
    """
    path = Path(directory) / CONFIG_NAME
    return LLaDA2Config.from_dict(read_file(path), str(path))


def read_index(directory: str | Path) -> dict[str, Path]:
    """Shard of every tensor of the model that config.json describes; the shards need not be there yet.

    Raises:
        TraceError: As for `locate`.
    """
    return {name: place.path for name, place in locate(directory, read_config(directory)).items()}


def locate(directory: str | Path, config: LLaDA2Config) -> dict[str, Place]:
    """Place of every tensor of the model, in the order of `tensor_shapes`; the shards need not be there yet.

    Raises:
        TraceError: There is no index (a single model.safetensors is not enough), or its names are not exactly those
            of `tensor_shapes`, a layer's experts one by one or stacked.
    """
    directory = Path(directory)
    path = directory / INDEX_NAME
    weight_map = read_file(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise TraceError(f"{path}: no object weight_map, which names the shard of every tensor")
    shapes = tensor_shapes(config)
    places: dict[str, Place] = {}
    unknown: list[str] = []
    paths: dict[str, Path] = {}
    for stored, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in paths:
            if not isinstance(shard, str) or not shard or Path(shard).name != shard:
                raise TraceError(f"{path}: shard {shard!r} of {stored}: must be the name of a file in this directory")
            paths[shard] = directory / shard
        found = dict(_held(stored, paths[shard], config, shapes))
        if not found:
            unknown.append(stored)
        for name in found.keys() & places.keys():
            raise TraceError(f"{path}: {name} is held by {places[name].name} and by {stored}; must be by one of them")
        places |= found
    for fault, names in (("unknown", unknown), ("missing", [name for name in shapes if name not in places])):
        if names:
            raise TraceError(f"{path}: {enumerate_names(names, fault)}; {CONFIG_NAME} asks for {len(shapes)} tensors")
    return {name: places[name] for name in shapes}


def _held(
    stored: str, path: Path, config: LLaDA2Config, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, Place]]:
    """The model's tensors that a stored one holds, none if its name is not known."""
    if stored in shapes:
        yield stored, Place(path, stored, shapes[stored])
    elif (matched := _STACKED_NAME.fullmatch(stored)) and int(matched[1]) in config.moe_layer_ids:
        matrices = _STACKED[matched[2]]
        rows, columns = shapes[f"{expert_prefix(int(matched[1]), 0)}.{matrices[0]}.weight"]
        shape = (config.num_experts, rows * len(matrices), columns)
        for expert in range(config.num_experts):
            for nth, matrix in enumerate(matrices):
                name = f"{expert_prefix(int(matched[1]), expert)}.{matrix}.weight"
                yield name, Place(path, stored, shape, expert, slice(nth * rows, (nth + 1) * rows))


def require_files(shards: Iterable[Path]) -> None:
    """Refuse a checkpoint of which shards are missing."""
    missing = sorted(path for path in set(shards) if not path.is_file())
    if missing:
        names = enumerate_names([path.name for path in missing], "missing", what="shard")
        raise TraceError(f"{missing[0].parent}: {names}, which {INDEX_NAME} names")


def enumerate_names(names: list[str], fault: str, what: str = "tensor") -> str:
    """How many have a fault, and the first of them."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{counted(len(names), f'{fault} {what}')}: {', '.join(names[:_NUM_NAMED])}{more}"


def read_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint directory."""
    if path.is_file():
        return read_object(path)
    needed = f"a checkpoint directory holds {CONFIG_NAME}, {INDEX_NAME} and its shards"
    pickled = sorted(path.parent.glob("*.bin")) if path.name == INDEX_NAME else []
    more = f"; {pickled[0].name} is pickled, which is never read" if pickled else ""
    raise TraceError(f"{path.parent}: no {path.name}; {needed}{more}")
