"""The loops on a model with weights: requests side by side, masks, and what stands in the trace."""

from functools import cache
from itertools import groupby

import numpy as np
import pytest
import torch
from llada2_models import DECODER, EOS_ID, MASK_ID, tiny_decoder
from torch.nn.functional import scaled_dot_product_attention

from tracer.capture import trace_metadata, trace_prompts
from tracer.checkpoint import Provenance
from tracer.decode_settings import LOOP_NAMES, DecodeSettings
from tracer.decode_state import Window
from tracer.doctor import check
from tracer.llada2 import block_causal_mask
from tracer.observe import Observation
from tracer.observed import ObservedModel, attention_mask
from tracer.parts import split
from tracer.schema import ForwardKind, TraceError
from tracer.store import TraceWriter

SMALL = DECODER | {"num_hidden_layers": 3, "num_experts": 16, "n_group": 4, "topk_group": 2}
PROMPTS = [[5] * 3 + [9, 8, 7, 1], [3] * 8 + [4] * 4, [2, 30, 11] * 3, [12]]
LOOPS = [
    {"loop": "dinfer", "threshold": 0.2},
    {"loop": "dinfer", "threshold": 0.3, "temperature": 0.8},
    {"loop": "hf20", "threshold": 0.2},
    {"loop": "hf20", "threshold": 0.2, "sampler": "stock"},
    {"loop": "hf21", "threshold": 0.2, "edit_threshold": 0.15, "max_post_steps": 3},
    {"loop": "hf21", "threshold": 0.2, "edit_threshold": 0.15, "max_post_steps": 3, "mask_mode": "soft01"},
    {"loop": "sglang_low_confidence", "threshold": 0.2},
    {"loop": "sglang_joint_threshold", "threshold": 0.2, "edit_threshold": 0.15, "max_post_steps": 3},
    {
        "loop": "sglang_joint_threshold",
        "threshold": 0.2,
        "edit_threshold": 0.15,
        "max_post_steps": 3,
        "always_commit": False,
    },
]


class Passes(list):
    write = list.append


def settings(**changes):
    values = {"block_length": 8, "gen_length": 7, "mask_id": MASK_ID, "eos_id": EOS_ID}
    return DecodeSettings(**values | changes)


@cache
def model():
    return tiny_decoder(values=SMALL)


def trace(signals=False, **changes):
    return _trace(signals, tuple(sorted(changes.items())))


@cache
def _trace(signals, changes):
    passes = Passes()
    results = trace_prompts(model(), PROMPTS, settings(**dict(changes)), passes, signals=signals)
    return results, passes


def by_request(passes):
    parts = sorted((part for item in passes for part in split(item)), key=lambda part: int(part.requests[0]))
    return [list(of_request) for _, of_request in groupby(parts, key=lambda part: int(part.requests[0]))]


EXACT = ("requests", "blocks", "iterations", "kinds", "num_tokens", "kv_lens", "num_masked_in", "num_accepted")
TOKENS = ("positions", "token_ids_in", "is_masked_in", "argmax_ids", "accepted", "edited", "expert_ids")
CLOSE = ("p_argmax", "p_current", "gates", "cos_router_input", "cos_layer_output")


@pytest.mark.parametrize("changes", LOOPS)
def test_requests_side_by_side_are_decoded_as_if_alone(changes):
    alone, passes_alone = trace(batch=1, **changes)
    together, passes = trace(batch=3, **changes)
    assert len(passes) < len(passes_alone)
    assert [item.pass_id for item in passes] == list(range(len(passes)))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.generated_ids, one.returned_ids) == (other.generated_ids, other.returned_ids)
    for mine, others in zip(by_request(passes_alone), by_request(passes), strict=True):
        for one, other in zip(mine, others, strict=True):
            for name in EXACT + TOKENS:
                assert np.array_equal(getattr(one, name), getattr(other, name)), name
            for name in CLOSE:
                np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-5, err_msg=name)


def test_a_pass_holds_all_that_run_and_a_new_request_is_prefilled_by_itself():
    _, passes = trace(loop="dinfer", threshold=0.2, batch=3)
    sizes = [len(item.requests) for item in passes]
    assert max(sizes) == 3
    assert sizes[-1] < 3  # at the end none is left to join
    started, ended = set(), set()
    last = {int(request): item.pass_id for item in passes for request in item.requests}
    for item in passes:
        requests = set(item.requests.tolist())
        assert sorted(requests) == item.requests.tolist()
        if item.is_prefill:
            assert len(requests) == 1
            started |= requests
        else:
            assert ForwardKind.PREFILL not in item.kinds
            assert requests == started - ended
        assert len(started - ended) <= 3
        ended |= {request for request in requests if last[request] == item.pass_id}
    assert started == ended == set(range(4))
    assert len({last[request] for request in range(4)}) == 4  # they end at different times
    joined = [item.pass_id for item in passes if item.is_prefill]
    assert joined[:3] == [0, 1, 2]
    assert joined[3] > 4


