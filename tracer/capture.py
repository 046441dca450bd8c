"""Records every forward pass of a decoded prompt: routing, confidences, and on request what else policies may read."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tracer.checkpoint import Provenance
from tracer.decode import DecodeResult, DecodeSettings, ForwardEvent, decode_request
from tracer.llada2 import LLaDA2, block_causal_mask
from tracer.observe import SKETCH_SEED, LayerObservation, Observation
from tracer.schema import Pass, Signals, TraceError, TraceMetadata


class PassSink(Protocol):
    """Takes passes in order; `tracer.store.TraceWriter` does."""

    def write(self, pass_: Pass, /) -> None:
        """Take the next pass."""
        ...


class ObservedModel:
    """A model as the decode loops want it, for one request: batch 1, strict block mask, its own cache."""

    def __init__(self, model: LLaDA2, observation: Observation, block_length: int, max_len: int) -> None:
        self._model = model
        self._observation = observation
        self._block_length = block_length
        self._cache = model.new_cache(1, max_len)

    @torch.no_grad()
    def forward(self, token_ids: NDArray[np.int64], start: int, commit: bool) -> Tensor:
        """Logits [T, V]; more than a block of tokens only from position 0 on."""
        self._observation.clear()
        if self._cache.length != start:
            raise TraceError(f"forward from position {start}: {self._cache.length} positions are committed")
        device = self._model.device
        # Within one block everything is visible, and so is all that was committed before it.
        mask = (
            block_causal_mask(len(token_ids), self._block_length, device)
            if len(token_ids) > self._block_length
            else None
        )
        return self._model(
            torch.as_tensor(token_ids, device=device)[None],
            torch.arange(start, start + len(token_ids), device=device),
            mask=mask,
            cache=self._cache,
            commit=commit,
            observer=self._observation,
        )[0]


class Recorder:
    """Turns what the loop saw and what the model showed of each forward into passes."""

    def __init__(self, layer_ids: tuple[int, ...], observation: Observation, sink: PassSink) -> None:
        self._layer_ids = list(layer_ids)
        self._observation = observation
        self._sink = sink
        self._num_passes = 0
        self._before: list[LayerObservation] = []  # of the previous forward

    def record(self, event: ForwardEvent) -> None:
        """Write the pass of the forward that has just run.

        Raises:
            TraceError: the hooks did not fire exactly once for each MoE layer, in order.
        """
        layers = self._observation.layers
        fired = [layer.layer_id for layer in layers]
        if fired != self._layer_ids or self._observation.num_embedded != 1:
            raise TraceError(
                f"request {event.request}, block {event.block}, iteration {event.iteration}: hooks of MoE layers {fired} "
                f"and {self._observation.num_embedded} of the embedding fired, must be {self._layer_ids} and 1"
            )
        self._sink.write(self._pass(event, layers))
        self._num_passes += 1
        self._before = layers

    def _pass(self, event: ForwardEvent, layers: list[LayerObservation]) -> Pass:
        cos_router_input, cos_layer_output = self._cosines(event, layers)
        return Pass(
            pass_id=self._num_passes,
            requests=np.array([event.request]),
            blocks=np.array([event.block]),
            iterations=np.array([event.iteration]),
            kinds=np.array([int(event.kind)]),
            num_tokens=np.array([len(event.positions)]),
            kv_lens=np.array([event.kv_len]),
            num_masked_in=np.array([np.count_nonzero(event.is_masked_in)]),
            num_accepted=np.array([np.count_nonzero(event.accepted)]),
            wall_ns=event.wall_ns,
            cos_router_input=cos_router_input[None],
            cos_layer_output=cos_layer_output[None],
            positions=event.positions,
            token_ids_in=event.token_ids_in,
            is_masked_in=event.is_masked_in,
            argmax_ids=event.argmax_ids,
            p_argmax=event.p_argmax.astype(np.float64),
            p_current=event.p_current.astype(np.float64),
            accepted=event.accepted,
            edited=np.zeros_like(event.accepted),
            expert_ids=_stacked(layer.ids for layer in layers),
            gates=_stacked(layer.gates for layer in layers).astype(np.float64),
            signals=self._signals(layers),
        )

    def _cosines(
        self, event: ForwardEvent, layers: list[LayerObservation]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Mean cosine similarity of each layer to the block's previous forward, [L] each; NaN in its first."""
        if event.iteration == 0:
            return np.full(len(layers), np.nan, np.float32), np.full(len(layers), np.nan, np.float32)
        pairs = list(zip(self._before, layers, strict=True))
        router_input = [_mean_cosine(a.router_input, b.router_input) for a, b in pairs]
        output = [_mean_cosine(a.output, b.output) for a, b in pairs]
        return _stacked(router_input), _stacked(output)

    def _signals(self, layers: list[LayerObservation]) -> Signals | None:
        if not self._observation.sketches:
            return None
        score_ids, scores, norms, ahead = zip(*(layer.signals for layer in layers), strict=True)
        return Signals(
            score_ids=_stacked(score_ids),
            scores=_stacked(scores).astype(np.float64),
            input_norm=_stacked(norms).astype(np.float64),
            sketch=self._observation.sketches[0].cpu().numpy().astype(np.float64),
            ahead_ids=_stacked(ahead),
        )


