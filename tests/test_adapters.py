import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapter_models import BlockDiffusion, CausalLM, QwenBlock, SGLangBlock, ThresholdDecoder, small_decoder
from llada2_models import EOS_ID, MASK_ID

from tracer.adapters import ADAPTERS, attach
from tracer.adapters.hf_llada2 import mask_mode
from tracer.capture import trace_prompts
from tracer.decode import DecodeSettings
from tracer.doctor import check
from tracer.llada2 import block_causal_mask
from tracer.observe import Observation
from tracer.schema import ForwardKind, TraceError
from tracer.store import TraceReader

BLOCK = 8
PROMPTS = [[5] * 3 + [9, 8, 7, 1], [3] * 10 + [4] * 12]
DOCS = Path(__file__).resolve().parent.parent / "docs" / "adapters.md"


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
def by_our_model(ours, tokens):
    """Logits [T, V], ids and gates [L, T, K] of a window from position 0, under the strict mask of blocks."""
    observation = Observation(ours, False)
    tokens = torch.tensor(tokens)
    mask = block_causal_mask(len(tokens), BLOCK)
    logits = ours(tokens[None], torch.arange(len(tokens)), mask=mask, observer=observation)[0]
    ids, gates = (torch.stack([getattr(layer, name) for layer in observation.layers]) for name in ("ids", "gates"))
    return logits, ids.numpy(), gates.numpy()


def by_id(ids, gates):
    """Both in the order in which a trace keeps them."""
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, axis=-1), np.take_along_axis(gates, order, axis=-1)


def test_ids_gates_and_probabilities_are_those_of_our_own_model(tmp_path):
    ours = small_decoder()
    passes, _ = record(tmp_path / "a.trace", CausalLM(ours))
    assert len(passes) > 10
    for item in passes:
        logits, *routing = by_our_model(ours, item.token_ids_in)
        ids, gates = by_id(*routing)
        assert np.array_equal(item.expert_ids, ids)
        assert item.gates == pytest.approx(gates, abs=1e-6)
        best = logits.softmax(dim=-1).max(dim=-1)
        assert np.array_equal(item.argmax_ids, best.indices.numpy())
        assert item.p_argmax == pytest.approx(best.values.numpy(), abs=1e-6)


def test_what_the_loop_accepted_is_recorded(tmp_path):
    passes, answers = record(tmp_path / "a.trace")
    assert not check(tmp_path / "a.trace").findings
    for request, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        mine = [item for item in passes if item.requests[0] == request]
        text = np.full(mine[-1].positions[-1] + 1, MASK_ID)
        text[: len(prompt)] = prompt
        for item in mine:
            assert item.kv_lens[0] == 0
            assert item.kind == ForwardKind.DENOISE
            assert np.array_equal(item.token_ids_in, text[item.positions])
            assert item.num_accepted[0] == item.accepted.sum() > 0
            text[item.positions[item.accepted]] = item.argmax_ids[item.accepted]  # greedy
        assert np.array_equal(text[len(prompt) :][: len(answer)], answer)
        blocks = [int(item.blocks[0]) for item in mine]
        assert sorted(set(blocks)) == list(range(blocks[-1] + 1))


def test_rows_of_the_block_alone(tmp_path):
    whole, _ = record(tmp_path / "a.trace")
    blocks, _ = record(tmp_path / "b.trace", rows="block")
    assert not check(tmp_path / "b.trace").findings
    for one, other in zip(whole, blocks, strict=True):
        assert other.num_tokens[0] == BLOCK
        assert other.kv_lens[0] == one.num_tokens[0] - BLOCK
        assert np.array_equal(other.expert_ids, one.expert_ids[:, -BLOCK:])
        assert np.array_equal(other.accepted, one.accepted[-BLOCK:])
    assert TraceReader(tmp_path / "b.trace").metadata.details["adapter"]["rows"] == "block"


def test_editing_forwards_have_their_kind(tmp_path):
    passes, answers = record(tmp_path / "a.trace", editing_threshold=0.15)
    kinds = [item.kind for item in passes]
    assert {*kinds} == {ForwardKind.DENOISE, ForwardKind.EDIT}
    assert any(item.edited.any() for item in passes)
    assert not check(tmp_path / "a.trace").findings
    last = [item for item in passes if item.requests[0] == 0][-1]
    final = np.where(last.accepted | last.edited, last.argmax_ids, last.token_ids_in)
    assert np.array_equal(final[len(PROMPTS[0]) :][:10], answers[0])


