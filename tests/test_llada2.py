import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llada2_models import FLASH, MINI, TINY, Recorder, config, tiny_model

from tracer.llada2 import Attention, KVCache, LLaDA2, RmsNorm, block_causal_mask, rotary_angles, rotate
from tracer.llada2_config import LLaDA2Config
from tracer.moe import Experts, Mlp, MoeLayer, group_values, route
from tracer.schema import TraceError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def gate(z, bias=0.0, *, groups, keep, k):
    scores = torch.tensor([z]).sigmoid()
    bias = torch.as_tensor(bias).expand(len(z))
    ids, weights, *_ = route(scores, bias, num_groups=groups, top_groups=keep, top_k=k)
    return ids[0].tolist(), (2.5 * weights[0]).tolist()


def tokens(seed, batch, length, vocab=TINY["vocab_size"]):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, (batch, length)))


# ---- gate ----


def test_g1_groups_are_worth_their_two_best():
    z = [4.0, -4.0, 1.0, 1.0, 0.5, 0.5, -1.0, -1.0]
    values = group_values(torch.tensor([z]).sigmoid(), 4)[0]
    assert values.tolist() == pytest.approx([1.0, 1.46212, 1.24492, 0.53788], abs=1e-5)
    ids, weights = gate(z, groups=4, keep=2, k=2)
    assert set(ids) == {2, 3}
    assert weights == pytest.approx([1.25, 1.25])
    assert set(gate(z, groups=4, keep=4, k=2)[0]) in ({0, 2}, {0, 3})  # every group open


def test_g2_order_and_weights():
    ids, weights = gate([2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -0.5, -1.5], groups=2, keep=1, k=2)
    assert ids == [0, 1]
    assert weights == pytest.approx([1.366123, 1.133877], abs=1e-6)


def test_g3_bias_chooses_but_does_not_weigh():
    z = [2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -0.5, -1.5]
    ids, weights = gate(z, [0, 0, 0, 0, 0.3, 0.3, 0, 0], groups=2, keep=1, k=2)
    assert ids == [4, 5]
    assert weights == pytest.approx([1.419367, 1.080633], abs=1e-6)


def test_g4_distinct_experts_of_at_most_four_groups():
    rng = np.random.default_rng(4)
    scores = torch.from_numpy(rng.normal(size=(200, 256))).float().sigmoid()
    bias = torch.from_numpy(rng.normal(0, 0.1, 256)).float()
    ids, weights, _, biased = route(scores, bias, num_groups=8, top_groups=4, top_k=8)
    for row in ids.tolist():
        assert len(set(row)) == 8
        assert len({i // 32 for i in row}) <= 4
    assert (2.5 * weights.sum(-1) - 2.5).abs().max() < 1e-5
    chosen = biased.gather(-1, ids)
    assert (chosen[:, :-1] >= chosen[:, 1:]).all()


def test_gate_ties_go_to_the_lower_id():
    ids = route(torch.full((1, 16), 0.5), torch.zeros(16), num_groups=4, top_groups=2, top_k=5).ids
    assert ids[0].tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_route_agrees_with_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    scores = rng.random((3, 12)).astype(np.float32)
    bias = rng.normal(0, 0.3, 12).astype(np.float32)
    ids, weights, *_ = route(torch.from_numpy(scores), torch.from_numpy(bias), num_groups=4, top_groups=2, top_k=4)
    for t in range(3):
        biased = scores[t] + bias
        worth = [sorted(biased[g : g + 3])[-2:] for g in range(0, 12, 3)]
        best = sorted(range(4), key=lambda g: -sum(worth[g]))[:2]
        expected = sorted((e for e in range(12) if e // 3 in best), key=lambda e: -biased[e])[:4]
        assert ids[t].tolist() == expected
        assert weights[t].numpy() == pytest.approx(scores[t, expected] / scores[t, expected].sum(), rel=1e-5)


# ---- parts ----


def test_r1_inverse_frequencies():
    cos, sin = rotary_angles(torch.tensor([1]), 64, 600000)
    assert cos.shape == (1, 32)
    frequencies = torch.atan2(sin, cos)[0]
    assert frequencies[[0, 1, 2]].tolist() == pytest.approx([1, 0.6598310879, 0.4353770645], abs=1e-6)
    assert frequencies[31].item() == pytest.approx(2.5258990e-6, rel=1e-5)


def test_r2_angles_and_the_dimensions_that_stay():
    cos, sin = rotary_angles(torch.tensor([1, 32]), 64, 600000)
    assert cos[:, 1].tolist() == pytest.approx([0.7900957831, -0.6398035], abs=1e-5)
    assert sin[:, 1].tolist() == pytest.approx([0.6129834040, 0.7685385], abs=1e-5)
    heads = torch.from_numpy(np.random.default_rng(2).normal(size=(1, 3, 2, 128))).float()
    turned = rotate(heads, cos, sin)
    assert torch.equal(turned[..., 64:], heads[..., 64:])
    # dimension i pairs with i + 32, not with its neighbour
    assert torch.allclose(turned[0, :, 1, 1], heads[0, :, 1, 1] * cos[1, 1] - heads[0, :, 1, 33] * sin[1, 1])
    assert torch.allclose(turned[0, :, 1, 33], heads[0, :, 1, 33] * cos[1, 1] + heads[0, :, 1, 1] * sin[1, 1])


def test_n1_rms_norm():
    assert RmsNorm(2, eps=1e-30)(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.8485281, 1.1313708])


def test_rms_norm_rounds_before_the_weight():
    norm = RmsNorm(64, eps=1e-6).to(torch.bfloat16)
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=64)).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(rng.normal(1, 0.1, 64)))
        wide = x.float() / (x.float().square().mean() + 1e-6).sqrt()
        assert torch.equal(norm(x), norm.weight * wide.bfloat16())


