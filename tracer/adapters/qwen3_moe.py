"""Adapters of models with the gate of Qwen3-MoE: transformers' own, SDAR and RND1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tracer.adapters.adapter import (
    SUPPORTED,
    Adapter,
    Watcher,
    last_block,
    moe_layers,
    read_shape,
    watch_forwards,
    watch_streams,
)
from tracer.adapters.hooks import Hooks
from tracer.adapters.recording import Recording
from tracer.schema import ForwardKind, TraceError


class ChosenExperts(TorchFunctionMode):
    """Sees what `torch.topk` returns while a layer runs: the layer uses these ids, and keeps them to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []  # values and ids

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any function; remember the result of a top-k."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self.seen.append((result[0], result[1]))
        return result


class Qwen3Moe(Adapter):
    """Attach to a Qwen3MoeForCausalLM that some block-diffusion loop drives; `session.request` marks each request.

    The block returns router logits alone; the ids are those of the one top-k that it runs, not computed anew. A forward
    with masks decodes its last `block_length` tokens (all of them without one); a forward without any prefills or
    commits, or edits where the next one is fed other tokens.
    """

    name = "qwen3_moe"
    status = SUPPORTED
    engine = "transformers Qwen3-MoE"
    unmasked = ForwardKind.EDIT
    weight_sum = None  # the probabilities of the top-k; the layer divides them by their sum

    def __init__(self, target: Any) -> None:
        self.model: nn.Module = target
        self._layers = moe_layers(target, self.name)
        self.shape = read_shape(target, tuple(self._layers), self.name)

    def install(self, hooks: Hooks, watcher: Watcher) -> None:
        """Wrap each MoE block and the model's call."""
        watch_forwards(hooks, watcher, self.model, self._region, self.name)
        watch_streams(hooks, watcher, self._layers)
        for layer_id, layer in self._layers.items():
            hooks.wrap(layer.mlp, "forward", self._around_block(watcher, layer_id))

    def _region(self, input_ids: Tensor, arguments: Mapping[str, Any], recording: Recording) -> slice | None:
        if not bool((input_ids == recording.rules.mask_id).any()):
            return None
        return last_block(input_ids, recording.settings.get("block_length"))

    def _around_block(self, watcher: Watcher, layer_id: int) -> Callable[..., Any]:
        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if watcher.recording is None:
                return original(*args, **kwargs)
            with ChosenExperts() as chosen:
                output = original(*args, **kwargs)
            if len(chosen.seen) != 1:
                raise TraceError(
                    f"{self.name}: layer {layer_id} ran {len(chosen.seen)} top-k, must be one; a fused backend hides its choice"
                )
            weights, ids = chosen.seen[0]
            watcher.recording.routed(layer_id, ids, weights)
            return output

        return around


class Sdar(Qwen3Moe):
    """Attach to an SDARMoeForCausalLM; `session.request` around each call of its `block_diffusion_generate`."""

    name = "sdar"
    engine = "SDAR remote code"


class Rnd1(Qwen3Moe):
    """Attach to an RND1LM, which has no blocks: a request is one block, from its first position to its last.

    Its logits at a row predict the token of the next one.
    """

    name = "rnd1"
    engine = "RND1 remote code"
    logits_shift = 1
