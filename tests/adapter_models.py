"""Small stand-ins that have the interfaces of other engines' models and loops, over the weights of a tiny LLaDA2."""

from types import SimpleNamespace

import torch
from llada2_models import DECODER, EOS_ID, MASK_ID, tiny_decoder
from torch import nn
from torch.nn import functional

from tracer.llada2 import block_causal_mask, rotary_angles
from tracer.moe import MoeLayer

SMALL = DECODER | {"num_experts": 16, "n_group": 4, "topk_group": 2}


def small_decoder(seed=0):
    return tiny_decoder(seed, SMALL)


class HfGate(nn.Module):
    """Returns (ids, weights times the scale, logits), as the released gate does."""

    def __init__(self, gate, scale):
        super().__init__()
        self.ours, self.scale = gate, scale
        self.expert_bias = gate.expert_bias

    def forward(self, hidden_states):
        x = hidden_states.flatten(0, 1)
        routing = self.ours(x)
        return routing.ids, routing.weights * self.scale, functional.linear(x.float(), self.ours.weight.float())


class HfBlock(nn.Module):
    def __init__(self, ours):
        super().__init__()
        self.gate = HfGate(ours.gate, ours.scale)
        self.experts, self.shared_experts = ours.experts, ours.shared_experts

    def forward(self, hidden_states):
        ids, weights, logits = self.gate(hidden_states)
        routed = self.experts(hidden_states.flatten(0, 1), ids, weights).view_as(hidden_states)
        return routed + self.shared_experts(hidden_states), (logits, ids)


class DInferGate(nn.Module):
    def __init__(self, gate, scale):
        super().__init__()
        self.ours, self.scale = gate, scale
        self.expert_bias = gate.expert_bias

    def get_logits(self, hidden_states):
        return functional.linear(hidden_states.float(), self.ours.weight.float())

    def routing(self, hidden_states, gating_output, topk, renormalize):
        routing = self.ours(hidden_states)
        return routing.weights * self.scale, routing.ids


class DInferBlock(nn.Module):
    """Never calls its gate as a module; its experts write over their input, as fused ones do."""

    def __init__(self, ours):
        super().__init__()
        self.gate = DInferGate(ours.gate, ours.scale)
        self.experts, self.shared_experts = ours.experts, ours.shared_experts

    def forward(self, hidden_states):
        shared = self.shared_experts(hidden_states)
        x = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate.get_logits(x)
        weights, ids = self.gate.routing(hidden_states=x, gating_output=logits, topk=4, renormalize=True)
        return x.copy_(self.experts(x, ids, weights)).view_as(hidden_states) + shared


