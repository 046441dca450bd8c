"""Adapter of dInfer: its block-diffusion loops over its own LLaDA2Moe models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from tracer.adapters.adapter import (
    SUPPORTED,
    Adapter,
    Watcher,
    bias_dtypes,
    moe_layers,
    part,
    read_llada2_shape,
    watch_forwards,
    watch_streams,
)
from tracer.adapters.hooks import Hooks
from tracer.schema import ForwardKind, TraceError


class DInfer(Adapter):
    """Attach to a BlockDiffusionLLM with the vLLM backend; every call of its `generate` is a request.

    Hooks of gate modules never fire here, since the fused experts call `gate.routing` themselves: it is wrapped on each
    gate. The decoder says which block a forward decoded, and what it accepted; forwards that it does not work on prefill
    or commit.
    """

    name = "dinfer"
    status = SUPPORTED
    engine = "dInfer"
    unmasked = ForwardKind.IDLE

    def __init__(self, target: Any) -> None:
        self._loop = target
        self.model: nn.Module = part(target, "model", self.name)
        self._decoder = part(target, "decoder", self.name)
        part(target, "decoder.decode", self.name)
        self._layers = moe_layers(self.model, self.name)
        for layer in self._layers.values():
            if not hasattr(layer.mlp.gate, "routing"):
                raise TraceError(
                    f"{self.name}: {type(layer.mlp.gate).__name__} has no routing; this adapter knows the vLLM backend"
                )
        self.shape = read_llada2_shape(self.model, self._layers, self.name)
        self.weight_sum = self.shape.gate_scale

    def install(self, hooks: Hooks, watcher: Watcher) -> None:
        """Wrap the model's call, each gate's routing, and the decoder."""
        watch_forwards(hooks, watcher, self.model, lambda *_: None, self.name)
        watch_streams(hooks, watcher, self._layers)
        for layer_id, layer in self._layers.items():
            hooks.wrap(layer.mlp.gate, "routing", self._around_routing(watcher, layer_id))

        def around_decode(
            original: Callable[..., Any],
            logits: Tensor,
            block_start: int,
            block_end: int,
            x: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            result = original(logits, block_start, block_end, x, *args, **kwargs)
            if watcher.recording is not None:
                watcher.recording.decoded(int(block_start), x[:, block_start:block_end])
            return result

        hooks.wrap(self._decoder, "decode", around_decode)

    def generate(self) -> tuple[Any, str]:
        """The loop's own call."""
        return self._loop, "generate"

    def settings(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Of a call of `generate`: its lengths, and what the decoder was made with."""
        found = {name: arguments[name] for name in ("gen_length", "block_length") if name in arguments}
        for name in ("threshold", "temperature", "mask_id", "eos_id"):
            if getattr(self._decoder, name, None) is not None:
                found[name] = getattr(self._decoder, name)
        return found

    def details(self) -> dict[str, Any]:
        """Which classes of dInfer ran."""
        return {
            "mask_mode": "strict",
            "classes": {"loop": type(self._loop).__name__, "decoder": type(self._decoder).__name__},
            "expert_bias_dtype": bias_dtypes(self._layers),
        }

    @staticmethod
    def _around_routing(watcher: Watcher, layer_id: int) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            weights, ids = original(*args, **kwargs)  # the reverse of what the released gate returns
            if watcher.recording is not None:
                watcher.recording.routed(layer_id, ids, weights)
            return weights, ids

        return around