def test_requests_of_one_pass_are_at_different_blocks_and_kinds():
    _, passes = trace(loop="sglang_joint_threshold", threshold=0.2, edit_threshold=0.15, batch=3)
    assert any(len(set(item.blocks.tolist())) > 1 for item in passes)
    assert any(len(set(item.kinds.tolist())) > 1 for item in passes)
    assert all(item.kind == min(item.kinds) for item in passes)


def test_32_requests_of_single_positions():
    prompts = [[1 + i] * (i % 2) for i in range(32)]
    texts = {}
    for batch in (1, 32):
        passes = Passes()
        chosen = settings(loop="sglang_low_confidence", block_length=1, gen_length=1, batch=batch)
        results = trace_prompts(model(), prompts, chosen, passes)
        texts[batch] = [result.token_ids.tolist() for result in results]
        assert max(len(item.requests) for item in passes) == batch
    assert texts[1] == texts[32]


def test_signals_of_a_padded_batch():
    """Windows of different lengths, so that there are pads, which no table may hold."""
    _, passes_alone = trace(signals=True, loop="hf20", threshold=0.2, batch=1)
    _, passes = trace(signals=True, loop="hf20", threshold=0.2, batch=3)
    assert any(len(set(item.num_tokens.tolist())) > 1 for item in passes)
    for mine, others in zip(by_request(passes_alone), by_request(passes), strict=True):
        for one, other in zip(mine, others, strict=True):
            assert np.array_equal(one.signals.ahead_ids, other.signals.ahead_ids)
            np.testing.assert_allclose(one.signals.sketch, other.signals.sketch, atol=1e-5)
            np.testing.assert_allclose(one.signals.input_norm, other.signals.input_norm, rtol=1e-5)


