from itertools import groupby

import numpy as np
import pytest
import torch
from decode_models import decode_request
from llada2_models import DECODER, EOS_ID, MASK_ID, config, tiny_decoder

from tracer.capture import Recorder, trace_metadata, trace_prompts
from tracer.checkpoint import Provenance
from tracer.decode import decode_prompts
from tracer.decode_settings import DecodeError, DecodeSettings
from tracer.llada2 import block_causal_mask
from tracer.observe import Observation, best_scored, sketch_projection
from tracer.observed import ObservedModel
from tracer.schema import ForwardKind, TraceError

CONFIG = config(DECODER)
LAYERS = CONFIG.moe_layer_ids
PROMPTS = [[5] * 3 + [9, 8, 7, 1], [3] * 16 + [4] * 16, [2, 30, 11] * 7]


class Passes(list):
    write = list.append


def settings(**changes):
    values = {"block_length": 16, "threshold": 0.2, "gen_length": 24, "mask_id": MASK_ID, "eos_id": EOS_ID}
    return DecodeSettings(**values | changes)


def trace(model=None, prompts=PROMPTS, signals=False, **changes):
    passes = Passes()
    results = trace_prompts(model or tiny_decoder(), prompts, settings(**changes), passes, signals=signals)
    return results, passes


@torch.no_grad()
def full_window(model, token_ids, block_length, observation):
    """Logits [T, V] of a window from position 0, under the strict mask and without a cache."""
    observation.clear()
    tokens = torch.tensor(np.asarray(token_ids))
    mask = block_causal_mask(len(tokens), block_length)
    return model(tokens[None], torch.arange(len(tokens)), mask=mask, observer=observation)[0]


class FullWindowModel:
    """Runs everything from position 0 on at each forward, and keeps tokens where others keep keys and values."""

    def __init__(self, model, block_length):
        self.model, self.block_length = model, block_length
        self.window = np.empty(0, np.int64)

    def forward(self, token_ids, start):
        self.window = np.concatenate([self.window[:start], token_ids])
        return full_window(self.model, self.window, self.block_length, Observation(self.model, False))[start:]


def test_t1_rows_and_hook_calls_of_every_forward():
    _, passes = trace()
    assert len(passes) > 3 * len(PROMPTS)
    assert [item.pass_id for item in passes] == list(range(len(passes)))
    for item in passes:
        num_tokens = int(item.num_tokens[0])
        assert item.expert_ids.shape == (len(LAYERS), num_tokens, CONFIG.num_experts_per_tok)
        assert item.expert_ids.size == len(LAYERS) * num_tokens * CONFIG.num_experts_per_tok
        assert item.gates.sum(axis=-1) == pytest.approx(1, abs=1e-5)
        assert np.array_equal(item.positions, item.kv_lens[0] + np.arange(num_tokens))


def test_columns_of_a_pass_agree_with_each_other():
    results, passes = trace()
    for request, (result, prompt) in enumerate(zip(results, PROMPTS, strict=True)):
        mine = [item for item in passes if item.requests[0] == request]
        assert mine[0].kind == ForwardKind.PREFILL
        assert sum(int(item.num_accepted[0]) for item in mine) == len(result.token_ids) - len(prompt)
        for item in mine:
            assert item.num_masked_in[0] == item.is_masked_in.sum()
            assert item.num_accepted[0] == item.accepted.sum()
            assert np.array_equal(item.is_masked_in, item.token_ids_in == MASK_ID)
            assert np.array_equal(np.isnan(item.p_current), item.is_masked_in)
            assert (item.p_argmax > 0).all()
            assert not item.edited.any()
            assert item.wall_ns > 0
            final = result.token_ids[item.positions]
            assert np.array_equal(np.where(item.accepted, item.argmax_ids, final), final)


@pytest.mark.parametrize("block_length", [1, 16, 64])
def test_cache_and_full_window_decode_alike(block_length):
    model = tiny_decoder(seed=block_length)
    chosen = settings(block_length=block_length)
    for prompt in PROMPTS[1:]:
        by_cache, by_window = [], []
        cached = ObservedModel(model, Observation(model, False), block_length)
        [first] = decode_prompts(cached, [prompt], chosen, by_cache.extend)
        second = decode_request(FullWindowModel(model, block_length), prompt, chosen, by_window.append)
        assert np.array_equal(first.token_ids, second.token_ids)
        assert [event.kind for event in by_cache] == [event.kind for event in by_window]
        for one, other in zip(by_cache, by_window, strict=True):
            assert np.array_equal(one.accepted, other.accepted)
            assert np.array_equal(one.argmax_ids, other.argmax_ids)
            assert np.abs(one.p_argmax - other.p_argmax).max() < 1e-5


