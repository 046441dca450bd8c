import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from adapted import BLOCK, PROMPTS, generate, hf_model, record, session_layers
from adapter_models import BlockDiffusion, CausalLM, QwenBlock, ThresholdDecoder, small_decoder
from llada2_models import MASK_ID

from tracer.adapters import attach
from tracer.doctor import check
from tracer.recover import recover
from tracer.schema import TraceError
from tracer.store import TraceReader


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
    assert caught.value.__notes__ == [f"what was complete before it, 1 request, is kept in {kept}"]
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


def test_dinfer_decoder_without_a_forward_is_named(tmp_path):
    loop = BlockDiffusion(small_decoder(), ThresholdDecoder(0.2))

    def run():
        with attach(loop, "dinfer", tmp_path / "a.trace"):
            decode = loop.decoder.decode
            loop.decoder.decode = lambda *args: (decode(*args), decode(*args))
            loop.generate(torch.tensor([PROMPTS[0]]), gen_length=10, block_length=BLOCK)

    with pytest.raises(TraceError, match="the decoder ran without a forward"):
        run()


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


def test_a_full_disk_leaves_complete_requests_to_be_recovered(tmp_path, monkeypatch):
    model = hf_model()

    def run():
        with attach(model, "hf_llada2", tmp_path / "a.trace"):
            generate(model, PROMPTS[0])
            generate(model, PROMPTS[1])
            monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
            generate(model, PROMPTS[0])

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with pytest.raises(TraceError, match="No space left on device") as caught:
        run()
    monkeypatch.undo()
    (kept,) = tmp_path.iterdir()
    assert caught.value.__notes__ == [f"oled-doctor --recover {kept} makes a trace of the complete requests before it"]
    assert recover(kept).num_requests == 2
    assert check(tmp_path / "a.trace").ok


def test_a_kill_loses_only_the_request_that_ran(tmp_path):
    model = hf_model()
    with attach(model, "hf_llada2", tmp_path / "a.trace") as session:
        for prompt in PROMPTS:
            generate(model, prompt)
        (partial,) = tmp_path.iterdir()
        shutil.copytree(partial, tmp_path / "at the kill" / partial.name)
    assert session.num_requests == len(PROMPTS)
    recovered = recover(tmp_path / "at the kill" / partial.name)
    assert recovered.num_requests == len(PROMPTS)