def test_cosines_are_those_of_our_own_capture(tmp_path):
    ours = small_decoder()
    passes, _ = record(tmp_path / "a.trace", CausalLM(ours), prompts=PROMPTS[:1])
    observation, before = Observation(ours, False), None
    for item in passes:
        tokens = torch.tensor(item.token_ids_in)
        with torch.no_grad():
            observation.clear()
            ours(
                tokens[None],
                torch.arange(len(tokens)),
                mask=block_causal_mask(len(tokens), BLOCK),
                observer=observation,
            )
        now = observation.layers
        if item.iterations[0] == 0:
            assert np.isnan(item.cos_router_input).all()
        else:
            for name, found in (("router_input", item.cos_router_input), ("output", item.cos_layer_output)):
                pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(before, now, strict=True)]
                cosines = [torch.cosine_similarity(a, b, dim=-1).mean() for a, b in pairs]
                assert found[0] == pytest.approx(np.array(cosines), abs=1e-5)
        before = now


def test_metadata_says_what_was_attached_to_and_how_it_decodes(tmp_path):
    record(tmp_path / "a.trace", temperature=0.0)
    metadata = TraceReader(tmp_path / "a.trace").metadata
    assert metadata.source == "model:tiny"
    assert metadata.decode["block_length"] == BLOCK
    assert metadata.decode["threshold"] == 0.2
    assert metadata.details["mask_id"] == MASK_ID
    assert metadata.details["adapter"] == {"name": "hf_llada2", "status": "supported", "rows": "all"}
    assert metadata.details["mask_mode"] == "strict"
    assert metadata.details["sampler_patched"] is False
    assert metadata.details["expert_bias_dtype"] == "float32"
    assert metadata.shape == replace_dtype(small_decoder().config.shape(), "float32")


def replace_dtype(shape, dtype):
    return type(shape)(**vars(shape) | {"weight_dtype": dtype})


def test_forwards_between_requests_and_after_the_session_leave_no_trace(tmp_path):
    model = hf_model()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with attach(model, "hf_llada2", tmp_path / "a.trace") as session:
        model(torch.tensor([[1, 2, 3]]))  # a warm-up
        generate(model, PROMPTS[0])
        model(torch.tensor([[1, 2, 3]]))
    assert session.num_requests == 1
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert len(list(TraceReader(tmp_path / "a.trace"))) == session.num_forwards


@pytest.mark.parametrize(
    ("mask", "mode"),
    [
        (None, "none"),
        (torch.tensor([[True, False]]), "strict"),
        (torch.tensor([[0.0, -torch.inf]]), "strict"),
        (torch.tensor([[1.0, 0.0]]), "soft01"),
    ],
)
def test_mask_modes(mask, mode):
    assert mask_mode(mask) == mode


# Faults


def gate_of(model, layer_id):
    return model.model.layers[layer_id].mlp.gate


def twice(model):
    gate = gate_of(model, 2)
    block = model.model.layers[2].mlp
    original = block.forward
    block.forward = lambda x: (gate(x), original(x))[1]


def never(model):
    gate_of(model, 3)._call_impl = gate_of(model, 3).forward  # as a compiled or replayed call, without hooks


def wrong_weights(model):
    gate_of(model, 1).scale = 1.0


def duplicate_ids(model):
    gate_of(model, 3).forward = lambda x: (
        torch.zeros(x.shape[1], 4, dtype=torch.int64),
        torch.full((x.shape[1], 4), 0.625),
        None,
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (twice, r"request 1, forward 0: the hook of the gates fired 2 times in layer 2; each of the 3 MoE layers"),
        (never, r"request 1, forward 0: the hook of the gates never fired in layer 3; .*CUDA graphs"),
        (wrong_weights, r"request 1, forward 0: layer 1: weights of row 0 sum to 1, must be 2.5"),
        (duplicate_ids, r"pass \d+, request 1, layer 3.*: (all expert ids are zero|expert twice)"),
    ],
)
def test_a_fault_is_named_and_complete_requests_are_kept(tmp_path, fault, message):
    model, path = hf_model(), tmp_path / "a.trace"

    def run():
        with attach(model, "hf_llada2", path, gate_dtype="float32"):
            generate(model, PROMPTS[0])
            fault(model)
            generate(model, PROMPTS[1])

    with pytest.raises(TraceError, match=message) as caught:
        run()
    kept = tmp_path / "a.finished.trace"
    assert caught.value.__notes__ == [f"the 1 complete requests before it are kept in {kept}"]
    assert [entry.name for entry in tmp_path.iterdir()] == [kept.name]
    assert not check(kept).findings
    whole, _ = record(tmp_path / "whole.trace", prompts=PROMPTS[:1])
    for one, other in zip(TraceReader(kept), whole, strict=True):
        assert np.array_equal(one.expert_ids, other.expert_ids)


