"""Caches of single accesses, against plain restatements of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import passes_of, shape_of
from strategies import random_passes, traces

from policies.contract import PolicyError
from simulator.bits import highest, lowest
from simulator.curves import curves
from simulator.positions import add, empty_positions, remove_last
from simulator.stream import accesses, belady_hits, by_layer, lfu_hits, lru_hits
from tracer.schema import TraceError

HITS = {"lru": lru_hits, "lfu": lfu_hits, "belady": belady_hits}


def plain_hits(kind, stream, capacity):
    """One access after the other, by the definitions."""
    counts, last, hits = {}, {}, 0  # of residents; last access
    for now, expert in enumerate(stream):
        if expert in counts:
            hits += 1
        elif len(counts) == capacity:
            later = stream[now:]
            next_use = {held: later.index(held) if held in later else len(stream) for held in counts}
            keys = {
                "lru": last,
                "lfu": {held: (counts[held], last[held]) for held in counts},
                "belady": {held: -after for held, after in next_use.items()},
            }
            del counts[min(counts, key=keys[kind].get)]
        counts[expert] = counts.get(expert, 0) + 1
        last[expert] = now
    return hits


@pytest.mark.parametrize("kind", HITS)
@settings(max_examples=200)
@given(st.data())
def test_hits_are_those_of_the_definition(kind, data):
    num_ids = data.draw(st.integers(1, 9))
    stream = data.draw(st.lists(st.integers(0, num_ids - 1), max_size=60))
    capacity = data.draw(st.integers(1, num_ids + 1))
    assert HITS[kind](np.array(stream, np.int32), num_ids, capacity) == plain_hits(kind, stream, capacity)


@pytest.mark.parametrize("kind", HITS)
def test_long_streams_hit_as_the_definition_says(kind):
    """Longer than a word of bits, and than a word of words."""
    rng = np.random.default_rng(5)
    stream = np.concatenate([rng.zipf(1.2, 3000) % 40, rng.integers(0, 40, 1500), np.tile(np.arange(30), 20)])
    for capacity in (1, 7, 25):
        found = HITS[kind](stream.astype(np.int32), 40, capacity)
        assert found == plain_hits(kind, stream.tolist(), capacity)


def test_belady_hits_most():
    rng = np.random.default_rng(2)
    stream = rng.integers(0, 30, 2000).astype(np.int32)
    for capacity in (1, 5, 20, 30):
        most = belady_hits(stream, 30, capacity)
        assert most >= max(lru_hits(stream, 30, capacity), lfu_hits(stream, 30, capacity))
    assert most == stream.size - 30


def test_a_run_is_a_stream_in_its_order():
    passes = passes_of([{2, 0}, {1, 3}])
    assert accesses(passes, shape_of(1, 4)).tolist() == [0, 2, 1, 3]
    shape, passes = random_passes(np.random.default_rng(0))
    stream = accesses(passes, shape)
    assert stream.dtype == np.int32
    assert stream.tolist() == [
        layer * 16 + expert
        for pass_ in passes
        for layer in range(3)
        for expert in sorted(set(pass_.expert_ids[layer].ravel().tolist()))
    ]
    for layer, part in enumerate(by_layer(stream, shape)):
        assert part.dtype == np.int32
        assert part.tolist() == [expert % 16 for expert in stream.tolist() if expert // 16 == layer]
    assert [part.size for part in by_layer(np.array([5, 5], np.int32), shape_of(3, 4))] == [0, 2, 0]
    assert accesses([], shape_of(2, 4)).size == 0


@settings(max_examples=25)
@given(traces(), st.data())
def test_a_cache_for_each_layer_is_the_curve_of_single_accesses(trace, data):
    shape, passes = trace
    passes = [pass_ for pass_ in passes if not pass_.is_prefill]
    capacity = data.draw(st.integers(1, shape.num_experts))
    curve = curves(passes, shape, ["seq"], warmup_requests=0)["seq"]
    parts = by_layer(accesses(passes, shape), shape)
    assert curve.hits[:, capacity - 1].tolist() == [lru_hits(part, shape.num_experts, capacity) for part in parts]


def test_one_cache_for_all_layers_never_hits_a_sweep_that_is_larger():
    """19 layers that always activate the same 60 experts, and 760 slots, 40 for each layer.

    LRU loses every expert before its layer comes again, as 1,140 are activated in between. Belady keeps 759 of them,
    and retention of whole layer executions has 40 hits in each. What a cache is shown decides what it is worth.
    """
    num_forwards, shape = 10, shape_of(19, 256)
    sweep = (np.arange(19)[:, None] * 256 + np.arange(60)).ravel()
    stream = np.tile(sweep, num_forwards).astype(np.int32)
    assert lru_hits(stream, 19 * 256, 760) == 0
    assert sum(lru_hits(part, 256, 40) for part in by_layer(stream, shape)) == 0
    found = sum(belady_hits(part, 256, 40) for part in by_layer(stream, shape)) / stream.size
    assert found == pytest.approx((num_forwards - 1) / num_forwards * 39 / 59, rel=0.02)
    one = curves(passes_of([range(60)] * num_forwards), shape_of(1, 256), ["lru"], warmup_requests=0)["lru"]
    assert one.hits[0, 39] / one.activated[0] == pytest.approx((num_forwards - 1) / num_forwards * 40 / 60)


@pytest.mark.parametrize("kind", HITS)
def test_bad_arguments_are_refused(kind):
    for ids in ([0, 4], [-1]):
        with pytest.raises(TraceError, match="an id that is not from 0 to num_ids - 1"):
            HITS[kind](np.array(ids, np.int32), 4, 2)
    with pytest.raises(PolicyError, match="capacity must be at least 1"):
        HITS[kind](np.zeros(1, np.int32), 4, 0)
    assert HITS[kind](np.empty(0, np.int32), 4, 2) == 0


@pytest.mark.parametrize("size", [2, 64, 65, 4096, 4097, 300_000])
def test_positions_leave_from_the_last(size):
    rng = np.random.default_rng(size)
    positions, held = empty_positions(size), set()
    for _ in range(400):
        if held and rng.random() < 0.5:
            assert positions.last[0] == max(held)
            held.remove(max(held))
            remove_last(positions)
        else:
            position = int(rng.choice([rng.integers(1, size), size - 1]))
            held.add(position)
            add(positions, np.uint64(position))
        assert positions.last[0] == max(held, default=0)
    while held:
        held.remove(int(positions.last[0]))
        remove_last(positions)
    assert not positions.words.any()


def test_places_of_bits():
    from policies.jit import jit

    @jit
    def places(word):
        return lowest(word), highest(word)

    for bits in ([0], [63], [0, 63], [5, 17, 40]):
        assert places(np.uint64(sum(1 << bit for bit in bits))) == (min(bits), max(bits))
