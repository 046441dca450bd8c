"""The shape of a model that others traced: from its `config.json`, or from what is given and found in the routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.records import make_record, read_object
from tracer.schema import WEIGHT_BITS, ModelShape, TraceError

# the names that model families have for one thing, the first that is there counts
_NAMES = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "hidden": ("hidden_size",),
    "expert_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "gate_scale": ("routed_scaling_factor",),
}
_REQUIRED = ("num_experts", "top_k")
_MOST_LAYERS = 1 << 16  # far beyond any model; a typing error must not fill the memory


def shape_of_config(path: Path) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes.

    Raises:
        TraceError: it cannot be read, or is not of a mixture of experts.
    """
    config = read_object(path)
    config = config.get("text_config", config)
    if not isinstance(config, dict):
        raise TraceError(f"{path}: text_config is {config!r}, must be an object")
    sizes = {name: value for name in _NAMES if (value := _first(config, name)) is not None}
    for name in _REQUIRED:
        if name not in sizes:
            raise TraceError(f"{path}: has none of {', '.join(_NAMES[name])}; must be of a mixture of experts")
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or not 1 <= num_layers <= _MOST_LAYERS:
        raise TraceError(f"{path}: num_hidden_layers is {num_layers!r}, must be 1 to {_MOST_LAYERS}")
    layer_ids = _moe_layers(path, config, num_layers)
    num_dense = num_layers - len(layer_ids)
    dtype = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    values = {
        "layer_ids": layer_ids,
        "weight_dtype": dtype if dtype in WEIGHT_BITS else "bfloat16",
        "num_dense_layers": num_dense,
        "dense_intermediate": config.get("intermediate_size", 0) if num_dense else 0,
        **{"hidden": 0, "expert_intermediate": 0, **sizes},
    }
    shape = make_record(ModelShape, values, str(path), TraceError)
    if not shape.head_dim and shape.num_heads:
        shape = replace(shape, head_dim=shape.hidden // shape.num_heads)
    return shape


def _first(config: dict[str, Any], name: str) -> Any:
    return next((config[key] for key in _NAMES[name] if config.get(key) is not None), None)


def _moe_layers(path: Path, config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    first = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(first, int) or first < 0:
        raise TraceError(f"{path}: first_k_dense_replace is {first!r}, must be 0 or more")
    if not isinstance(dense, (list, tuple)):
        raise TraceError(f"{path}: mlp_only_layers is {dense!r}, must be a list")
    step = step if isinstance(step, int) else 1
    by_step = "decoder_sparse_step" in config
    return tuple(
        layer
        for layer in range(first, num_layers)
        if layer not in dense and ((layer + 1) if by_step else layer) % step == 0
    )


def found_layers(expert_ids: NDArray[Any]) -> tuple[int, ...]:
    """Layers of `[N, L, K]` ids that routed something: engines leave a dense layer's ids all zero.

    Raises:
        TraceError: nothing is in any of them.
    """
    if expert_ids.shape[-1] == 1:  # zeros may be expert 0
        return tuple(range(expert_ids.shape[1]))
    layers = tuple(np.flatnonzero((expert_ids > 0).any(axis=(0, 2))).tolist())
    if not layers:
        raise TraceError("no layer holds any expert id but 0 and below: the engine captured nothing")
    return layers


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers from `1-19` or `0,2,4-6`.

    Raises:
        TraceError: the text is not so.
    """
    layers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            if int(last or first) >= _MOST_LAYERS:
                raise TraceError(f"layers {text!r}: must be below {_MOST_LAYERS}")
            layers += range(int(first), int(last or first) + 1)
    except TraceError:
        raise
    except ValueError:
        layers = []
    if not layers or sorted(set(layers)) != layers:
        raise TraceError(f"layers {text!r}: must be ascending numbers such as 1-19 or 0,2,4-6")
    return tuple(layers)


def shape_for(layer_ids: Sequence[int], num_experts: int | None, top_k: int, given: ModelShape | None) -> ModelShape:
    """The shape of routing over these layers, held to the one that is given.

    Raises:
        TraceError: they differ, or nothing says how many experts a layer has.
    """
    if given is None:
        if num_experts is None:
            raise TraceError(
                "how many experts a layer has is not in the file: give --experts, --model-config or --shape"
            )
        return ModelShape(tuple(layer_ids), num_experts, top_k, hidden=0, expert_intermediate=0)
    for what, found, wanted in (
        ("layers", list(layer_ids), list(given.layer_ids)),
        ("top_k", top_k, given.top_k),
        ("experts", num_experts if num_experts is not None else given.num_experts, given.num_experts),
    ):
        if found != wanted:
            raise TraceError(f"{what} of the routing are {found}, and {wanted} of the model that was named")
    return given
