import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapted import (
    BLOCK,
    PROMPTS,
    by_id,
    by_our_model,
    generate,
    hf_model,
    observed,
    record,
    unmask,
)
from adapter_models import CausalLM, QwenBlock, small_decoder
from llada2_models import MASK_ID

from tracer.adapters import ADAPTERS, attach
from tracer.adapters.hf_llada2 import mask_mode
from tracer.doctor import check
from tracer.schema import ForwardKind
from tracer.store import TraceReader

DOCS = Path(__file__).resolve().parent.parent / "docs" / "adapters.md"


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
    before = None
    for item in passes:
        _, now = observed(ours, item.token_ids_in)
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
    assert metadata.shape == replace(small_decoder().config.shape(), weight_dtype="float32")


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
