"""What a forward pass shows of each MoE layer: the observer that capture gives to the model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tracer.llada2 import LLaDA2
from tracer.moe import Routing, route
from tracer.schema import MAX_AHEAD_DEPTH, NUM_AHEAD, NUM_SCORES, SKETCH_SIZE

SKETCH_SEED = 0


class LayerObservation(NamedTuple):
    """What one MoE layer did in one forward, still on the model's device."""

    layer_id: int
    router_input: Tensor  # [T, H]
    output: Tensor  # [T, H]
    ids: Tensor  # [T, K]
    gates: Tensor  # [T, K]
    signals: tuple[Tensor, Tensor, Tensor, Tensor] | None  # score ids, scores [T, S], norm [T], ahead ids [3, T, 16]


class Observation:
    """Gathers what the model shows of one forward, layer after layer; requests stand one after the other."""

    def __init__(self, model: LLaDA2, signals: bool) -> None:
        self._num_experts = model.config.num_experts
        self._gates = {layer_id: layer.gate for layer_id, layer in model.moe_layers()}
        self._projection = sketch_projection(model.config.hidden_size, model.device) if signals else None
        self.sketches: list[Tensor] = []  # [T, 16], one for each call of the embedding hook
        self.num_embedded = 0
        self.layers: list[LayerObservation] = []
        self._kept: Tensor | None = None

    def clear(self, kept: Tensor | None = None) -> None:
        """Forget the last forward; of the B * T rows of the next one, `kept` are no pads, by default all."""
        self.sketches, self.num_embedded, self.layers = [], 0, []
        self._kept = kept

    def embedded(self, embeddings: Tensor) -> None:
        """Take the input embeddings, [B, T, H]."""
        self.num_embedded += 1
        if self._projection is not None:
            self.sketches.append(self._rows(embeddings).float() @ self._projection)

    def moe_layer(self, layer_id: int, router_input: Tensor, routing: Routing, output: Tensor) -> None:
        """Take what one MoE layer did; of the scores only what `signals` keeps."""
        router_input, ids = self._rows(router_input), self._rows(routing.ids)
        signals = None
        if self._projection is not None:
            score_ids = best_scored(self._rows(routing.biased), ids)
            scores = self._rows(routing.scores).gather(-1, score_ids)
            norm = router_input.float().norm(dim=-1)
            signals = (score_ids, scores, norm, self._ahead(layer_id, router_input))
        self.layers.append(
            LayerObservation(layer_id, router_input, self._rows(output), ids, self._rows(routing.weights), signals)
        )

    def _rows(self, values: Tensor) -> Tensor:
        """Values [B, T, ...] of all tokens that are no pads, [N, ...]."""
        flat = values.flatten(0, 1)
        return flat if self._kept is None else flat.index_select(0, self._kept)

    def _ahead(self, layer_id: int, router_input: Tensor) -> Tensor:
        """Top experts, [3, T, 16] or all if they are fewer, by the gates of the next layers on this router input.

        As many as the gate could choose come in its order; should its open groups hold fewer, the rest follow by id.
        """
        width = min(NUM_AHEAD, self._num_experts)
        ahead = torch.full((MAX_AHEAD_DEPTH, len(router_input), width), -1, device=router_input.device)
        for depth in range(MAX_AHEAD_DEPTH):
            gate = self._gates.get(layer_id + depth + 1)
            if gate is not None:
                sizes = {"num_groups": gate.num_groups, "top_groups": gate.top_groups, "top_k": width}
                ahead[depth] = route(gate.scores(router_input), gate.expert_bias, **sizes).ids
        return ahead


def sketch_projection(hidden: int, device: torch.device | str = "cpu") -> Tensor:
    """The fixed random projection [H, 16] of embeddings; it keeps norms on average."""
    drawn = np.random.default_rng(SKETCH_SEED).standard_normal((hidden, SKETCH_SIZE)) / SKETCH_SIZE**0.5
    return torch.as_tensor(drawn, dtype=torch.float32, device=device)


def best_scored(biased: Tensor, chosen: Tensor) -> Tensor:
    """The min(32, E) experts of highest biased score, best first, the chosen [T, K] always among them."""
    forced = biased.scatter(-1, chosen, float("inf"))
    kept = forced.topk(min(NUM_SCORES, biased.shape[-1]), dim=-1).indices
    order = biased.gather(-1, kept).argsort(dim=-1, descending=True, stable=True)
    return kept.gather(-1, order)
