"""Adapter of the released code of LLaDA2.x (`trust_remote_code`), class LLaDA2MoeModelLM of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tracer.adapters.adapter import (
    SUPPORTED,
    Adapter,
    Watcher,
    bias_dtypes,
    last_block,
    moe_layers,
    part,
    read_llada2_shape,
    watch_forwards,
    watch_streams,
)
from tracer.adapters.hooks import Hooks
from tracer.adapters.recording import Recording
from tracer.schema import ForwardKind

MASK_ID = 156895  # what the released generate falls back to
_RENAMED = {"editing_threshold": "edit_threshold", "eos_early_stop": "early_stop"}  # what a trace calls otherwise


class HfLLaDA2(Adapter):
    """Attach to a LLaDA2MoeModelLM; every call of its `generate` is a request.

    Each step runs the whole window from position 0 to the end of the block. A step without masks, which 2.1 alone has,
    may still edit.
    """

    name = "hf_llada2"
    status = SUPPORTED
    engine = "Hugging Face remote code of LLaDA2Moe"
    unmasked = ForwardKind.EDIT

    def __init__(self, target: Any) -> None:
        self.model: nn.Module = target
        self._layers = moe_layers(target, self.name)
        for layer in self._layers.values():
            part(layer, "mlp.gate.expert_bias", self.name)
        self.shape = read_llada2_shape(target, self._layers, self.name)
        self.weight_sum = self.shape.gate_scale
        self._mask_mode = "unknown"

    def install(self, hooks: Hooks, watcher: Watcher) -> None:
        """Hook each gate, which returns ids, weights and logits, and the call that loops make of the model."""
        watch_forwards(hooks, watcher, self.model, self._region, self.name)
        watch_streams(hooks, watcher, self._layers)
        for layer_id, layer in self._layers.items():
            hooks.after(layer.mlp.gate, self._gate_hook(watcher, layer_id))

    def generate(self) -> tuple[Any, str] | None:
        """The model's own loop."""
        return (self.model, "generate") if hasattr(self.model, "generate") else None

    def settings(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Of a call of `generate`: its arguments."""
        found = {_RENAMED.get(name, name): value for name, value in arguments.items() if value is not None}
        return found | {"mask_id": int(found.get("mask_id", MASK_ID))}

    def details(self) -> dict[str, Any]:
        """Mask mode as the model was given it, precision of the gates, and which sampler ran."""
        return {
            "mask_mode": self._mask_mode,
            "router_dtype": "float32",
            "expert_bias_dtype": bias_dtypes(self._layers),
            "sampler_patched": "_sample_with_temperature_topk_topp" in vars(self.model),
        }

    def _region(self, input_ids: Tensor, arguments: Mapping[str, Any], recording: Recording) -> slice:
        mask = arguments.get("attention_mask")
        if self._mask_mode == "unknown":
            self._mask_mode = mask_mode(mask)
        return last_block(input_ids, recording.settings.get("block_length"))

    @staticmethod
    def _gate_hook(watcher: Watcher, layer_id: int) -> Callable[[Any], None]:
        def hook(output: Any) -> None:
            if watcher.recording is not None:
                ids, weights = output[:2]
                watcher.recording.routed(layer_id, ids, weights)

        return hook


def mask_mode(mask: Tensor | None) -> str:
    """What an attention mask does to the keys that it does not allow: `strict` hides them, `soft01` does not.

    A mask of 0 and 1 is added to the scores by every version of transformers that runs this code, and hides nothing.
    """
    if mask is None:
        return "none"
    if mask.dtype == torch.bool or bool(torch.isinf(mask).any()):
        return "strict"
    return "soft01" if bool((mask == 1).any()) else "strict"