@pytest.mark.parametrize("threshold", [0.9, 0.2, 0.0])
def test_l4_the_forward_that_commits_routes_the_final_tokens(threshold):
    model = tiny_decoder()
    results, passes = trace(model, threshold=threshold)
    kinds = set()
    decoded = [item for item in passes if item.blocks[0] >= 0]
    for (request, _), of_block in groupby(decoded, key=lambda item: (int(item.requests[0]), int(item.blocks[0]))):
        last = list(of_block)[-1]
        kinds.add(last.kind)
        assert last.num_masked_in[0] == 0
        window = results[request].token_ids[: last.positions[-1] + 1]
        observation = Observation(model, False)
        full_window(model, window, 16, observation)
        routed = torch.stack([layer.ids for layer in observation.layers])[:, last.positions]
        assert np.array_equal(last.expert_ids, routed.numpy())
        assert np.array_equal(last.token_ids_in, window[last.positions])
    assert kinds
    assert kinds <= {ForwardKind.COMMIT, ForwardKind.IDLE}
    if threshold == 0.0:
        assert kinds == {ForwardKind.IDLE}


def test_both_ways_to_commit_occur():
    kinds = {item.kind for threshold in (0.2, 0.3) for item in trace(threshold=threshold)[1]}
    assert kinds == {ForwardKind.PREFILL, ForwardKind.DENOISE, ForwardKind.IDLE, ForwardKind.COMMIT}


def test_cosines_compare_with_the_blocks_previous_forward():
    model = tiny_decoder()
    results, passes = trace(model)
    observation = Observation(model, False)
    before = None
    assert {item.iterations[0] for item in passes} >= {0, 1, 2}
    for item in passes:
        window = np.concatenate([results[item.requests[0]].token_ids[: item.kv_lens[0]], item.token_ids_in])
        full_window(model, window, 16, observation)
        now = [
            torch.stack([getattr(layer, name) for layer in observation.layers])[:, item.positions].double()
            for name in ("router_input", "output")
        ]
        found = [item.cos_router_input[0], item.cos_layer_output[0]]
        if item.iterations[0] == 0:
            assert np.isnan(found).all()
        else:
            for values, old, new in zip(found, before, now, strict=True):
                expected = (old * new).sum(-1) / (old.norm(dim=-1) * new.norm(dim=-1))
                assert values == pytest.approx(expected.mean(-1).numpy(), abs=1e-5)
        before = now


def test_cosine_between_two_idle_forwards_is_one():
    _, passes = trace(threshold=0.0, block_length=32)
    again = [b for a, b in zip(passes, passes[1:], strict=False) if a.kind == b.kind == ForwardKind.IDLE]
    assert len(again) == 1 + 2 + 0 + 2  # blocks of 25, 32, 11 and 32 masks unroll 3, 4, 2 and 4 forwards
    for item in again:
        assert item.cos_router_input == pytest.approx(1, abs=1e-6)
        assert item.cos_layer_output == pytest.approx(1, abs=1e-6)


def test_signals_are_what_the_gates_say():
    model = tiny_decoder()
    _, passes = trace(model, prompts=PROMPTS[:1], signals=True)
    gates = dict(model.moe_layers())
    assert sum(item.kv_lens[0] == 0 for item in passes) > 3
    for item in passes:
        observation = Observation(model, False)
        kept = []
        observation.moe_layer = lambda *values, kept=kept: kept.append(values)
        # A short prompt: block 0 starts at position 0, so that a forward of it is the whole window.
        if item.kv_lens[0] > 0:
            continue
        full_window(model, item.token_ids_in, 16, observation)
        assert len(kept) == 3
        signals = item.signals
        assert signals.score_ids.shape == signals.scores.shape == (3, 16, 32)
        assert signals.ahead_ids.shape == (3, 3, 16, 16)
        for index, (_, router_input, (ids, _, scores, biased), _) in enumerate(kept):
            for token in range(16):
                best = set(np.argsort(-biased[0, token].numpy(), kind="stable")[:32].tolist())
                found = set(signals.score_ids[index, token].tolist())
                assert set(ids[0, token].tolist()) <= found
                assert len(found) == 32
                assert found - best <= set(ids[0, token].tolist())
            expected = scores[0].gather(-1, torch.tensor(signals.score_ids[index])).numpy()
            assert signals.scores[index] == pytest.approx(expected, abs=1e-6)
            assert signals.input_norm[index] == pytest.approx(router_input[0].norm(dim=-1).numpy(), rel=1e-5)
            for depth in range(3):
                layer_id = LAYERS[index] + depth + 1
                if layer_id not in gates:
                    assert (signals.ahead_ids[index, depth] == -1).all()
                    continue
                chosen = gates[layer_id].gate(router_input[0]).ids.numpy()
                assert np.array_equal(signals.ahead_ids[index, depth][:, :4], chosen)
                assert all(len(set(row)) == 16 for row in signals.ahead_ids[index, depth].tolist())


