"""Controls keep what they say they keep, and destroy the rest."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from recorded import assert_same, write
from strategies import metadata_for, random_passes

from tracer import doctor, locality
from tracer.controls import control_metadata, shuffled, uniform
from tracer.parts import join, split
from tracer.schema import ForwardKind, TraceError

CHANGED = {"expert_ids", "gates", "signals", "cos_router_input", "cos_layer_output", "wall_ns"}
SHAPE, PASSES = random_passes(
    np.random.default_rng(5),
    num_requests=4,
    num_experts=64,
    block_length=16,
    num_blocks=3,
    accept_ratio=0.1,
    timed=True,
)
BATCHED_SHAPE, BATCHED = random_passes(
    np.random.default_rng(6), num_requests=5, batch=3, block_length=8, prompt_length=16, signals=True
)


def routing_of(part):
    arrays = (part.expert_ids, part.gates, *(vars(part.signals).values() if part.signals else ()))
    return b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize(("shape", "passes"), [(SHAPE, PASSES), (BATCHED_SHAPE, BATCHED)])
def test_controls_change_routing_alone(shape, passes):
    for control in (uniform(passes, shape), shuffled(passes), shuffled(passes, within_requests=True)):
        for before, now in zip(passes, control, strict=True):
            assert_same(before, now, but=CHANGED)
            assert now.wall_ns == -1
            assert np.isnan(now.cos_router_input).all()
            assert np.isnan(now.cos_layer_output).all()


@pytest.mark.parametrize("gate_dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize(("shape", "passes"), [(SHAPE, PASSES), (BATCHED_SHAPE, BATCHED)])
def test_the_doctor_finds_nothing(tmp_path, shape, passes, gate_dtype):
    reader = write(tmp_path / "given.trace", shape, passes, gate_dtype)
    given = list(reader.passes(signals=reader.has_signals))
    for name, control in (("uniform", uniform(given, shape)), ("shuffled", shuffled(given))):
        write(tmp_path / name, shape, control, gate_dtype)
        assert not doctor.check(tmp_path / name).findings


def test_uniform_routing_is_what_chance_gives():
    control = list(uniform(PASSES, SHAPE, seed=3))
    sets = list(locality.denoise_sets(control, SHAPE.num_experts))
    missed = (1 - SHAPE.top_k / SHAPE.num_experts) ** 16  # an expert by all of 16 tokens
    # an expert is activated with probability 1 - missed, by whatever came before: that is the overlap, too
    activated = locality.activated_per_layer(sets)
    assert activated.mean() == pytest.approx(SHAPE.num_experts * (1 - missed), rel=0.01)
    for pairs in (locality.within_blocks(sets), locality.within_blocks(sets, 4), locality.between_requests(sets)):
        error = pairs.overlap.std() / np.sqrt(pairs.overlap.size)
        assert error < 0.01
        assert pairs.mean_overlap == pytest.approx(1 - missed, abs=4 * error)
    popular = np.bincount(np.concatenate([item.expert_ids.ravel() for item in control]), minlength=64)
    assert ((popular - popular.mean()) ** 2 / popular.mean()).sum() < 110  # chi squared, 63 degrees of freedom
    ids = np.concatenate([item.expert_ids.reshape(-1, SHAPE.top_k) for item in control])
    assert (np.diff(ids, axis=1) > 0).all()


@pytest.mark.parametrize(("num_tokens", "distinct"), [(1, 8), (16, 101.96), (32, 163.31)])
def test_u1_distinct_experts_of_tokens_that_choose_8_of_256_by_chance(num_tokens, distinct):
    shape, passes = random_passes(
        np.random.default_rng(0), num_layers=8, num_experts=256, top_k=8, block_length=num_tokens, num_blocks=4
    )
    counts = locality.activated_counts(locality.decode_sets(uniform(passes, shape), shape.num_experts))
    assert counts.size > 50
    assert counts.mean() == pytest.approx(distinct, abs=4 * counts.std() / np.sqrt(counts.size) + 0.005)


def test_uniform_gates_keep_their_values():
    for before, now in zip(PASSES, uniform(PASSES, SHAPE), strict=True):
        np.testing.assert_array_equal(before.gates, now.gates)


@pytest.mark.parametrize("within_requests", [False, True])
@pytest.mark.parametrize(("shape", "passes"), [(SHAPE, PASSES), (BATCHED_SHAPE, BATCHED)])
def test_shuffling_only_moves_routing(shape, passes, within_requests):
    control = list(shuffled(passes, 1, within_requests=within_requests))

    def classes(trace):
        found = {}
        for item in trace:
            for part in split(item):
                key = (int(part.kinds[0]), int(part.num_tokens[0]), int(part.requests[0]) if within_requests else 0)
                found.setdefault(key, Counter())[routing_of(part)] += 1
        return found

    assert classes(passes) == classes(control)
    moved = 0
    for before, now in zip(passes, control, strict=True):
        for old, new in zip(split(before), split(now), strict=True):
            same = routing_of(old) == routing_of(new)
            moved += not same
            assert same or not old.is_prefill
    assert moved > len(passes) / 2


def test_shuffling_leaves_sets_and_takes_their_order():
    before, after = (list(locality.denoise_sets(trace, 64)) for trace in (PASSES, shuffled(PASSES)))
    sizes = [sorted(f.activated.sum(axis=1).tolist() for f in sets) for sets in (before, after)]
    assert sizes[0] == sizes[1]
    floor = locality.between_requests(before).mean_overlap
    assert locality.within_blocks(before).mean_overlap > floor + 0.1
    assert locality.within_blocks(after).mean_overlap == pytest.approx(floor, abs=0.05)


def test_the_seed_decides():
    for control in (lambda seed: uniform(PASSES, SHAPE, seed), lambda seed: shuffled(PASSES, seed)):
        one, two, other = (np.concatenate([p.expert_ids.ravel() for p in control(seed)]) for seed in (1, 1, 2))
        assert np.array_equal(one, two)
        assert not np.array_equal(one, other)
        with pytest.raises(TraceError, match=r"^seed -1: must be at least 0"):
            list(control(-1))


def test_metadata_names_the_trace_that_it_controls():
    given = replace(metadata_for(SHAPE, source="proxy:some", details={"training": {"minutes": 3}}), content_hash="abc")
    metadata = control_metadata(given, "shuffled", 5, within_requests=True)
    assert (metadata.source, metadata.seed, metadata.content_hash) == ("synthetic:shuffled", 5, "")
    assert metadata.decode == given.decode
    assert metadata.details == {
        "control_of": {"source": "proxy:some", "content_hash": "abc", "seed": 7, "details": given.details},
        "within_requests": True,
    }


def test_parts_make_up_their_pass():
    for item in BATCHED:
        parts = split(item)
        assert [part.requests.tolist() for part in parts] == [[r] for r in item.requests]
        assert_same(join(parts, item.pass_id, item.wall_ns), item)
    kinds = {kind for item in BATCHED for kind in item.kinds.tolist()}
    assert kinds >= {ForwardKind.PREFILL, ForwardKind.DENOISE}