class QwenBlock(nn.Module):
    """Softmax over all experts, then one top-k; returns router logits alone."""

    def __init__(self, ours):
        super().__init__()
        self.gate = nn.Linear(*ours.gate.weight.shape[::-1], bias=False)
        self.gate.weight = ours.gate.weight
        self.experts, self.top_k = ours.experts, ours.gate.top_k

    def forward(self, hidden_states):
        logits = self.gate(hidden_states.flatten(0, 1))
        weights, ids = torch.topk(functional.softmax(logits, dim=-1), self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(hidden_states.flatten(0, 1), ids, weights).view_as(hidden_states), logits


class TopK(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.ours = gate

    def forward(self, hidden_states, router_logits):
        routing = self.ours(hidden_states)
        return SimpleNamespace(topk_ids=routing.ids.int(), topk_weights=routing.weights, router_logits=router_logits)


class SGLangBlock(nn.Module):
    """A gate of logits, and a top-k module of ids and weights that sum to 1."""

    def __init__(self, ours):
        super().__init__()
        self.gate = nn.Linear(*ours.gate.weight.shape[::-1], bias=False)
        self.gate.weight = ours.gate.weight
        self.topk, self.experts, self.shared_experts = TopK(ours.gate), ours.experts, ours.shared_experts
        self.scale = ours.scale

    def forward(self, hidden_states):
        x = hidden_states.flatten(0, 1)
        chosen = self.topk(x, self.gate(x))
        routed = self.experts(x, chosen.topk_ids.long(), chosen.topk_weights * self.scale).view_as(hidden_states)
        return routed + self.shared_experts(hidden_states)


class DecoderLayer(nn.Module):
    def __init__(self, ours, block):
        super().__init__()
        self.attention = ours.attention
        self.input_layernorm, self.post_attention_layernorm = ours.input_layernorm, ours.post_attention_layernorm
        self.mlp = block(ours.mlp) if isinstance(ours.mlp, MoeLayer) else ours.mlp

    def forward(self, hidden_states, attention_mask, position_embeddings, past_key_value=None):
        cos, sin = position_embeddings
        hidden = hidden_states + self.attention(
            self.input_layernorm(hidden_states), cos, sin, attention_mask, past_key_value
        )
        update = self.mlp(self.post_attention_layernorm(hidden))
        return (hidden + (update[0] if isinstance(update, tuple) else update),)


class Inner(nn.Module):
    def __init__(self, ours, block):
        super().__init__()
        self.config = ours.config
        self.word_embeddings, self.norm = ours.word_embeddings, ours.norm
        self.layers = nn.ModuleList(DecoderLayer(layer, block) for layer in ours.layers)

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None):
        hidden = self.word_embeddings(input_ids)
        angles = rotary_angles(position_ids[0], self.config.rotary_dim, self.config.rope_theta)
        for layer in self.layers:
            (hidden,) = layer(hidden, attention_mask, angles, past_key_values)
        return self.norm(hidden)


class CausalLM(nn.Module):
    """As the class LLaDA2MoeModelLM; `generate` calls `self.forward`, so that hooks of this module never fire."""

    def __init__(self, ours, block=HfBlock):
        super().__init__()
        self.config = SimpleNamespace(**vars(ours.config), _name_or_path="some/where/tiny")
        self.model = Inner(ours, block)
        self.lm_head = ours.lm_head

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **kwargs
    ):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values
        )
        return SimpleNamespace(logits=self.lm_head(hidden).float(), past_key_values=past_key_values)

    @torch.no_grad()
    def generate(
        self,
        inputs,
        temperature=0.0,
        block_length=32,
        gen_length=2048,
        threshold=0.95,
        editing_threshold=None,
        max_post_steps=16,
        mask_id=MASK_ID,
        eos_id=EOS_ID,
    ):
        """The released loops in short: of 2.0, or of 2.1 where there is a threshold to edit; greedy."""
        prompt_length = inputs.shape[1]
        total = -(-(prompt_length + gen_length) // block_length) * block_length
        x = torch.full((1, total), mask_id)
        x[:, :prompt_length] = inputs
        for end in range(prompt_length // block_length * block_length + block_length, total + 1, block_length):
            window = x[:, :end]
            editable = torch.arange(end - block_length, end) >= prompt_length
            mask = block_causal_mask(end, block_length)[None, None]
            post_steps = 0
            while True:
                block = window[0, -block_length:]
                masked = block == mask_id
                if not masked.any():
                    post_steps += 1
                    if editing_threshold is None or post_steps > max_post_steps:
                        break
                output = self.forward(window, attention_mask=mask, position_ids=torch.arange(end)[None])
                p, ids = output.logits[0, -block_length:].softmax(dim=-1).max(dim=-1)
                chosen = masked & (p > threshold)
                if masked.any() and not chosen.any():
                    chosen[torch.where(masked, p, -1).argmax()] = True
                edits = torch.zeros_like(chosen)
                if editing_threshold is not None:
                    edits = ~masked & editable & (p > editing_threshold) & (ids != block)
                block[chosen | edits] = ids[chosen | edits]
                if not masked.any() and not edits.any():
                    break
        return x[:, prompt_length : prompt_length + gen_length]


class TokenArray:
    """Tokens of a request, indexed as dInfer's."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, index):
        return self.data[index]

    def __setitem__(self, index, value):
        self.data[index] = value


class ThresholdDecoder:
    def __init__(self, threshold, mask_id=MASK_ID, eos_id=EOS_ID):
        self.temperature, self.threshold, self.mask_id, self.eos_id = 0, threshold, mask_id, eos_id

    def decode(self, logits, block_start, block_end, x, iter_threshold=None):
        p, ids = logits[0].softmax(dim=-1).max(dim=-1)
        block = x[0, block_start:block_end]
        eligible = (block == self.mask_id) & (ids != self.mask_id)
        if eligible.any():
            accepted = eligible & (p >= min(torch.tensor(self.threshold), p[eligible].max() - 1e-5))
            block[accepted] = ids[accepted]


class BlockDiffusion:
    """The block-diffusion loop of dInfer: prefill, unrolled forwards over a cache, a commit where one is due."""

    def __init__(self, ours, decoder):
        self.ours = ours
        self.model, self.decoder = CausalLM(ours, DInferBlock), decoder

    @torch.no_grad()
    def generate(self, prompt, gen_length=128, block_length=128):
        total = -(-(prompt.shape[1] + gen_length) // block_length) * block_length
        x = TokenArray(torch.full((1, total), self.decoder.mask_id))
        x[:, : prompt.shape[1]] = prompt
        positions, cache = torch.arange(total)[None], self.ours.new_cache(1, total)
        full = prompt.shape[1] // block_length * block_length
        end = max(full, block_length)
        mask = block_causal_mask(end, block_length)[None, None]
        self.model(
            x[:, :end].clone(),
            use_cache=True,
            attention_mask=mask,
            position_ids=positions[:, :end].clone(),
            past_key_values=cache,
        )
        cache.length = full
        for start in range(full, total, block_length):
            self._decode_block(x, positions[:, start : start + block_length], start, start + block_length, cache)
            cache.length = start + block_length
            if (x[:, start : start + block_length] == self.decoder.eos_id).any():
                break
        return x.data[:, prompt.shape[1] : prompt.shape[1] + gen_length]

    def _decode_block(self, x, positions, start, stop, cache):
        def forward():
            return self.model(
                x[:, start:stop].clone(), position_ids=positions.clone(), use_cache=True, past_key_values=cache
            )

        masked = 0
        while left := int((x[:, start:stop] == self.decoder.mask_id).sum()):
            for _ in range(max(min(left // 8, 4), 2)):
                masked = int((x[:, start:stop] == self.decoder.mask_id).sum())
                self.decoder.decode(forward().logits, start, stop, x)
        if masked:
            forward()
