from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapted import BLOCK, PROMPTS, attach_quietly, by_id, by_our_model, observed, record, session_layers, unmask
from adapter_models import BlockDiffusion, CausalLM, QwenBlock, SGLangBlock, ThresholdDecoder, small_decoder
from llada2_models import EOS_ID, MASK_ID

from tracer.adapters import attach
from tracer.capture import trace_prompts
from tracer.decode_settings import DecodeSettings
from tracer.doctor import check
from tracer.schema import ForwardKind
from tracer.store import TraceReader


def assert_same_as_our_loop(path, ours, **settings):
    """Every column of a recorded trace is what our own loop and capture write; returns the kinds of its forwards."""
    expected = []
    chosen = DecodeSettings(block_length=BLOCK, gen_length=10, mask_id=MASK_ID, eos_id=EOS_ID, **settings)
    trace_prompts(ours, PROMPTS, chosen, SimpleNamespace(write=expected.append))
    kinds = set()
    for one, other in zip(TraceReader(path), expected, strict=True):
        for name in ("requests", "blocks", "iterations", "kinds", "kv_lens", "num_masked_in", "num_accepted"):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("positions", "token_ids_in", "is_masked_in", "argmax_ids", "accepted", "edited"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        ids, gates = by_id(other.expert_ids, other.gates)
        assert np.array_equal(one.expert_ids, ids)
        assert one.gates == pytest.approx(gates, abs=1e-6)
        for name in ("p_argmax", "p_current", "cos_router_input", "cos_layer_output"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-5, nan_ok=True), name
        kinds.add(one.kind)
    assert not check(path).findings
    return kinds


@pytest.mark.parametrize("threshold", [0.9, 0.2, 0.0])
def test_dinfer_writes_what_our_own_loop_writes(tmp_path, threshold):
    ours = small_decoder()
    loop, path = BlockDiffusion(ours, ThresholdDecoder(threshold)), tmp_path / "a.trace"
    with attach(loop, "dinfer", path, gate_dtype="float32"):
        for prompt in PROMPTS:
            loop.generate(torch.tensor([prompt]), gen_length=10, block_length=BLOCK)
    kinds = assert_same_as_our_loop(path, ours, threshold=threshold)
    assert kinds >= {ForwardKind.PREFILL, ForwardKind.DENOISE}
    assert kinds & {ForwardKind.IDLE, ForwardKind.COMMIT}


@pytest.mark.parametrize(
    ("loop", "edit", "kinds"),
    [("hf20", None, {ForwardKind.DENOISE}), ("hf21", 0.15, {ForwardKind.DENOISE, ForwardKind.EDIT})],
)
def test_the_released_loops_write_what_ours_write(tmp_path, loop, edit, kinds):
    ours = small_decoder()
    record(tmp_path / "a.trace", CausalLM(ours), editing_threshold=edit)
    settings = {"edit_threshold": edit} if edit else {}
    assert assert_same_as_our_loop(tmp_path / "a.trace", ours, loop=loop, threshold=0.2, **settings) == kinds


@pytest.mark.parametrize("name", ["qwen3_moe", "sdar", "rnd1"])
def test_gates_of_qwen3_moe_show_their_own_top_k(tmp_path, name):
    ours = small_decoder()
    model, path = CausalLM(ours, QwenBlock), tmp_path / "a.trace"
    with attach_quietly(model, name, path) as session, torch.no_grad():
        pass_ids = []
        for layer in session_layers(model):
            layer.mlp.register_forward_hook(lambda module, args, output: pass_ids.append(output[1]))
        with session.request(mask_id=MASK_ID):
            unmask(model, torch.tensor([[1, 2, MASK_ID, MASK_ID, 3, MASK_ID]]), MASK_ID)
    passes = list(TraceReader(path))
    assert [item.kind for item in passes] == [ForwardKind.DENOISE] * 3 + [ForwardKind.COMMIT]
    assert [int(item.num_accepted[0]) for item in passes] == [1, 1, 1, 0]
    assert len(pass_ids) == 4 * 3
    for item, logits in zip(passes, torch.stack(pass_ids).numpy().reshape(4, 3, 6, -1), strict=True):
        p = np.exp(logits - logits.max(-1, keepdims=True))
        chosen = np.sort(np.argsort(-p, axis=-1)[..., :4], axis=-1)
        assert np.array_equal(item.expert_ids, chosen)
        gates = np.take_along_axis(p, chosen, axis=-1)
        assert item.gates == pytest.approx(gates / gates.sum(-1, keepdims=True), abs=1e-6)
    assert not check(path).findings


def test_rnd1_reads_the_logits_of_the_row_before(tmp_path):
    model, path = CausalLM(small_decoder(), QwenBlock), tmp_path / "a.trace"
    tokens = torch.tensor([[1, 2, MASK_ID, MASK_ID, 3, MASK_ID]])
    with torch.no_grad():
        expected = model(tokens.clone()).logits[0].argmax(dim=-1).numpy()
    with (
        attach_quietly(model, "rnd1", path) as session,
        torch.no_grad(),
        session.request(mask_id=MASK_ID),
    ):
        unmask(model, tokens, MASK_ID, shift=1)
    first = next(iter(TraceReader(path)))
    assert first.argmax_ids[0] == -1
    assert np.isnan(first.p_argmax[0])
    assert np.array_equal(first.argmax_ids[1:], expected[:-1])


class SGLangModel(CausalLM):
    """Takes flat token ids and positions, as SGLang's models do; layers return what they add apart."""

    def __init__(self, ours):
        super().__init__(ours, SGLangBlock)

    def forward(self, input_ids, positions, forward_batch=None):
        hidden = self.model(input_ids[None], position_ids=positions[None])
        return SimpleNamespace(full_logits=self.lm_head(hidden)[0].float())


def test_sglang_shows_ids_of_its_top_k_module(tmp_path):
    ours = small_decoder()
    model, path = SGLangModel(ours), tmp_path / "a.trace"
    for layer in model.model.layers:  # (stream,) becomes (update, residual), and back before the next layer
        layer.register_forward_hook(lambda module, args, output: (output[0] - 1, torch.ones_like(output[0])))
    attached = attach_quietly(model, "sglang", path)
    positions, tokens = torch.arange(BLOCK), torch.tensor([3] * 6 + [MASK_ID] * 2)
    with attached as session, torch.no_grad():
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: (sum(output),))
        with session.request(mask_id=MASK_ID, block_length=BLOCK):
            for at in (6, 7):
                tokens[at] = int(model(tokens, positions).full_logits[at, :30].argmax())
            model(tokens, positions)
            tokens[2] = 7  # an edit
            model(tokens, positions)
    passes = list(TraceReader(path))
    assert [item.kind for item in passes] == [ForwardKind.DENOISE] * 2 + [ForwardKind.EDIT, ForwardKind.COMMIT]
    assert [np.flatnonzero(item.edited).tolist() for item in passes] == [[], [], [2], []]
    assert not check(path).findings
    outputs = []
    for item in passes:
        _, *routing = by_our_model(ours, item.token_ids_in)
        ids, gates = by_id(*routing)
        assert np.array_equal(item.expert_ids, ids)
        assert item.gates == pytest.approx(gates, abs=1e-6)
        outputs.append([layer.output for layer in observed(ours, item.token_ids_in)[1]])
    for item, before, now in zip(passes[1:], outputs, outputs[1:], strict=False):
        cosines = [torch.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(before, now, strict=True)]
        assert item.cos_layer_output[0] == pytest.approx(np.array(cosines), abs=1e-5)