@pytest.mark.parametrize("changes", LOOPS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_doctor_finds_nothing(tmp_path, changes, batch):
    chosen = settings(batch=batch, **changes)
    metadata = trace_metadata(model(), chosen, "tiny", Provenance("abc", 1, {}, None), "float16", signals=False)
    with TraceWriter(tmp_path / "a.trace", metadata) as writer:
        for item in trace(batch=batch, **changes)[1]:
            writer.write(item)
    report = check(tmp_path / "a.trace")
    assert report.findings == []
    assert report.metadata.decode["loop"] == changes["loop"]
    assert report.metadata.decode["batch"] == batch


@pytest.mark.parametrize("changes", [change for change in LOOPS if change["loop"] != "hf20"])
def test_l4_the_last_forward_of_a_block_routes_its_final_tokens(changes):
    """Of hf21 it is the check that edits nothing; under its soft mask what comes later changes the routing again."""
    results, passes = trace(batch=1, **changes)
    num_compared = 0
    for result, mine in zip(results, by_request(passes), strict=True):
        decoded = [part for part in mine if part.blocks[0] >= 0]
        for _, of_block in groupby(decoded, key=lambda part: int(part.blocks[0])):
            *_, last = of_block
            if last.edited.any():  # edits ran out
                continue
            assert last.num_masked_in[0] == 0
            stop = int(last.positions[-1]) + 1
            window = result.token_ids[:stop]
            assert last.token_ids_in.tolist() == window[last.positions].tolist()
            expected = routed(window, changes.get("mask_mode", "strict"))[:, last.positions]
            assert np.array_equal(np.sort(last.expert_ids), np.sort(expected))
            num_compared += 1
    assert num_compared > 3


@torch.no_grad()
def routed(token_ids, mode, block_length=8):
    """Experts [L, T, K] of a window from position 0."""
    observation = Observation(model(), False)
    tokens = torch.tensor(np.asarray(token_ids))
    allowed = block_causal_mask(len(tokens), block_length)
    mask = allowed if mode == "strict" else allowed.float()
    model()(tokens[None], torch.arange(len(tokens)), mask=mask, additive=mode == "soft01", observer=observation)
    return torch.stack([layer.ids for layer in observation.layers]).numpy()


@pytest.mark.parametrize(
    ("mode", "weights"),
    [("strict", [0.5, 0.5, 0, 0]), ("soft01", [0.36552929, 0.36552929, 0.13447071, 0.13447071])],
)
def test_m1_strict_forbids_and_soft01_adds_one(mode, weights):
    mask = attention_mask(torch.tensor([0]), torch.tensor([4]), 2, mode)
    zeros = torch.zeros(1, 1, 4, 8)  # equal scores
    found = scaled_dot_product_attention(zeros, zeros, torch.eye(4)[None, None], attn_mask=mask)[0, 0]
    np.testing.assert_allclose(found[:2], [weights] * 2, atol=1e-7)
    np.testing.assert_allclose(found[2:], np.full((2, 4), 0.25), atol=1e-7)


def run_window(token_ids, mode, block_length=8):
    observation = Observation(model(), False)
    observed = ObservedModel(model(), observation, block_length, mode)
    observed.open(0, len(token_ids))
    logits = observed.forward([Window(0, np.array(token_ids), 0, ForwardKind.DENOISE)])
    return logits.numpy(), torch.stack([layer.ids for layer in observation.layers]).numpy()


def test_m2_later_blocks_change_earlier_ones_under_soft01_only():
    window = np.arange(16) % 30
    changed = np.where(np.arange(16) == 12, 33, window)
    (strict, strict_ids), (strict_changed, strict_ids_changed) = (
        run_window(ids, "strict") for ids in (window, changed)
    )
    np.testing.assert_allclose(strict[:8], strict_changed[:8], atol=1e-5)
    assert np.array_equal(strict_ids[:, :8], strict_ids_changed[:, :8])
    (soft, soft_ids), (soft_changed, soft_ids_changed) = (run_window(ids, "soft01") for ids in (window, changed))
    assert np.abs(soft[:8] - soft_changed[:8]).max() > 1e-3
    assert not np.array_equal(soft_ids[:, :8], soft_ids_changed[:, :8])
    assert not np.allclose(soft, strict)


def test_a_mask_by_its_definition():
    rng = np.random.default_rng(0)
    for _ in range(30):
        block = int(rng.integers(1, 6))
        starts = rng.integers(0, 4, rng.integers(1, 4)) * block
        sizes = rng.integers(1, 3 * block + 1, len(starts))
        strict, soft = (
            attention_mask(torch.tensor(starts), torch.tensor(sizes), block, mode) for mode in ("strict", "soft01")
        )
        ends = starts + sizes
        seen = np.zeros((len(starts), 1, sizes.max(), ends.max()), bool)
        there = np.zeros_like(seen)
        for row in range(len(starts)):
            for i in range(sizes.max()):
                for j in range(ends[row]):
                    there[row, 0, i, j] = True
                    seen[row, 0, i, j] = j // block <= (starts[row] + i) // block
        if strict is None:
            assert soft is None
            assert seen.all()
            continue
        assert np.array_equal(strict.numpy(), seen)
        assert np.array_equal(soft.numpy(), np.where(there, seen.astype(float), -np.inf))


def test_a_window_that_leaves_a_gap_is_refused():
    observed = ObservedModel(model(), Observation(model(), False), 8)
    observed.open(4, 32)
    tokens = np.arange(8)
    observed.forward([Window(4, tokens, 0, ForwardKind.PREFILL)])
    with pytest.raises(TraceError, match=r"^request 4: forward from position 16, 0 are committed and 8 were run"):
        observed.forward([Window(4, tokens, 16, ForwardKind.DENOISE)])
    observed.forward([Window(4, tokens, 8, ForwardKind.DENOISE)])
    with pytest.raises(TraceError, match=r"^request 4: forward from position 0, 8 are committed"):
        observed.forward([Window(4, tokens, 0, ForwardKind.DENOISE)])


@pytest.mark.parametrize("loop", LOOP_NAMES)
def test_metadata_says_how_it_was_decoded(loop):
    provenance = Provenance("abc", None, {}, None)
    metadata = trace_metadata(model(), settings(loop=loop), "tiny", provenance, "float16", signals=False)
    assert metadata.decode == settings(loop=loop).facts()
    assert metadata.seed is None
    assert metadata.details["mask_mode"] == "strict"
    assert metadata.details["sampler"] == "greedy argmax"
    assert metadata.details["sampler_patched"] == (loop == "hf20")


def test_metadata_of_what_stock_code_does():
    provenance = Provenance("abc", None, {}, None)
    for changes, mode, seed in (
        ({"loop": "hf21", "mask_mode": "soft01"}, "soft01", None),
        ({"loop": "hf20", "sampler": "stock", "seed": 5}, "strict", 5),
        ({"loop": "hf20", "temperature": 0.5}, "strict", 0),
    ):
        metadata = trace_metadata(model(), settings(**changes), "tiny", provenance, "float16", signals=False)
        assert metadata.details["mask_mode"] == mode
        assert metadata.seed == seed
        assert metadata.details["sampler"] == ("greedy argmax" if seed is None else "drawn")
        assert metadata.details["sampler_patched"] is False