def test_e1_swiglu():
    mlp = Mlp(1, 1)
    with torch.no_grad():
        for linear, value in ((mlp.gate_proj, 1.0), (mlp.up_proj, 2.0), (mlp.down_proj, 1.0)):
            linear.weight.fill_(value)
        assert mlp(torch.ones(1)).item() == pytest.approx(1.4621172)


@torch.no_grad()
def test_m1_strict_mask_forbids():
    attention = Attention(config(), 0)
    rows, dense, head_dim = attention.query_key_value.weight, attention.dense.weight, TINY["head_dim"]
    rows.zero_()  # queries and keys of 0, so that all scores are equal
    dense.zero_()
    first_value = (TINY["num_attention_heads"] + TINY["num_key_value_heads"]) * head_dim
    rows[first_value : first_value + head_dim, :head_dim] = torch.eye(head_dim)
    dense[:head_dim, :head_dim] = torch.eye(head_dim)
    x = torch.eye(4, TINY["hidden_size"]).unsqueeze(0)  # the value of each token is a dimension of its own
    out = attention(x, *rotary_angles(torch.arange(4), head_dim // 2, 600000), block_causal_mask(4, 2), None)
    assert out[0, :, :4].tolist() == [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0.25] * 4]


def test_block_causal_mask_by_its_definition():
    mask = block_causal_mask(10, 4)
    assert mask.tolist() == [[j // 4 <= i // 4 for j in range(10)] for i in range(10)]


def test_t2_fused_rows_are_all_queries_then_keys_then_values():
    attention = Attention(config(MINI), 0)
    rows = attention.query_key_value.weight
    assert rows.shape == (2048 + 512 + 512, 2048)
    with torch.no_grad():
        rows.zero_()
        rows[:, 0] = torch.repeat_interleave(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2048, 512, 512]))
        x = torch.zeros(1, 2, 2048)
        x[..., 0] = 1
        heads = attention.split(x)
    for found, num_heads, value in zip(heads, (16, 4, 4), (1.0, 2.0, 3.0), strict=True):
        assert found.shape == (1, num_heads, 2, 128)
        assert (found == value).all()


def naive_attention(attention, x, positions, mask):
    """One request, [T, H], in fp64: each query head, query and key on its own."""
    head_dim, (num_heads, num_kv, _) = attention.head_dim, attention.heads
    weight = attention.query_key_value.weight.double()
    norms = {"query": attention.query_layernorm.weight.double(), "key": attention.key_layernorm.weight.double()}
    half = head_dim // 4

    def head(row, t, norm=None):
        vector = weight[row * head_dim : (row + 1) * head_dim] @ x[t].double()
        if norm is None:
            return vector
        vector = vector / (vector.square().mean() + 1e-6).sqrt() * norms[norm]
        turned = vector.clone()
        for i in range(half):
            angle = positions[t] * 600000 ** (-i / half)
            c, s = math.cos(angle), math.sin(angle)
            turned[i] = vector[i] * c - vector[i + half] * s
            turned[i + half] = vector[i + half] * c + vector[i] * s
        return turned

    contexts = torch.zeros(len(x), num_heads * head_dim, dtype=torch.float64)
    for h in range(num_heads):
        kv = h // (num_heads // num_kv)
        for t in range(len(x)):
            seen = [s for s in range(len(x)) if mask[t][s]]
            query = head(h, t, "query")
            logits = torch.stack([query @ head(num_heads + kv, s, "key") for s in seen]) / math.sqrt(head_dim)
            values = torch.stack([head(num_heads + num_kv + kv, s) for s in seen])
            contexts[t, h * head_dim : (h + 1) * head_dim] = logits.softmax(0) @ values
    return contexts @ attention.dense.weight.double().T


def test_attention_agrees_with_explicit_softmax():
    attention = tiny_model(3).layers[2].attention
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 7, TINY["hidden_size"]))).float()
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2])  # as in training: a noisy copy behind a clean one
    mask = block_causal_mask(7, 3)
    with torch.no_grad():
        cos, sin = rotary_angles(positions, 8, 600000)
        found = attention(x, cos, sin, mask, None)[0]
        expected = naive_attention(attention, x[0], positions.tolist(), mask.tolist())
    assert (found - expected).abs().max() < 1e-5


