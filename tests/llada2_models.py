"""LLaDA2.x configurations and small models with random weights."""

import numpy as np
import torch

from tracer.checkpoint import save
from tracer.llada2 import LLaDA2
from tracer.llada2_config import LLaDA2Config
from tracer.tokenizer import train_tokenizer

MINI = {
    "vocab_size": 157184,
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "first_k_dense_replace": 1,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rope_theta": 600000,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "pad_token_id": 156892,
}
FLASH = MINI | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 9216,
    "num_attention_heads": 32,
    "moe_intermediate_size": 1024,
}
TINY = MINI | {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


MASK_ID, EOS_ID = 39, 38
DECODER = TINY | {
    "vocab_size": 40,
    "num_experts": 48,  # more than a trace keeps scores of
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 256,
    "pad_token_id": EOS_ID,
}


def config(values=TINY, **changes):
    return LLaDA2Config(**values | changes)


def tiny_model(seed=0, values=TINY):
    """Every parameter and bias is random, so that none can be left out unnoticed."""
    rng = np.random.default_rng(seed)
    model = LLaDA2(config(values))
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            mean = 1.0 if "norm" in name else 0.0
            spread = 0.1 if "norm" in name or "bias" in name else 0.2
            tensor.copy_(torch.from_numpy(rng.normal(mean, spread, tensor.shape)))
    return model


def tiny_decoder(seed=0, values=DECODER, mask_id=MASK_ID, eos_id=EOS_ID):
    """A tiny model that hardly ever predicts the mask or the end of text."""
    model = tiny_model(seed, values)
    with torch.no_grad():
        model.lm_head.weight[[eos_id, mask_id]] *= 0.01
    return model


def save_tiny_checkpoint(directory):
    """A tiny decoder with a tokenizer of its own, as a checkpoint directory."""
    tokenizer = train_tokenizer(["Sam has 12 pens and buys 30 more. How many pens are there? 12 + 30 = 42"] * 4, 320)
    values = DECODER | {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.eos_id}
    save(tiny_decoder(0, values, tokenizer.mask_id, tokenizer.eos_id), directory)
    tokenizer.save(directory)


class Recorder:
    """An observer that keeps everything."""

    def __init__(self):
        self.embeddings = []
        self.layers = []

    def embedded(self, embeddings):
        self.embeddings.append(embeddings)

    def moe_layer(self, layer_id, router_input, routing, output):
        self.layers.append((layer_id, router_input, routing, output))
