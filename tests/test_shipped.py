"""What is shipped: the trace is sound, and is what the shipped model does."""

import json

import numpy as np
import pytest
import torch

from experiments.run import simulate
from tracer import doctor
from tracer.capture import trace_prompts
from tracer.checkpoint import load, read_provenance
from tracer.corpus import prompts, split_of
from tracer.decode_settings import DecodeSettings
from tracer.schema import TraceError
from tracer.shipped import find_model, find_trace
from tracer.store import TraceReader
from tracer.tokenizer import load_tokenizer

NUM_RETRACED = 4


def test_the_trace_is_sound():
    report = doctor.check(find_trace("proxy-tiny"))
    assert report.ok
    assert not report.findings


def test_the_trace_is_of_the_shipped_model():
    metadata = TraceReader(find_trace("proxy-tiny")).metadata
    assert metadata.source == "proxy:proxy-tiny"
    provenance = read_provenance(find_model("proxy-tiny"))
    assert metadata.details["checkpoint_hash"] == provenance.checkpoint_hash
    assert metadata.details["checkpoint"] == {"total_size": provenance.total_size, "shards": provenance.shards}
    assert metadata.details["training"] == provenance.training
    assert metadata.details["training"]["minutes"] == 4.45


def test_tracing_again_gives_the_same_tokens_and_experts():
    directory = find_model("proxy-tiny")
    reader, tokenizer = TraceReader(find_trace("proxy-tiny")), load_tokenizer(directory)
    lines = (directory / "traced.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    assert len(texts) == reader.num_requests
    recorded = [item for item in reader.passes() if item.requests[0] < NUM_RETRACED]

    decode = {k: v for k, v in reader.metadata.decode.items() if k != "temperature"}
    settings = DecodeSettings(**decode, mask_id=tokenizer.mask_id, eos_id=tokenizer.eos_id)
    model, again = load(directory, dtype=torch.float32), []

    class Sink:
        write = staticmethod(again.append)

    trace_prompts(model, [tokenizer.encode(text) for text in texts[:NUM_RETRACED]], settings, Sink())
    assert [item.kinds[0] for item in again] == [item.kinds[0] for item in recorded]
    for made, kept in zip(again, recorded, strict=True):
        np.testing.assert_array_equal(made.token_ids_in, kept.token_ids_in)
    # another processor may round the scores of two experts the other way
    same = [np.mean(np.sort(made.expert_ids) == kept.expert_ids) for made, kept in zip(again, recorded, strict=True)]
    assert np.mean(same) > 0.99


def test_traced_and_demonstrated_problems_were_not_trained_on():
    directory = find_model("proxy-tiny")
    heldout = {document.prompt for document in prompts("arithmetic", 200)}
    demo = {document.prompt for document in prompts("arithmetic", 12, "demo")}
    traced = [json.loads(line)["prompt"] for line in (directory / "traced.jsonl").read_text().splitlines()]
    shown = [json.loads(line)["prompt"] for line in (directory / "prompts.jsonl").read_text().splitlines()]
    assert set(traced) <= heldout
    assert set(shown) == demo
    assert not demo & heldout
    keys = [document.key for split in ("heldout", "demo") for document in prompts("arithmetic", 12, split)]
    assert "train" not in {split_of(key) for key in keys}


def test_the_trace_simulates_by_name():
    result = simulate("proxy-tiny", "oled", 16, "rtx5090", shape="llada2.0-mini")
    assert result.summary["source"] == "proxy:proxy-tiny"
    assert result.summary["num_requests"] == 23


def test_a_proxy_that_ships_without_weights_is_no_model():
    with pytest.raises(TraceError, match=r"model 'proxy-19x256': no such directory, nor a shipped model; .*proxy-tiny"):
        find_model("proxy-19x256")
    assert find_trace("proxy-19x256-code").is_dir()
