"""Recorded stand-ins of other engines, and what the tracer's own model says of the same tokens."""

import warnings

import numpy as np
import torch
from adapter_models import CausalLM, small_decoder

from tracer.adapters import ADAPTERS, attach
from tracer.llada2 import block_causal_mask
from tracer.observe import Observation
from tracer.store import TraceReader

BLOCK = 8
PROMPTS = [[5] * 3 + [9, 8, 7, 1], [3] * 10 + [4] * 12]


def hf_model(seed=0):
    return CausalLM(small_decoder(seed))


def generate(model, prompt, **changes):
    return model.generate(
        torch.tensor([prompt]), **{"block_length": BLOCK, "gen_length": 10, "threshold": 0.2} | changes
    )


def record(path, model=None, prompts=PROMPTS, rows="all", **changes):
    """Passes and answers of the stand-in for the released code."""
    model = model or hf_model()
    with attach(model, "hf_llada2", path, gate_dtype="float32", rows=rows):
        answers = [generate(model, prompt, **changes)[0].numpy() for prompt in prompts]
    return list(TraceReader(path)), answers


@torch.no_grad()
def observed(ours, tokens):
    """Logits [T, V] and MoE layers of a window from position 0, under the strict mask of blocks."""
    observation = Observation(ours, False)
    tokens = torch.tensor(tokens)
    mask = block_causal_mask(len(tokens), BLOCK)
    logits = ours(tokens[None], torch.arange(len(tokens)), mask=mask, observer=observation)[0]
    return logits, observation.layers


def by_our_model(ours, tokens):
    """Logits [T, V], ids and gates [L, T, K] of such a window."""
    logits, layers = observed(ours, tokens)
    ids, gates = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("ids", "gates"))
    return logits, ids.numpy(), gates.numpy()


def by_id(ids, gates):
    """Both in the order in which a trace keeps them."""
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(gates, order, axis=-1)


def session_layers(model):
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def unmask(model, tokens, mask_id, shift=0):
    """Fill masks from the left, one a forward, in place; then one forward on the final tokens."""
    while bool((tokens == mask_id).any()):
        logits = model(tokens).logits[0]
        first = int((tokens[0] == mask_id).nonzero()[0])
        tokens[0, first] = int(logits[max(first - shift, 0), :30].argmax())
    model(tokens)


def attach_quietly(model, name, path):
    """Attach; an adapter that was never run against the real source says so, in one line, and no other one does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        session = attach(model, name, path, gate_dtype="float32")
    expected = ["experimental"] if ADAPTERS[name].status == "experimental" else []
    assert [str(one.message).split(f"adapter {name} is ")[1].split(":")[0] for one in said] == expected
    return session