def _stacked(tensors: Iterable[Tensor]) -> NDArray[Any]:
    """One array of all layers, copied from the device at once."""
    return torch.stack(list(tensors)).cpu().numpy()


def _mean_cosine(before: Tensor, now: Tensor) -> Tensor:
    """Cosine similarity of rows [T, H], mean over T."""
    return cosine_similarity(before.float(), now.float(), dim=-1).mean()


def trace_metadata(
    model: LLaDA2, settings: DecodeSettings, name: str, provenance: Provenance, gate_dtype: str, signals: bool
) -> TraceMetadata:
    """What a trace says of its making; a model whose name starts with proxy- is a proxy."""
    bias_dtypes = {_name(layer.gate.expert_bias.dtype) for _, layer in model.moe_layers()}
    decode = asdict(settings) | {"temperature": 0.0}
    special_ids = {name: decode.pop(name) for name in ("mask_id", "eos_id")}  # the model's, no choice of the caller
    details = {
        "engine": "oledsim",
        "versions": {"oledsim": version("oledsim"), "torch": torch.__version__, "python": platform.python_version()},
        "checkpoint_hash": provenance.checkpoint_hash,
        "checkpoint": {"total_size": provenance.total_size, "shards": provenance.shards},
        **special_ids,
        "mask_mode": "strict",
        "sampler": "greedy argmax",
        "sampler_patched": False,  # no stock sampler is involved
        "dtype": _name(model.dtype),
        "router_dtype": _name(torch.float32),
        "expert_bias_dtype": ", ".join(sorted(bias_dtypes)),  # as held; added to the scores in router_dtype
        "device": str(model.device),
    }
    if provenance.training is not None:
        details["training"] = provenance.training
    if signals:
        details["sketch_seed"] = SKETCH_SEED
    return TraceMetadata(
        shape=model.config.shape(),
        source=f"{'proxy' if name.startswith('proxy-') else 'model'}:{name}",
        gate_dtype=gate_dtype,
        decode=decode,
        details=details,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def trace_prompts(
    model: LLaDA2,
    prompts: Iterable[Sequence[int]],
    settings: DecodeSettings,
    sink: PassSink,
    *,
    signals: bool = False,
    on_forward: Callable[[ForwardEvent], None] = lambda event: None,
) -> list[DecodeResult]:
    """Decode prompts one after the other and write every forward pass.

    Args:
        model: in inference, on its device.
        prompts: token ids of each request, as `encode_prompts` gives them.
        settings: how they are answered.
        sink: takes the passes.
        signals: also keep router scores, norms, sketches and the next layers' gates.
        on_forward: called after each pass is written, to show progress.

    Returns:
        One result for each request, in order.

    Raises:
        TraceError: a request cannot be decoded, or a hook of the model fired too often or not at all.
    """
    observation = Observation(model, signals)
    recorder = Recorder(model.config.moe_layer_ids, observation, sink)

    def record(event: ForwardEvent) -> None:
        recorder.record(event)
        on_forward(event)

    results = []
    for request, prompt in enumerate(prompts):
        observed = ObservedModel(model, observation, settings.block_length, settings.num_positions(len(prompt)))
        results.append(decode_request(observed, list(prompt), settings, record, request))
    return results
