"""One training step: masked cross-entropy, fp32 masters, and biases that balance the experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tracer.llada2 import LLaDA2
from tracer.moe import Routing
from tracer.pretrain_batches import Batch
from tracer.pretrain_configs import PretrainConfig


class LoadObserver:
    """Counts how many tokens each expert of each MoE layer gets in a forward."""

    def __init__(self) -> None:
        self.loads: dict[int, Tensor] = {}  # layer id -> [E]

    def embedded(self, embeddings: Tensor) -> None:
        """Forget the last forward."""
        self.loads = {}

    def moe_layer(self, layer_id: int, router_input: Tensor, routing: Routing, output: Tensor) -> None:
        """Count one layer's experts."""
        chosen = routing.ids.flatten()
        load = torch.zeros(routing.scores.shape[-1], dtype=torch.int64, device=chosen.device)
        self.loads[layer_id] = load.scatter_add(0, chosen, torch.ones_like(chosen))


class Trainer:
    """A model, its optimizer over fp32 masters of the weights, and the biases that balance its experts."""

    def __init__(self, model: LLaDA2, config: PretrainConfig) -> None:
        self.model, self.config = model, config
        on_gpu = model.device.type == "cuda"
        if on_gpu:  # each kind of layer once: they share what is compiled
            for layer in model.layers:
                layer.compile(dynamic=False)
        self._losses = torch.compile(losses, dynamic=False) if on_gpu else losses
        self._weights = list(model.parameters())
        self._masters = [weight.detach().float().clone() for weight in self._weights]
        matrices = [master for master in self._masters if master.dim() > 1]
        vectors = [master for master in self._masters if master.dim() == 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=on_gpu,
        )
        self._observer = LoadObserver()

    def step(self, batch: Batch, learning_rate: float, confidence_weight: float = 0.0) -> dict[str, Tensor]:
        """Take one step; confidence_weight is that of the entropy of what is predicted right.

        Returns:
            Scalars that stay on the device: cross-entropy, entropy of what is predicted right, gradient norm, and the
            highest load of an expert over the mean.
        """
        hidden = self.model.hidden_states(batch.token_ids, batch.positions, mask=batch.mask, observer=self._observer)
        logits = self.model.head(hidden[:, : batch.targets.shape[1]])  # of the noisy copy; the clean one has no loss
        loss, entropy = self._losses(logits, batch.targets, batch.weights)
        (loss + confidence_weight * entropy).backward()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
            weight.grad = None
        grad_norm = nn.utils.clip_grad_norm_(self._masters, self.config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        highest = balance(self.model, self._observer.loads, self.config.bias_rate)
        return {"loss": loss.detach(), "entropy": entropy.detach(), "grad_norm": grad_norm, "max_load_ratio": highest}


def losses(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy, and weighted mean entropy of the tokens that are predicted right.

    Args:
        logits: [B, T, V] fp32.
        targets: [B, T].
        weights: [B, T], 0 where a token does not count; not all of them are.

    Source:
        LLaDA2.0, confidence-aware parallel training, which sharpens what is right already so that more tokens can be
        accepted at once.
        Differs: its weight and schedule are not published.
    """
    log_p = logits.log_softmax(-1)
    cross_entropy = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    right = weights * (logits.argmax(-1) == targets)
    return (cross_entropy * weights).sum() / weights.sum(), (entropy * right).sum() / weights.sum()


@torch.no_grad()
def balance(model: LLaDA2, loads: dict[int, Tensor], rate: float) -> Tensor:
    """Raise the bias of experts with less than the mean load by `rate`, lower that of the others.

    Returns:
        The highest load of an expert over its layer's mean, over all layers.

    Source:
        Auxiliary-loss-free load balancing (DeepSeek-V3), as LLaDA2.0's expert_bias comes from.
    """
    ratios = []
    for layer_id, layer in model.moe_layers():
        load = loads[layer_id].float()
        layer.gate.expert_bias += rate * torch.sign(load.mean() - load)
        ratios.append(load.max() / load.mean())
    return torch.stack(ratios).max()


def learning_rate(config: PretrainConfig, share: float) -> float:
    """Linear warm-up, then a cosine down to the final ratio, by the share of the time that has passed."""
    if share < config.warmup_ratio:
        return config.learning_rate * share / config.warmup_ratio
    progress = min(1.0, (share - config.warmup_ratio) / (1 - config.warmup_ratio))
    low = config.final_learning_rate_ratio
    return config.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
