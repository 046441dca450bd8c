"""Synthetic traces show what the paper prints, and of what is assumed only as much as they are told to."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from experiments.profiles import load_shape
from tracer import doctor, locality
from tracer.schema import ForwardKind, ModelShape, TraceError
from tracer.store import TraceReader, TraceWriter
from tracer.synthetic import SyntheticSettings, SyntheticTrace
from tracer.synthetic_decode import DecodeScript, script_request
from tracer.synthetic_router import RouterShape, choose

SMALL = ModelShape(tuple(range(1, 7)), 64, 4, hidden=8, expert_intermediate=4, vocab=97)


def small(**changes):
    """A small model: 6 layers of 64 experts, blocks of 8."""
    settings = {
        "shape": SMALL,
        "num_groups": 1,
        "top_groups": 1,
        "activated": 18.0,
        "num_requests": 6,
        "script": DecodeScript(block_length=8, gen_length=64, prompt_length=12, vocab=97),
    }
    return SyntheticTrace(SyntheticSettings(**settings | changes))


@cache
def llada2(name, seed=0):
    settings = SyntheticSettings(shape=load_shape(name), num_requests=4, seed=seed)
    trace = SyntheticTrace(settings)
    return trace, list(trace)


def sets_of(passes, num_experts=64):
    return list(locality.denoise_sets(passes, num_experts))


@pytest.mark.parametrize(("name", "activated"), [("llada2.0-mini", 60), ("llada2.0-flash", 90)])
def test_the_printed_numbers_come_out(name, activated):
    sets = sets_of(llada2(name)[1], 256)
    by_layer = locality.activated_per_layer(sets)
    assert by_layer.mean() == pytest.approx(activated, rel=0.02)
    within, across = locality.within_blocks(sets), locality.across_blocks(sets)
    assert 0.85 <= within.mean_overlap <= 0.9
    assert within.mean_overlap == pytest.approx(0.875, abs=0.01)
    assert across.mean_overlap == pytest.approx(0.67, abs=0.02)
    assert across.mean_overlap > 0.65
    by_gap = [locality.within_blocks(sets, gap).mean_overlap for gap in (1, 2, 3, 4)]
    assert by_gap == sorted(by_gap, reverse=True)  # "gradually decreases as the iteration gap grows"


def test_targets_hold_with_everything_that_is_assumed_turned_up():
    sets = sets_of(small(layer_heterogeneity=0.6, confidence_coupling=3.0, request_share=0.7))
    assert locality.activated_per_layer(sets).mean() == pytest.approx(18, rel=0.03)
    assert locality.within_blocks(sets).mean_overlap == pytest.approx(0.875, abs=0.015)
    assert locality.across_blocks(sets).mean_overlap == pytest.approx(0.67, abs=0.03)


def test_layers_are_alike_unless_told_otherwise():
    spreads = []
    for heterogeneity in (0, 0.2, 0.8):
        by_layer = locality.activated_per_layer(sets_of(small(layer_heterogeneity=heterogeneity)))
        assert by_layer.mean() == pytest.approx(18, rel=0.03)
        spreads.append(by_layer.std())
    assert spreads[0] < 0.7  # of single forwards it is 1.8
    assert spreads == sorted(spreads)
    assert spreads[1] > 2 * spreads[0]


def test_routing_does_not_follow_confidence_unless_told_to():
    correlations = []
    for coupling in (0, 1, 4):
        confidence, kept = [], []
        passes = list(small(confidence_coupling=coupling, num_requests=12))
        for before, now in zip(passes, passes[1:], strict=False):
            if (before.kinds[0], now.kinds[0], now.iterations[0] > 0) == (1, 1, True):
                same = (before.expert_ids[..., :, None] == now.expert_ids[..., None, :]).any(-1)  # [L, T, K]
                kept.append(same.mean((0, 2)))
                confidence.append(before.p_argmax)
        correlations.append(np.corrcoef(np.concatenate(confidence), np.concatenate(kept))[0, 1])
    assert abs(correlations[0]) < 0.05
    assert correlations == sorted(correlations)
    assert correlations[1] > 0.2


def test_requests_are_alike_unless_told_otherwise():
    floors = []
    for share in (0, 0.5, 1):
        sets = sets_of(small(request_share=share))
        floors.append(locality.between_requests(sets).mean_overlap)
        assert locality.across_blocks(sets).mean_overlap == pytest.approx(0.67, abs=0.03)
    assert floors == sorted(floors, reverse=True)
    chance = locality.activated_per_layer(sets).mean() / 64
    assert floors[-1] == pytest.approx(chance, abs=0.03)


def test_other_targets_are_met_and_are_no_longer_the_papers():
    trace = small(activated=12.0, overlap=0.8, boundary_overlap=0.75)
    sets = sets_of(trace)
    assert locality.activated_per_layer(sets).mean() == pytest.approx(12, rel=0.03)
    assert locality.within_blocks(sets).mean_overlap == pytest.approx(0.8, abs=0.015)
    assert locality.across_blocks(sets).mean_overlap == pytest.approx(0.75, abs=0.03)
    assert trace.metadata.details["from_paper"] == {}
    assert trace.metadata.details["assumed"]["overlap"] == 0.8


def test_metadata_says_what_is_printed_and_what_is_assumed():
    metadata = llada2("llada2.0-flash")[0].metadata
    assert metadata.source == "synthetic:drifting-router"
    printed = metadata.details["from_paper"]
    assert {name: entry["value"] for name, entry in printed.items()} == {
        "activated": 90,
        "overlap": 0.875,
        "boundary_overlap": 0.67,
    }
    assumed = metadata.details["assumed"]
    assert not set(assumed) & set(printed)
    assert {"layer_heterogeneity", "confidence_coupling", "request_share", "accept_ratio", "gates"} <= set(assumed)
    shape = load_shape("llada2.0-flash")
    other = SyntheticSettings(shape=shape, overlap=0.95, activated=80)
    assert [other.is_printed(name) for name in ("activated", "overlap", "boundary_overlap")] == [False, False, True]
    assert not SyntheticSettings(shape=shape, activated=90, script=DecodeScript(block_length=32)).is_printed("overlap")


def test_the_seed_decides_everything():
    first, again, other = small(num_requests=2), small(num_requests=2), small(num_requests=2, seed=1)
    assert first.metadata == again.metadata
    for one, two in zip(first, again, strict=True):
        assert np.array_equal(one.expert_ids, two.expert_ids)
        assert np.array_equal(one.gates, two.gates)
        assert np.array_equal(one.p_argmax, two.p_argmax)
    assert all(np.array_equal(one.expert_ids, two.expert_ids) for one, two in zip(first, first, strict=True))
    assert not np.array_equal(next(iter(first)).expert_ids, next(iter(other)).expert_ids)


@pytest.mark.parametrize(
    ("gate_dtype", "block_length", "activated"), [("float32", 1, 4), ("float16", 4, 12), ("uint8", 16, 33)]
)
def test_the_doctor_finds_nothing(tmp_path, gate_dtype, block_length, activated):
    # prompts from 3 to 9 tokens: some are shorter than a block, some end within one
    script = DecodeScript(block_length=block_length, gen_length=32, prompt_length=6, vocab=97)
    trace = small(script=script, activated=activated, boundary_overlap=0.7, gate_dtype=gate_dtype, num_requests=4)
    with TraceWriter(tmp_path / "t.trace", trace.metadata) as writer:
        for item in trace:
            writer.write(item)
    report = doctor.check(tmp_path / "t.trace")
    assert report.ok
    assert not report.findings
    assert report.num_passes == trace.num_passes
    reader = TraceReader(tmp_path / "t.trace")
    assert replace(reader.metadata, content_hash="") == trace.metadata


def test_an_input_that_did_not_change_is_routed_as_it_was():
    script = DecodeScript(block_length=8, gen_length=64, prompt_length=12, accept_ratio=1.0, vocab=97)
    passes = list(small(script=script))
    repeated = [
        (a, b) for a, b in zip(passes, passes[1:], strict=False) if a.kinds[0] == b.kinds[0] == ForwardKind.IDLE
    ]
    changed = [(a, b) for a, b in zip(passes, passes[1:], strict=False) if b.iterations[0] and a.accepted.any()]
    assert changed
    assert all(np.array_equal(a.expert_ids, b.expert_ids) for a, b in repeated)
    assert not any(np.array_equal(a.expert_ids, b.expert_ids) for a, b in changed)


def kinds_of_block(accept_ratio):
    script = DecodeScript(block_length=32, gen_length=32, prompt_length=32, accept_ratio=accept_ratio)
    forwards = [f for f in script_request(np.random.default_rng(0), 0, script) if f.block == 1]
    assert [f.iteration for f in forwards] == list(range(len(forwards)))
    kinds = [f.kind for f in forwards]
    return [kinds.count(kind) for kind in (ForwardKind.DENOISE, ForwardKind.IDLE, ForwardKind.COMMIT)]


def test_blocks_of_32_masks_run_as_in_dinfer():
    assert kinds_of_block(0.0) == [32, 0, 1]  # one token accepted a forward
    assert kinds_of_block(1.0) == [1, 3, 0]  # all at once


def test_the_script_accepts_by_the_rule_of_the_loop():
    script = DecodeScript(accept_ratio=0.3)
    tokens = None
    for forward in script_request(np.random.default_rng(1), 0, script):
        masked = forward.is_masked_in
        assert np.array_equal(masked, forward.token_ids_in == script.mask_id)
        if forward.kind == ForwardKind.DENOISE:
            p = forward.p_argmax.astype(np.float32)
            least = min(np.float32(script.threshold), p[masked].max() - np.float32(1e-5))
            assert np.array_equal(forward.accepted, masked & (p >= least))
        if forward.iteration:
            assert np.array_equal(forward.token_ids_in, tokens)
        tokens = np.where(forward.accepted, forward.argmax_ids, forward.token_ids_in)
        assert np.array_equal(np.isnan(forward.p_current), masked)
        assert forward.kv_len == (0 if forward.block < 0 else forward.positions[0])


def test_experts_are_chosen_from_the_best_groups():
    logits = np.array([[2, 1, 0, -1, 1.5, 0.5, -0.5, -1.5], [0, -1, -1, 0, 3, 1, 2.5, -2]], np.float32)
    assert choose(logits.copy(), RouterShape(1, 8, 2, num_groups=2, top_groups=1)).tolist() == [[0, 1], [4, 6]]
    assert choose(logits.copy(), RouterShape(1, 8, 2)).tolist() == [[0, 4], [4, 6]]
    drawn = np.random.default_rng(0).standard_normal((500, 256)).astype(np.float32)
    ids = choose(drawn.copy(), RouterShape(1, 256, 8, 8, 4))
    groups = drawn.reshape(500, 8, 32)
    values = np.sort(groups, axis=-1)[..., -2:].sum(-1)
    for row in range(500):
        best = set(np.argsort(-values[row])[:4].tolist())
        allowed = [e for e in np.argsort(-drawn[row]).tolist() if e // 32 in best]
        assert ids[row].tolist() == sorted(allowed[:8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activated": 200.0}, "activated 200: out of reach with the other settings, which allow"),
        ({"overlap": 0.1}, "overlap 0.1: out of reach"),
        ({"overlap": float("nan")}, "overlap nan: out of reach"),
        ({"boundary_overlap": 1.5}, "boundary_overlap 1.5: out of reach"),
        ({"activated": None}, "activated: must be given"),
        ({"confidence_coupling": -1.0}, "confidence_coupling -1.0: must be from 0 to 10"),
        ({"request_share": 1.5}, "request_share 1.5: must be from 0 to 1"),
        ({"layer_heterogeneity": float("nan")}, "layer_heterogeneity nan: must be from 0 to 10"),
        ({"num_groups": 7}, "num_groups 7: must divide the 64 experts"),
        ({"num_groups": 32, "top_groups": 1}, "top_groups 1: must be from 2"),
        ({"num_requests": 0}, "num_requests 0: must be 1 to 1048576"),
        ({"seed": -1}, "seed -1: must be at least 0"),
        ({"script": DecodeScript(block_length=0)}, "block_length 0: must be 1 to 1048576"),
        ({"script": DecodeScript(accept_ratio=2)}, "accept_ratio 2: must be from 0 to 1"),
        ({"num_requests": 10**20}, "num_requests 1000.*: must be 1 to 1048576"),
        ({"script": DecodeScript(gen_length=10**20)}, "gen_length 1000.*: must be 1 to 1048576"),
        ({"script": DecodeScript(vocab=10**20)}, "vocab 1000.*: must be 2, a token and the mask, to 2147483648"),
        ({"script": DecodeScript(vocab=1)}, "vocab 1: must be 2, a token and the mask, to 2147483648"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(TraceError, match=f"^{message}"):
        small(**changes)