def test_masks_share_one_sketch():
    model = tiny_decoder()
    _, passes = trace(model, prompts=PROMPTS[:1], signals=True)
    first = passes[1]
    masks = first.signals.sketch[first.is_masked_in]
    assert len(masks) == 9
    assert (masks == masks[0]).all()
    embedding = model.word_embeddings.weight[MASK_ID].detach()
    assert masks[0] == pytest.approx((embedding @ sketch_projection(32)).numpy(), abs=1e-6)


def test_chosen_experts_are_kept_though_their_scores_are_not_the_best():
    biased = torch.linspace(1, 0, 64)[None]
    kept = best_scored(biased, torch.tensor([[60, 63, 0]]))[0].tolist()
    assert kept == [*range(30), 60, 63]


def test_without_signals_none_are_written():
    _, passes = trace(prompts=PROMPTS[:1])
    assert {item.signals for item in passes} == {None}


@pytest.mark.parametrize("fault", ["twice", "never", "other"])
def test_a_hook_count_that_is_off_is_refused(fault):
    model = tiny_decoder()
    observation = Observation(model, False)
    recorder = Recorder(LAYERS, observation, Passes())
    observed = ObservedModel(model, observation, 16)
    hook = observation.moe_layer

    def broken(layer_id, *values):
        if layer_id == 2 and fault == "never":
            return
        if layer_id == 2 and fault == "twice":
            hook(layer_id, *values)
        hook(7 if layer_id == 2 and fault == "other" else layer_id, *values)

    observation.moe_layer = broken
    fired = {"twice": "[1, 2, 2, 3]", "never": "[1, 3]", "other": "[1, 7, 3]"}[fault]
    message = f"request 0, block -1, iteration 0: hooks of MoE layers {fired} and 1 of the embedding fired, must be [1, 2, 3] and 1"
    with pytest.raises(TraceError) as raised:
        decode_prompts(observed, [[1, 2]], settings(), recorder.record)
    assert str(raised.value) == message


def test_a_model_that_only_predicts_masks_is_refused():
    model = tiny_decoder()
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(MASK_ID), 1e4)
    )
    with pytest.raises(DecodeError, match="request 0, block 0"):
        trace(model)


def test_tracing_twice_gives_the_same():
    _, first = trace(prompts=PROMPTS[:1], signals=True)
    _, second = trace(prompts=PROMPTS[:1], signals=True)
    for one, other in zip(first, second, strict=True):
        for name in ("expert_ids", "gates", "accepted", "argmax_ids", "p_argmax", "cos_layer_output"):
            assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name


def test_metadata_says_how_the_trace_was_made():
    model = tiny_decoder()
    provenance = Provenance("abc", 1234, {"a.safetensors": "def"}, {"minutes": 4.5, "steps": 7})
    metadata = trace_metadata(model, settings(), "proxy-tiny", provenance, "float16", signals=True)
    assert metadata.source == "proxy:proxy-tiny"
    assert metadata.shape == CONFIG.shape()
    assert metadata.decode == {
        "loop": "dinfer",
        "block_length": 16,
        "threshold": 0.2,
        "gen_length": 24,
        "early_stop": True,
        "temperature": 0.0,
        "batch": 1,
    }
    assert metadata.details["checkpoint_hash"] == "abc"
    assert (metadata.details["mask_id"], metadata.details["eos_id"]) == (MASK_ID, EOS_ID)
    assert metadata.details["checkpoint"] == {"total_size": 1234, "shards": {"a.safetensors": "def"}}
    assert metadata.details["training"] == {"minutes": 4.5, "steps": 7}
    assert metadata.details["mask_mode"] == "strict"
    assert (metadata.details["sampler"], metadata.details["sampler_patched"]) == ("greedy argmax", False)
    assert metadata.details["dtype"] == "float32"
    assert metadata.details["sketch_seed"] == 0


def test_metadata_says_which_precision_routed():
    model = tiny_decoder().bfloat16()
    provenance = Provenance("abc", None, {}, None)
    metadata = trace_metadata(model, settings(), "llada", provenance, "float16", signals=False)
    assert metadata.source == "model:llada"
    assert [metadata.details[f"{part}dtype"] for part in ("", "router_", "expert_bias_")] == [
        "bfloat16",
        "float32",
        "float32",
    ]
    assert not metadata.details.keys() & {"training", "sketch_seed"}
    (_, first), *_ = model.moe_layers()
    first.gate.expert_bias = first.gate.expert_bias.bfloat16()
    rounded = trace_metadata(model, settings(), "llada", provenance, "float16", signals=False)
    assert rounded.details["expert_bias_dtype"] == "bfloat16, float32"