def naive_moe(layer, x):
    """[N, H], in fp64: each token and each of its experts on its own."""

    def swiglu(token, gate_rows, up_rows, down):
        z = gate_rows.double() @ token
        return down.double() @ (z / (1 + (-z).exp()) * (up_rows.double() @ token))

    out = []
    for token, ids, weights in zip(x.double(), *layer.gate(x)[:2], strict=True):
        shared = layer.shared_experts
        total = swiglu(token, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
            gate_rows, up_rows = layer.experts.w13[expert].chunk(2)
            total = total + 2.5 * weight * swiglu(token, gate_rows, up_rows, layer.experts.w2[expert])
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_moe_agrees_with_a_plain_loop(num_tokens):
    (_, layer), *_ = tiny_model(5).moe_layers()
    x = torch.from_numpy(np.random.default_rng(5).normal(size=(1, num_tokens, TINY["hidden_size"]))).float()
    with torch.no_grad():
        assert (layer(x)[0][0] - naive_moe(layer, x[0])).abs().max() < 1e-5


def test_moe_output_of_a_token_does_not_depend_on_the_batch():
    (_, layer), *_ = tiny_model(6).moe_layers()
    x = torch.from_numpy(np.random.default_rng(6).normal(size=(1, 20, TINY["hidden_size"]))).float()
    with torch.no_grad():
        whole, routing = layer(x)
        for t in range(20):
            alone, own = layer(x[:, t : t + 1])
            assert torch.equal(own.ids[0], routing.ids[t])
            assert (alone[0, 0] - whole[0, t]).abs().max() < 1e-5
        assert torch.equal(layer(x)[0], whole)


def test_expert_gradients_agree_with_a_plain_loop():
    (_, layer), *_ = tiny_model(7).moe_layers()
    x = torch.from_numpy(np.random.default_rng(7).normal(size=(9, TINY["hidden_size"]))).float().requires_grad_()
    parameters = [x, *layer.parameters()]
    found = torch.autograd.grad(layer(x.unsqueeze(0))[0].square().sum(), parameters)
    expected = torch.autograd.grad(naive_moe(layer, x).square().sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0.1
        assert (one - other).abs().max() < 1e-5 * other.abs().max()


def test_cast_leaves_expert_bias_alone():
    model = tiny_model(8)
    before = {i: mlp.gate.expert_bias.clone() for i, mlp in model.moe_layers()}
    model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert list(before) == [1, 2, 3]
    for i, mlp in model.moe_layers():
        assert torch.equal(mlp.gate.expert_bias, before[i])
        assert mlp.gate.weight.dtype == torch.bfloat16


def test_gate_computes_in_fp32_under_autocast():
    (_, layer), *_ = tiny_model(9).moe_layers()
    x = torch.from_numpy(np.random.default_rng(9).normal(size=(5, TINY["hidden_size"]))).float()
    with torch.no_grad():
        expected = layer.gate.scores(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer.gate.scores(x), expected)


# ---- whole model ----


@torch.no_grad()
def test_m2_later_blocks_are_not_seen():
    model = tiny_model(10)
    ids = tokens(10, 2, 12)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY["vocab_size"]
    mask = block_causal_mask(12, 4)
    before, after = Recorder(), Recorder()
    logits = model(ids, torch.arange(12), mask=mask, observer=before)
    moved = model(changed, torch.arange(12), mask=mask, observer=after)
    assert (logits - moved)[:, :8].abs().max() < 1e-5
    assert (logits - moved)[:, 8:].abs().max() > 0.1
    assert len(before.layers) == 3
    for one, other in zip(before.layers, after.layers, strict=True):
        assert torch.equal(one[2].ids[:, :8], other[2].ids[:, :8])


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
def test_m3_block_on_committed_cache_equals_the_full_window(batch):
    model = tiny_model(11)
    ids = tokens(11, batch, 16)
    positions = torch.arange(16)
    full, parts = Recorder(), []
    expected = model(ids, positions, mask=block_causal_mask(16, 4), observer=full)
    cache = model.new_cache(batch, 16)
    logits = [model(ids[:, :8], positions[:8], mask=block_causal_mask(8, 4), cache=cache)]
    for start in (8, 12):
        cache.length = start
        window = slice(start, start + 4)
        stale = (ids[:, window] + 1) % TINY["vocab_size"]
        model(stale, positions[window], cache=cache)  # a forward that is not committed leaves nothing behind
        parts.append(Recorder())
        logits.append(model(ids[:, window], positions[window], cache=cache, observer=parts[-1]))
        for whole, part in zip(full.layers, parts[-1].layers, strict=True):
            assert torch.equal(whole[2].ids[:, window], part[2].ids)
    assert [len(part.layers) for part in parts] == [3, 3]
    assert (torch.cat(logits, dim=1) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_mask_covers_committed_positions_too():
    model = tiny_model(12)
    ids = tokens(12, 1, 12)
    positions = torch.arange(12)
    mask = block_causal_mask(12, 4)
    expected = model(ids, positions, mask=mask)
    cache = model.new_cache(1, 12)
    model(ids[:, :4], positions[:4], cache=cache)
    cache.length = 4
    rest = model(ids[:, 4:], positions[4:], mask=mask[4:], cache=cache)
    assert (rest - expected[:, 4:]).abs().max() < 1e-5


@torch.no_grad()
def test_positions_of_each_request_and_requests_apart():
    model = tiny_model(13)
    ids = tokens(13, 2, 6)
    positions = torch.stack([torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2])])
    both = model(ids, positions)
    for row in range(2):
        alone = model(ids[row : row + 1], positions[row])
        assert (alone[0] - both[row]).abs().max() < 1e-5
    assert (model(ids, torch.arange(6))[1] - both[1]).abs().max() > 0.01


@torch.no_grad()
def test_observer_sees_every_moe_layer_once():
    model = tiny_model(14)
    ids = tokens(14, 2, 5)
    seen = Recorder()
    logits = model(ids, torch.arange(5), observer=seen)
    assert logits.shape == (2, 5, TINY["vocab_size"])
    assert logits.dtype == torch.float32
    assert torch.equal(seen.embeddings[0], model.word_embeddings(ids))
    assert [layer[0] for layer in seen.layers] == [1, 2, 3]
    for layer_id, router_input, (chosen, weights, scores, biased), output in seen.layers:
        assert router_input.shape == output.shape == (2, 5, TINY["hidden_size"])
        assert chosen.shape == weights.shape == (2, 5, 4)
        assert (weights.sum(-1) - 1).abs().max() < 1e-6
        gate = model.layers[layer_id].mlp.gate
        again = gate.scores(router_input)
        assert (again - scores).abs().max() < 1e-6
        assert (again + gate.expert_bias - biased).abs().max() < 1e-6
    last = model.lm_head(model.norm(seen.layers[-1][-1]))
    assert torch.equal(last, logits)


def test_scores_of_a_gate():
    gate = tiny_model(15).layers[3].mlp.gate
    x = torch.ones(2, 3, TINY["hidden_size"])
    assert torch.allclose(gate.scores(x), torch.sigmoid(x @ gate.weight.T))


def test_every_parameter_gets_a_gradient():
    model = tiny_model(16)
    model(tokens(16, 4, 16), torch.arange(16)).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_fresh_weights():
    torch.manual_seed(0)
    model = LLaDA2(config(initializer_range=0.05))
    assert model.layers[1].mlp.experts.w13.std().item() == pytest.approx(0.05, rel=0.05)
    assert (model.norm.weight == 1).all()
    assert (model.layers[1].mlp.gate.expert_bias == 0).all()
    logits = model(tokens(0, 1, 4), torch.arange(4))
    assert logits.isfinite().all()


@torch.no_grad()
def test_cache_holds_what_is_committed_and_refuses_more():
    model = tiny_model(17)
    ids = tokens(17, 1, 8)
    cache = model.new_cache(1, 8)
    model(ids, torch.arange(8), cache=cache)
    cache.length = 8
    with pytest.raises(TraceError, match=r"^layer 0: 8 committed and 1 new positions, the cache holds 8$"):
        model(ids[:, :1], torch.tensor([8]), cache=cache)
    cache.length = 4
    again = model(ids[:, 4:], torch.arange(4, 8), cache=cache)
    fresh = model(ids, torch.arange(8), mask=None)
    assert (again - fresh[:, 4:]).abs().max() < 1e-5
    with pytest.raises(TraceError, match=r"^cache of 65 positions: the model allows 1 to 64$"):
        model.new_cache(1, 65)


def test_cache_needs_no_grad():
    model = tiny_model(18)
    with pytest.raises(TraceError, match=r"no_grad"):
        model(tokens(18, 1, 4), torch.arange(4), cache=model.new_cache(1, 4))


def test_forward_refuses_a_mask_of_numbers():
    model = tiny_model(19)
    with pytest.raises(TraceError, match=r"^attention mask of torch.float32: must be bool"):
        model(tokens(19, 1, 4), torch.arange(4), mask=torch.ones(4, 4))


@pytest.mark.parametrize(("values", "total"), [(MINI, 16_255_638_528), (FLASH, 102_889_697_280)])
def test_c1_parameters_of_the_modules(values, total):
    with torch.device("meta"):
        assert LLaDA2(config(values)).num_parameters() == total


@pytest.mark.parametrize(
    ("values", "layers", "expert_bytes", "kv_bytes"), [(MINI, 19, 6_291_456, 40_960), (FLASH, 31, 25_165_824, 65_536)]
)
def test_c2_c3_layers_expert_bytes_and_cache_bytes(values, layers, expert_bytes, kv_bytes):
    shape = config(values).shape()
    assert shape.layer_ids == tuple(range(1, layers + 1))
    assert shape.expert_bytes() == expert_bytes
    assert shape.gate_scale == 2.5
    one = KVCache(config(values), 1, 1, dtype=torch.bfloat16, device="meta")
    assert one.storage.nbytes == kv_bytes


# ---- config ----


def test_config_survives_its_own_file():
    for values in (MINI, FLASH, TINY):
        assert LLaDA2Config.from_dict(config(values).to_dict(), "config.json") == config(values)


def test_config_of_the_flash_preview():
    """It names the dtype as before, leaves out two keys, and has its own model type."""
    values = config(FLASH, max_position_embeddings=16384).to_dict()
    for key in ("dtype", "sliding_window", "use_qk_norm"):
        values.pop(key, None)
    values |= {"torch_dtype": "bfloat16", "model_type": "llada2_moe_veomni"}
    assert LLaDA2Config.from_dict(values, "config.json").hidden_size == 4096


@pytest.mark.parametrize("key", [*MINI, "use_bias", "score_function", "rope_scaling", "norm_topk_prob", "router_dtype"])
def test_missing_config_key_is_named(key):
    values = config().to_dict()
    del values[key]
    with pytest.raises(TraceError, match=rf"^dir/config.json: missing key {key}$"):
        LLaDA2Config.from_dict(values, "dir/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 1, "aux": 2}, "unknown keys aux, num_nextn_predict_layers"),
        ({"expert_capacity": 48}, "key expert_capacity is block-level routing (LLaDA2.2); only LLaDA2.0 and 2.1 are read"),
        ({"block_size": 32}, "key block_size is block-level routing (LLaDA2.2); only LLaDA2.0 and 2.1 are read"),
        ({"use_bias": True}, "use_bias True: this architecture allows only False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': this architecture allows only 'silu'"),
        ({"score_function": "softmax"}, "score_function 'softmax': this architecture allows only 'sigmoid'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling {'type': 'yarn'}: this architecture allows only None"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1: this architecture allows only True"),
        ({"use_qk_norm": False}, "use_qk_norm False: this architecture allows only True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True: this architecture allows only False"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1: this architecture allows only 0.0"),
        ({"model_type": "sdar_moe"}, "model_type 'sdar_moe': this architecture allows only 'llada2_moe' or 'llada2_moe_veomni'"),
        ({"rotary_dim": 16}, "rotary_dim 16: head_dim and partial_rotary_factor give 8"),
        ({"num_experts": "16"}, "num_experts '16': must be an integer of at least 1"),
        ({"rope_theta": None}, "rope_theta None: must be a finite number above 0"),
        ({"vocab_size": True}, "vocab_size True: must be an integer of at least 1"),
        ({"hidden_size": 0}, "hidden_size 0: must be an integer of at least 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps 0.0: must be a finite number above 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps nan: must be a finite number above 0"),
        ({"n_group": 3}, "n_group 3: must divide num_experts 16 into groups of at least 2"),
        ({"n_group": 16}, "n_group 16: must divide num_experts 16 into groups of at least 2"),
        ({"topk_group": 5}, "topk_group 5: must be at most n_group 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9: must be at most 8, the experts of topk_group 2 groups"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3: must divide num_attention_heads 4"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace 4: must leave an MoE layer among num_hidden_layers 4"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3: must rotate an even number of the 16 dimensions of a head"),
    ],
)  # fmt: skip
def test_config_faults_are_named(changes, message):
    with pytest.raises(TraceError) as error:
        LLaDA2Config.from_dict(config().to_dict() | changes, "config.json")
    assert str(error.value) == f"config.json: {message}"


# ---- CUDA ----


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("num_tokens", [1, 32, 500])
def test_grouped_product_agrees_with_the_loop(num_tokens, monkeypatch):
    rng = np.random.default_rng(num_tokens)
    sizes = config(MINI, hidden_size=256, moe_intermediate_size=128)
    layer = MoeLayer(sizes, torch.float32).cuda()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.from_numpy(rng.normal(size=(1, num_tokens, 256))).float().cuda().requires_grad_()

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x)[0]
        return out, *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])

    grouped = run()
    monkeypatch.setattr(Experts, "_can_group", lambda self, rows: False)
    for one, other in zip(grouped, run(), strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.gpu
@needs_cuda
@torch.no_grad()
def test_cuda_agrees_with_cpu_in_fp32():
    model = tiny_model(20)
    ids = tokens(20, 2, 12)
    mask = block_causal_mask(12, 4)
    expected, found = Recorder(), Recorder()
    logits = model(ids, torch.arange(12), mask=mask, observer=expected)
    model.cuda()
    cache = model.new_cache(2, 12)
    model(ids[:, :8].cuda(), torch.arange(8).cuda(), mask=mask[:8, :8].cuda(), cache=cache)
    cache.length = 8
    block = model(ids[:, 8:].cuda(), torch.arange(8, 12).cuda(), cache=cache, observer=found)
    assert (block.cpu() - logits[:, 8:]).abs().max() < 1e-4
    for one, other in zip(expected.layers, found.layers, strict=True):
        assert torch.equal(one[2].ids[:, 8:], other[2].ids.cpu())


def test_compiled_routing_breaks_ties_as_the_plain_one():
    scores = torch.randint(0, 12, (64, 32), generator=torch.Generator().manual_seed(0)) / 16
    sizes = {"num_groups": 8, "top_groups": 4, "top_k": 8}
    plain = route(scores, torch.zeros(32), **sizes)
    compiled = torch.compile(route, backend="aot_eager", fullgraph=True)(scores, torch.zeros(32), **sizes)
    assert torch.equal(plain.ids, compiled.ids)
    assert torch.equal(plain.weights, compiled.weights)