def test_any_error_of_the_loop_keeps_complete_requests_and_a_caught_one_goes_on(tmp_path):
    model, path = hf_model(), tmp_path / "a.trace"
    with attach(model, "hf_llada2", path) as session:
        generate(model, PROMPTS[0])
        with pytest.raises(IndexError):
            generate(model, [999])  # no such token
        generate(model, PROMPTS[1])
    assert session.num_requests == 2
    assert not check(path).findings

    def interrupted():
        with attach(model, "hf_llada2", tmp_path / "b.trace"):
            generate(model, PROMPTS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    assert "b.finished.trace" in caught.value.__notes__[0]


def test_without_a_complete_request_there_is_no_trace(tmp_path):
    model, path = hf_model(), tmp_path / "a.trace"
    with pytest.raises(TraceError, match="no request was answered"), attach(model, "hf_llada2", path):
        pass
    never(model)
    with pytest.raises(TraceError, match="never fired in layer 3"), attach(model, "hf_llada2", path):
        generate(model, PROMPTS[0])
    assert list(tmp_path.iterdir()) == []


def test_batches_embeddings_and_loops_that_hide_their_tokens_are_refused(tmp_path):
    model = hf_model()

    def attached(run):
        with attach(model, "hf_llada2", tmp_path / "a.trace") as session, session.request(mask_id=MASK_ID):
            run()

    tokens = torch.tensor([[1, 2, MASK_ID]])
    with pytest.raises(TraceError, match=r"shape \[2, 3\]; one request at a time"):
        attached(lambda: model(tokens.expand(2, -1)))
    with pytest.raises(TraceError, match="only token ids can be recorded"):
        attached(lambda: model(inputs_embeds=torch.zeros(1, 3, 32)))
    with pytest.raises(TraceError, match=r"nothing shows what its last forward accepted; .*end_with"):
        attached(lambda: model(tokens))
    with pytest.raises(TraceError, match="no forward reached the hooks"):
        attached(lambda: None)


def test_settings_stay_the_same(tmp_path):
    model = hf_model()
    with attach(model, "hf_llada2", tmp_path / "a.trace") as session:
        generate(model, PROMPTS[0])
        with pytest.raises(TraceError, match=r"request 1: threshold 0\.5 after 0\.2; all requests of a trace"):
            generate(model, PROMPTS[0], threshold=0.5)
    assert session.num_requests == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adapter": "hf_lada2"}, "did you mean hf_llada2"),
        ({"target": torch.nn.Linear(2, 2)}, "hf_llada2: Linear has no model"),
        ({"gate_dtype": "int4"}, "gate_dtype 'int4': allowed are"),
        ({"rows": "some"}, "rows 'some': allowed are all, block"),
        ({"adapter": "dinfer"}, "dinfer: CausalLM has no decoder"),
        ({"adapter": "sglang"}, "sglang: HfBlock has no topk"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, values, message):
    values = {"target": hf_model(), "adapter": "hf_llada2", "path": tmp_path / "a.trace"} | values
    with pytest.raises(TraceError, match=message):
        attach(values.pop("target"), values.pop("adapter"), values.pop("path"), **values)


def test_a_taken_name_a_compiled_model_and_block_routing_are_refused(tmp_path):
    model = hf_model()
    (tmp_path / "a.trace").mkdir()
    with pytest.raises(TraceError, match="exists already"):
        attach(model, "hf_llada2", tmp_path / "a.trace")
    model.forward = SimpleNamespace(_torchdynamo_orig_callable=model.forward)  # by which torch.compile can be known
    with pytest.raises(TraceError, match="is compiled"), attach(model, "hf_llada2", tmp_path / "b.trace"):
        pass
    del model.forward
    model.config.expert_capacity = 48
    with pytest.raises(TraceError, match=r"LLaDA2\.2"):
        attach(model, "hf_llada2", tmp_path / "b.trace")


# Other engines


@pytest.mark.parametrize("threshold", [0.9, 0.2, 0.0])
def test_dinfer_writes_what_our_own_loop_writes(tmp_path, threshold):
    ours = small_decoder()
    loop, path = BlockDiffusion(ours, ThresholdDecoder(threshold)), tmp_path / "a.trace"
    with attach(loop, "dinfer", path, gate_dtype="float32"):
        for prompt in PROMPTS:
            loop.generate(torch.tensor([prompt]), gen_length=10, block_length=BLOCK)
    assert not check(path).findings
    expected = []
    settings = DecodeSettings(block_length=BLOCK, threshold=threshold, gen_length=10, mask_id=MASK_ID, eos_id=EOS_ID)
    trace_prompts(ours, PROMPTS, settings, SimpleNamespace(write=expected.append))
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
    assert kinds >= {ForwardKind.PREFILL, ForwardKind.DENOISE}
    assert kinds & {ForwardKind.IDLE, ForwardKind.COMMIT}


def test_dinfer_decoder_without_a_forward_is_named(tmp_path):
    loop = BlockDiffusion(small_decoder(), ThresholdDecoder(0.2))

    def run():
        with attach(loop, "dinfer", tmp_path / "a.trace"):
            decode = loop.decoder.decode
            loop.decoder.decode = lambda *args: (decode(*args), decode(*args))
            loop.generate(torch.tensor([PROMPTS[0]]), gen_length=10, block_length=BLOCK)

    with pytest.raises(TraceError, match="the decoder ran without a forward"):
        run()


def unmask(model, tokens, mask_id, shift=0):
    """Fill masks from the left, one a forward, in place; then one forward on the final tokens."""
    while bool((tokens == mask_id).any()):
        logits = model(tokens).logits[0]
        first = int((tokens[0] == mask_id).nonzero()[0])
        tokens[0, first] = int(logits[max(first - shift, 0), :30].argmax())
    model(tokens)


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


def session_layers(model):
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def attach_quietly(model, name, path):
    """Attach; an adapter that was never run against the real source says so, in one line, and no other one does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        session = attach(model, name, path, gate_dtype="float32")
    expected = ["experimental"] if ADAPTERS[name].status == "experimental" else []
    assert [str(one.message).split(f"adapter {name} is ")[1].split(":")[0] for one in said] == expected
    return session


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


def test_a_fused_backend_that_hides_its_choice_is_named(tmp_path):
    model = CausalLM(small_decoder(), QwenBlock)
    block = session_layers(model)[1].mlp
    block.forward = lambda x: (torch.zeros_like(x), None)
    with (
        pytest.raises(TraceError, match="layer 2 ran 0 top-k, must be one"),
        attach(model, "sdar", tmp_path / "a.trace") as session,
        session.request(mask_id=MASK_ID),
    ):
        model(torch.tensor([[1, MASK_ID]]))


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
        outputs.append(outputs_of_layers(ours, item.token_ids_in))
    for item, before, now in zip(passes[1:], outputs, outputs[1:], strict=False):
        cosines = [torch.cosine_similarity(a, b, dim=-1).mean() for a, b in zip(before, now, strict=True)]
        assert item.cos_layer_output[0] == pytest.approx(np.array(cosines), abs=1e-5)


@torch.no_grad()
def outputs_of_layers(ours, tokens):
    observation = Observation(ours, False)
    tokens = torch.tensor(tokens)
    ours(tokens[None], torch.arange(len(tokens)), mask=block_causal_mask(len(tokens), BLOCK), observer=observation)
    return [layer.output for layer in observation.layers]


def test_the_page_names_every_adapter_with_its_status_and_its_python_runs(tmp_path, monkeypatch):
    text = DOCS.read_text()
    for name, adapter in ADAPTERS.items():
        assert re.search(rf"^\| `{name}` \|.*\| \*{adapter.status}\* \|", text, re.MULTILINE), name
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    given = [{"model": hf_model()}, {"model": CausalLM(small_decoder(), QwenBlock), "my_loop": unmask}]
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    for block, names in zip(blocks, given, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block, "adapters.md", "exec"), names | {"prompts": prompts, "mask_id": MASK_ID})
    assert not check(tmp_path / "mine.trace").findings


def test_a_loop_that_copies_its_tokens_says_what_came_out(tmp_path):
    model, path = hf_model(), tmp_path / "a.trace"
    with attach(model, "hf_llada2", path) as session, session.request(mask_id=MASK_ID) as request, torch.no_grad():
        model(torch.tensor([[1, 2, MASK_ID, MASK_ID]]))
        model(torch.tensor([[1, 2, 9, MASK_ID]]))
        request.end_with(torch.tensor([[1, 2, 9, 8, 7]]))
    passes = list(TraceReader(path))
    assert [item.accepted.tolist() for item in passes] == [[False, False, True, False], [False, False, False, True]]
