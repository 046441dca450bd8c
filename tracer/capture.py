"""Records every forward pass of a decoded prompt: routing, confidences, and on request what else policies may read."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tracer.checkpoint import Provenance
from tracer.decode import DecodeResult, decode_prompts
from tracer.decode_settings import DecodeSettings
from tracer.decode_state import ForwardEvent
from tracer.llada2 import LLaDA2
from tracer.observe import SKETCH_SEED, LayerObservation, Observation
from tracer.observed import ObservedModel
from tracer.own_version import own_version
from tracer.schema import Pass, Signals, TraceError, TraceMetadata


class PassSink(Protocol):
    """Takes passes in order; `tracer.store.TraceWriter` does."""

    def write(self, pass_: Pass, /) -> None:
        """Take the next pass."""
        ...


class Recorder:
    """Turns what the loop saw and what the model showed of each forward into passes."""

    def __init__(self, layer_ids: tuple[int, ...], observation: Observation, sink: PassSink) -> None:
        self._layer_ids = list(layer_ids)
        self._observation = observation
        self._sink = sink
        self._num_passes = 0
        self._before: dict[int, Tensor] = {}  # [2 * L, T, H] of each request's previous forward

    def record(self, events: Sequence[ForwardEvent]) -> None:
        """Write the pass that has just run, of one forward for each request in it, ascending.

        Raises:
            TraceError: the hooks did not fire exactly once for each MoE layer, in order.
        """
        layers = self._observation.layers
        fired = [layer.layer_id for layer in layers]
        if fired != self._layer_ids or self._observation.num_embedded != 1:
            event = events[0]
            raise TraceError(
                f"request {event.request}, block {event.block}, iteration {event.iteration}: hooks of MoE layers {fired} "
                f"and {self._observation.num_embedded} of the embedding fired, must be {self._layer_ids} and 1"
            )
        self._sink.write(self._pass(events, layers))
        self._num_passes += 1

    def forget(self, request: int) -> None:
        """Keep nothing of a request that has ended."""
        self._before.pop(request, None)

    def _pass(self, events: Sequence[ForwardEvent], layers: list[LayerObservation]) -> Pass:
        cosines = self._cosines(events, layers)
        return Pass(
            pass_id=self._num_passes,
            requests=np.array([event.request for event in events]),
            blocks=np.array([event.block for event in events]),
            iterations=np.array([event.iteration for event in events]),
            kinds=np.array([int(event.kind) for event in events]),
            num_tokens=np.array([len(event.positions) for event in events]),
            kv_lens=np.array([event.kv_len for event in events]),
            num_masked_in=np.array([np.count_nonzero(event.is_masked_in) for event in events]),
            num_accepted=np.array([np.count_nonzero(event.accepted) for event in events]),
            wall_ns=events[0].wall_ns,
            cos_router_input=cosines[:, : len(layers)],
            cos_layer_output=cosines[:, len(layers) :],
            positions=np.concatenate([event.positions for event in events]),
            token_ids_in=np.concatenate([event.token_ids_in for event in events]),
            is_masked_in=np.concatenate([event.is_masked_in for event in events]),
            argmax_ids=np.concatenate([event.argmax_ids for event in events]),
            p_argmax=np.concatenate([event.p_argmax for event in events]).astype(np.float64),
            p_current=np.concatenate([event.p_current for event in events]).astype(np.float64),
            accepted=np.concatenate([event.accepted for event in events]),
            edited=np.concatenate([event.edited for event in events]),
            expert_ids=_stacked(layer.ids for layer in layers),
            gates=_stacked(layer.gates for layer in layers).astype(np.float64),
            signals=self._signals(layers),
        )

    def _cosines(self, events: Sequence[ForwardEvent], layers: list[LayerObservation]) -> NDArray[np.float32]:
        """Mean cosine similarity to the block's previous forward, [R, 2 * L]; NaN in its first.

        Router inputs of all layers come first, then their outputs. Requests stand one after the other in what was
        observed. All layers are compared at once: on a GPU, each of them alone would take longer to launch than to run.
        """
        found = np.full((len(events), 2 * len(layers)), np.nan, np.float32)
        if all(event.block < 0 for event in events):  # what follows a prefill is not compared with it
            return found
        outputs = torch.stack([*(layer.router_input for layer in layers), *(layer.output for layer in layers)])
        means: dict[int, Tensor] = {}
        start = 0
        for nth, event in enumerate(events):
            now = outputs[:, start : start + len(event.positions)]
            start += len(event.positions)
            if event.block < 0:
                continue
            if event.iteration:
                before = self._before[event.request]
                means[nth] = cosine_similarity(before.float(), now.float(), dim=-1).mean(-1)
            self._before[event.request] = now
        if means:
            found[list(means)] = _stacked(means.values())
        return found

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


def trace_metadata(
    model: LLaDA2, settings: DecodeSettings, name: str, provenance: Provenance, gate_dtype: str, signals: bool
) -> TraceMetadata:
    """What a trace says of its making; a model whose name starts with proxy- is a proxy."""
    bias_dtypes = {_name(layer.gate.expert_bias.dtype) for _, layer in model.moe_layers()}
    details = {
        "engine": "oledsim",
        "versions": {"oledsim": own_version(), "torch": torch.__version__, "python": platform.python_version()},
        "checkpoint_hash": provenance.checkpoint_hash,
        "checkpoint": {"total_size": provenance.total_size, "shards": provenance.shards},
        "mask_id": settings.mask_id,
        "eos_id": settings.eos_id,
        "mask_mode": settings.mask_mode or "strict",
        "sampler": "greedy argmax" if settings.is_greedy else "drawn",
        "sampler_patched": settings.sampler == "greedy" and settings.is_greedy,  # hf20's own draws at temperature 0
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
        decode=settings.facts(),
        seed=None if settings.is_greedy else settings.seed,
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
    on_result: Callable[[int, DecodeResult], None] = lambda request, result: None,
) -> list[DecodeResult]:
    """Decode prompts, `settings.batch` of them side by side, and write every forward pass.

    Args:
        model: in inference, on its device.
        prompts: token ids of each request, as `encode_prompts` gives them.
        settings: how they are answered.
        sink: takes the passes.
        signals: also keep router scores, norms, sketches and the next layers' gates.
        on_forward: called for each request's forward after its pass is written, to show progress.
        on_result: called with each request that has ended.

    Returns:
        One result for each request, in order.

    Raises:
        TraceError: a request cannot be decoded, or a hook of the model fired too often or not at all.
    """
    observation = Observation(model, signals)
    recorder = Recorder(model.config.moe_layer_ids, observation, sink)
    observed = ObservedModel(model, observation, settings.block_length, settings.mask_mode or "strict")

    def record(events: list[ForwardEvent]) -> None:
        recorder.record(events)
        for event in events:
            on_forward(event)

    def end(request: int, result: DecodeResult) -> None:
        recorder.forget(request)
        on_result(request, result)

    return decode_prompts(observed, prompts, settings, record, end)
