"""Merged requests run side by side, and each of them as it was recorded."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from recorded import assert_same, write
from strategies import metadata_for, random_passes

from experiments.run import simulate
from tracer import doctor
from tracer.merge import merge, merged_metadata
from tracer.parts import split
from tracer.schema import ForwardKind, TraceError

RENUMBERED = {"pass_id", "requests", "wall_ns"}
SHAPE, PASSES = random_passes(
    np.random.default_rng(2), num_requests=6, block_length=8, accept_ratio=0.2, signals=True, timed=True
)
_, MORE = random_passes(np.random.default_rng(3), num_requests=2, block_length=8, accept_ratio=0.2, signals=True)


def sequence(passes, request):
    return [part for item in passes for part in split(item) if part.requests[0] == request]


@pytest.mark.parametrize("batch", [1, 2, 4, 6])
def test_each_request_runs_as_it_was_recorded(batch):
    merged = list(merge([PASSES], batch))
    for request in range(6):
        for recorded, run in zip(sequence(PASSES, request), sequence(merged, request), strict=True):
            assert_same(recorded, run, but=RENUMBERED)
    assert [item.pass_id for item in merged] == list(range(len(merged)))


def test_a_batch_of_one_is_the_trace():
    later = [replace(item, pass_id=item.pass_id + 5, requests=item.requests + 3) for item in PASSES]
    for recorded, merged in zip(PASSES, merge([later], 1), strict=True):
        assert_same(recorded, merged)


@pytest.mark.parametrize("batch", [2, 4, 6])
def test_requests_join_as_soon_as_there_is_room(batch):
    merged = list(merge([PASSES], batch))
    left = {request: len(sequence(PASSES, request)) for request in range(6)}
    started = 0
    for item in merged:
        running = [request for request in range(started) if left[request]]
        joining = list(range(started, min(started + batch - len(running), 6)))
        started += len(joining)
        assert item.requests.tolist() == running + joining
        for row, request in enumerate(item.requests.tolist()):
            assert (request in joining) == (item.kinds[row] == ForwardKind.PREFILL)
            left[request] -= 1
        assert item.is_prefill == (running == [])
        assert item.wall_ns == -1 or len(item.requests) == 1
    assert not any(left.values())
    mixed = [item for item in merged if 0 < (item.kinds == ForwardKind.PREFILL).sum() < len(item.kinds)]
    assert mixed or batch == 6
    assert all(item.kind == ForwardKind.DENOISE for item in mixed if (item.kinds == ForwardKind.DENOISE).any())


def test_requests_of_several_traces_join_in_turn():
    merged = list(merge([PASSES, MORE], 3))
    origin = [(PASSES, 0), (MORE, 0), (PASSES, 1), (MORE, 1), (PASSES, 2), (PASSES, 3), (PASSES, 4), (PASSES, 5)]
    for request, (passes, recorded) in enumerate(origin):
        for one, two in zip(sequence(passes, recorded), sequence(merged, request), strict=True):
            assert_same(one, two, but=RENUMBERED)


@pytest.mark.parametrize("gate_dtype", ["float32", "float16", "uint8"])
def test_a_merged_trace_is_sound(tmp_path, gate_dtype):
    reader = write(tmp_path / "given.trace", SHAPE, PASSES, gate_dtype)
    merged = write(tmp_path / "merged.trace", SHAPE, merge([reader.passes(signals=True)], 4), gate_dtype)
    assert not doctor.check(tmp_path / "merged.trace").findings
    assert merged.has_signals
    assert merged.num_requests == 6
    if gate_dtype == "uint8":
        for one, two in zip(merge([reader], 4), merged, strict=True):
            assert_same(one, two)


def test_signals_need_all_to_have_them():
    without = [replace(item, signals=None) for item in MORE]
    merged = list(merge([PASSES, without], 8))
    assert merged[0].signals is None


def test_a_merged_trace_simulates(tmp_path):
    reader = write(tmp_path / "merged.trace", SHAPE, merge([PASSES], 3))
    accepted = sum(int(item.num_accepted.sum()) for item in PASSES)
    summaries = {}
    for policy in ("full", "lru", "oled"):
        result = simulate(reader, policy, 6, shape="llada2.0-mini", warmup_requests=3, calibration="warmup")
        forwards, summary = result.forwards, result.summary
        summaries[policy] = summary
        assert forwards.height == reader.num_passes
        assert forwards["num_accepted"].sum() == accepted
        counted = forwards.filter(~forwards["warmup"] & (forwards["kind"] != "prefill"))
        # a pass takes its time once, whatever the number of its requests
        tpot = counted["time_ns"].sum() / 1e6 / counted["num_accepted"].sum()
        assert summary["tpot_ms"] == pytest.approx(tpot)
        assert summary["num_requests"] == 3
    assert summaries["full"]["hit_ratio"] == 1
    assert 0 < summaries["lru"]["hit_ratio"] < 1
    assert all(summaries["full"]["tpot_ms"] < summaries[policy]["tpot_ms"] for policy in ("lru", "oled"))


def test_passes_cost_their_summed_tokens_and_context(tmp_path):
    reader = write(tmp_path / "merged.trace", SHAPE, merge([PASSES], 3))
    simulate(reader, "lru", 6, shape="llada2.0-mini", warmup_requests=0, output=tmp_path / "out", per_layer=True)
    rows = pl.read_parquet(tmp_path / "out" / "decisions.parquet").group_by("forward").first().sort("forward")
    assert rows["num_tokens"].to_list() == [int(item.num_tokens.sum()) for item in reader]
    assert rows["kv_len"].to_list() == [int(item.kv_lens.sum()) for item in reader]


def test_metadata_keeps_what_all_agree_on():
    one = replace(metadata_for(SHAPE, source="proxy:some", details={"device": "cpu", "mask_id": 3}), content_hash="a")
    two = replace(one, content_hash="b", seed=8, details={"device": "cuda:0", "mask_id": 3})
    merged = merged_metadata([one, two], 4)
    assert merged.details == {"mask_id": 3, "merged": {"batch": 4, "content_hashes": ["a", "b"]}}
    assert (merged.source, merged.seed, merged.decode, merged.content_hash) == ("proxy:some", None, one.decode, "")
    assert merged_metadata([one], 2).seed == one.seed
    for changes, what in (
        ({"source": "proxy:other"}, "source"),
        ({"gate_dtype": "uint8"}, "gate_dtype"),
        ({"decode": {"block_length": 8}}, "block_length"),
        ({"shape": replace(SHAPE, num_experts=32)}, "shape"),
    ):
        with pytest.raises(TraceError, match=f"^traces to be merged differ in {what}: "):
            merged_metadata([one, replace(one, **changes)], 2)


def test_refusals():
    with pytest.raises(TraceError, match=r"^batch 0: must be at least 1"):
        list(merge([PASSES], 0))
    with pytest.raises(TraceError, match=r"^batch 7: must be at most 6, the number of requests"):
        list(merge([PASSES], 7))
    with pytest.raises(TraceError, match=r"^pass 0 has 2 requests; only requests recorded one by one"):
        list(merge([merge([PASSES], 2)], 2))
    first, rest = PASSES[0], PASSES[1:]
    with pytest.raises(TraceError, match=r"^request 0 stands in several places"):
        list(merge([[first, replace(rest[0], requests=np.array([1])), *rest]], 1))
