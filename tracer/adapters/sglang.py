"""Adapter of SGLang's own LLaDA2 model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tracer.adapters.adapter import (
    EXPERIMENTAL,
    Adapter,
    Watcher,
    moe_layers,
    part,
    read_llada2_shape,
    watch_streams,
)
from tracer.adapters.hooks import Hooks, arguments_of, refuse_compiled
from tracer.adapters.recording import Recording
from tracer.schema import ForwardKind, TraceError


class SGLangLLaDA2(Adapter):
    """Attach to SGLang's LLaDA2MoeModelLM inside its model runner, started with `--disable-cuda-graph`.

    `session.request` marks each request, of which the server may run one at a time. A forward with masks decodes all of
    its tokens; one without prefills or commits, or edits where the next one is fed other tokens.
    """

    name = "sglang"
    status = EXPERIMENTAL
    engine = "SGLang"
    unmasked = ForwardKind.EDIT
    weight_sum = 1.0  # the scale is applied in the experts

    def __init__(self, target: Any) -> None:
        self.model: nn.Module = target
        self._layers = moe_layers(target, self.name)
        for layer in self._layers.values():
            part(layer, "mlp.topk", self.name)
        self.shape = read_llada2_shape(target, self._layers, self.name)

    def install(self, hooks: Hooks, watcher: Watcher) -> None:
        """Hook each top-k module, and wrap the model's call."""
        refuse_compiled(self.model, self.name)
        watch_streams(hooks, watcher, self._layers, _stream)
        for layer_id, layer in self._layers.items():
            hooks.after(layer.mlp.topk, self._topk_hook(watcher, layer_id))

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            recording = watcher.recording
            if recording is None:
                return original(*args, **kwargs)
            values = arguments_of(original, args, kwargs)
            input_ids = values["input_ids"][None]  # [T] there
            with recording.forward(input_ids, values["positions"], self._region(input_ids, recording)):
                output = original(*args, **kwargs)
            recording.end(getattr(output, "full_logits", None))
            return output

        hooks.wrap(self.model, "forward", around)

    @staticmethod
    def _region(input_ids: Tensor, recording: Recording) -> slice | None:
        return slice(0, input_ids.shape[1]) if bool((input_ids == recording.rules.mask_id).any()) else None

    def _topk_hook(self, watcher: Watcher, layer_id: int) -> Callable[[Any], None]:
        def hook(output: Any) -> None:
            if watcher.recording is None:
                return
            ids = getattr(output, "topk_ids", None)
            if not isinstance(ids, Tensor):
                raise TraceError(
                    f"{self.name}: layer {layer_id}: {type(output).__name__} has no ids; choose another MoE backend"
                )
            watcher.recording.routed(layer_id, ids.to(torch.int64), output.topk_weights)

        return hook


def _stream(output: tuple[Tensor, Tensor | None]) -> Tensor:
    """The residual stream after a layer, which returns what is still to be added to it apart."""
    update, residual = output
    return update if residual is None else update + residual
