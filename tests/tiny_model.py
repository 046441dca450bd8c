"""A LLaDA2-shaped model that is small enough to run hundreds of forwards in a test."""

from dataclasses import replace

import torch

from tracer.checkpoint import save
from tracer.llada2 import LLaDA2
from tracer.llada2_config import LLaDA2Config
from tracer.tokenizer import train_tokenizer

MASK_ID, EOS_ID = 39, 38
CONFIG = LLaDA2Config(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=48,
    num_experts_per_tok=4,
    num_shared_experts=1,
    moe_intermediate_size=16,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    rope_theta=600000.0,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=EOS_ID,
)


def tiny_model(seed=0, config=CONFIG, mask_id=MASK_ID, eos_id=EOS_ID):
    """Random weights and expert biases; the mask and the end of text are hardly ever predicted."""
    torch.manual_seed(seed)
    model = LLaDA2(config).eval()
    with torch.no_grad():
        for _, layer in model.moe_layers():
            layer.gate.expert_bias.normal_(std=0.1)
        model.lm_head.weight[[eos_id, mask_id]] *= 0.01
    return model


def save_tiny_checkpoint(directory):
    """A tiny model with a tokenizer of its own, as a checkpoint directory."""
    tokenizer = train_tokenizer(["Sam has 12 pens and buys 30 more. How many pens are there? 12 + 30 = 42"] * 4, 320)
    config = replace(CONFIG, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.eos_id)
    save(tiny_model(0, config, tokenizer.mask_id, tokenizer.eos_id), directory)
    tokenizer.save(directory)
