"""What an adapter says of an engine, and the parts that several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tracer.adapters.hooks import Hooks, arguments_of, refuse_compiled
from tracer.adapters.recording import Recording
from tracer.schema import WEIGHT_BITS, ForwardKind, ModelShape, TraceError

SUPPORTED, EXPERIMENTAL = "supported", "experimental"


class Watcher(Protocol):
    """What hooks report to: the recording of the request that runs, None between requests."""

    @property
    def recording(self) -> Recording | None:
        """Where to report; None: nothing is recorded now, as in a warm-up."""
        ...


class Adapter(ABC):
    """Knows one engine: where its layers are, what its gates return, and how it decodes.

    Raises:
        TraceError: the target is not what this adapter attaches to; the message says what it lacks.
    """

    name: ClassVar[str]
    status: ClassVar[str]  # SUPPORTED: it was run against the real source
    engine: ClassVar[str]
    unmasked: ClassVar[ForwardKind]  # of a forward that decodes a block without masks
    logits_shift: ClassVar[int] = 0

    shape: ModelShape
    weight_sum: float | None  # as in Rules
    model: nn.Module

    @abstractmethod
    def __init__(self, target: Any) -> None: ...

    @abstractmethod
    def install(self, hooks: Hooks, watcher: Watcher) -> None:
        """Put the hooks in."""

    def generate(self) -> tuple[Any, str] | None:
        """Object and name of the call that answers one request, where the engine has one."""
        return None

    def settings(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """How a call of `generate` decodes, by names of a trace; where there is such a call, `mask_id` is among them."""
        return {}

    def details(self) -> dict[str, Any]:
        """What else the trace's metadata says."""
        return {}


def part(owner: Any, path: str, where: str) -> Any:
    """An attribute by its dotted path.

    Raises:
        TraceError: there is none; the message says what there should be.
    """
    for name in path.split("."):
        if not hasattr(owner, name):
            raise TraceError(
                f"{where}: {type(owner).__name__} has no {name}; another model, or another version of its code"
            )
        owner = getattr(owner, name)
    return owner


def moe_layers(model: nn.Module, where: str) -> dict[int, nn.Module]:
    """The decoder layers of `model.model.layers` whose feed-forward part has a gate, by their true numbers."""
    layers = {i: layer for i, layer in enumerate(part(model, "model.layers", where)) if hasattr(layer.mlp, "gate")}
    if not layers:
        raise TraceError(f"{where}: no layer has mlp.gate; not a mixture-of-experts model")
    return layers


def read_shape(model: nn.Module, layer_ids: tuple[int, ...], where: str, **changes: Any) -> ModelShape:
    """Sizes by the model's own config.

    Raises:
        TraceError: a key is missing, or it routes by block (LLaDA2.2), which no trace can hold.
    """
    config = part(model, "config", where)
    if hasattr(config, "expert_capacity"):
        raise TraceError(f"{where}: key expert_capacity is block-level routing (LLaDA2.2); it is not recorded")
    heads = part(config, "num_attention_heads", where)
    hidden = part(config, "hidden_size", where)
    values = {
        "layer_ids": layer_ids,
        "num_experts": part(config, "num_experts", where),
        "top_k": part(config, "num_experts_per_tok", where),
        "hidden": hidden,
        "expert_intermediate": part(config, "moe_intermediate_size", where),
        "num_heads": heads,
        "num_kv_heads": part(config, "num_key_value_heads", where),
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "vocab": part(config, "vocab_size", where),
        "dense_intermediate": part(config, "intermediate_size", where),
        "num_dense_layers": len(part(model, "model.layers", where)) - len(layer_ids),
    }
    dtype = dtype_name(next(model.parameters()).dtype)
    if dtype in WEIGHT_BITS:
        values["weight_dtype"] = dtype
    return ModelShape(**values | changes)


def read_llada2_shape(model: nn.Module, layers: Mapping[int, nn.Module], where: str) -> ModelShape:
    """Sizes of a LLaDA2.x model: also the scale of its gates, and its shared experts."""
    scale = float(part(model, "config.routed_scaling_factor", where))
    shared = part(model, "config.num_shared_experts", where) or 0
    return read_shape(model, tuple(layers), where, gate_scale=scale, num_shared_experts=shared)


def bias_dtypes(layers: Mapping[int, nn.Module]) -> str:
    """Types in which the gates hold their biases."""
    return ", ".join(sorted({dtype_name(layer.mlp.gate.expert_bias.dtype) for layer in layers.values()}))


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls it, without its prefix."""
    return str(dtype).removeprefix("torch.")


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def watch_streams(
    hooks: Hooks, watcher: Watcher, layers: Mapping[int, nn.Module], stream: Callable[[Any], Tensor] = _first
) -> None:
    """Report router input and output of each layer, of which a trace keeps cosine similarities alone.

    Args:
        hooks: takes the hooks back later.
        watcher: of the session.
        layers: by their true numbers.
        stream: the residual stream, from what a layer returns.
    """

    def to_input(layer_id: int) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
        def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if watcher.recording is not None:
                watcher.recording.layer_input(layer_id, args[0] if args else kwargs["hidden_states"])

        return hook

    def to_output(layer_id: int) -> Callable[[Any], None]:
        def hook(output: Any) -> None:
            if watcher.recording is not None:
                watcher.recording.layer_output(layer_id, stream(output))

        return hook

    for layer_id, layer in layers.items():
        hooks.before(layer.mlp, to_input(layer_id))
        hooks.after(layer, to_output(layer_id))


Region = Callable[[Tensor, Mapping[str, Any], Recording], slice | None]


def watch_forwards(hooks: Hooks, watcher: Watcher, model: nn.Module, region: Region, where: str) -> None:
    """Report every forward of a causal-LM class: token ids, positions, logits, and the region that it decodes.

    Args:
        hooks: takes the wrapped call back later.
        watcher: of the session.
        model: whose `forward` is wrapped; loops call it directly, or through the module.
        region: from token ids [1, T] and all arguments of a forward, the rows that the loop decodes.
        where: stands at the head of messages.
    """
    refuse_compiled(model, where)

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recording = watcher.recording
        if recording is None:
            return original(*args, **kwargs)
        arguments = arguments_of(original, args, kwargs)
        input_ids = arguments.get("input_ids")
        rows = None if input_ids is None else region(input_ids, arguments, recording)
        with recording.forward(input_ids, _positions(arguments, input_ids), rows):
            output = original(*args, **kwargs)
        recording.end(output.logits if hasattr(output, "logits") else output[0])
        return output

    hooks.wrap(model, "forward", around)


def _positions(arguments: Mapping[str, Any], input_ids: Tensor | None) -> Tensor | None:
    """Absolute positions of a forward's tokens; without them a model counts on from what its cache holds."""
    for name in ("position_ids", "cache_position"):
        if arguments.get(name) is not None:
            return arguments[name]
    cache = arguments.get("past_key_values")
    if input_ids is None or not hasattr(cache, "get_seq_length"):
        return None
    return torch.arange(input_ids.shape[-1]) + int(cache.get_seq_length())


def last_block(input_ids: Tensor, block_length: int | None) -> slice:
    """Rows of the last block of a window [1, T], or all where there are no blocks."""
    stop = input_ids.shape[1]
    return slice(max(stop - block_length, 0) if block_length else 0, stop)
