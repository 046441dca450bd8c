import numpy as np
import pytest

from tracer.locality import (
    ForwardSets,
    across_blocks,
    across_blocks_floor,
    activated_by_iteration,
    activated_per_layer,
    between_requests,
    denoise_sets,
    within_blocks,
)
from tracer.schema import ForwardKind, Pass

NUM_EXPERTS = 8


def sets(request, block, iteration, num_accepted, *layers):
    activated = np.zeros((len(layers), NUM_EXPERTS), bool)
    for layer, experts in enumerate(layers):
        activated[layer, list(experts)] = True
    return ForwardSets(request, block, iteration, num_accepted, activated)


# one request: a block of three forwards, then one of two; two layers
ONE = [
    sets(0, 0, 0, 2, {0, 1, 2, 3}, {0, 1}),
    sets(0, 0, 1, 3, {0, 1, 4}, {0, 1}),
    sets(0, 0, 2, 1, {0, 4, 5}, {2, 3}),
    sets(0, 1, 0, 4, {0, 1, 2, 5}, {2, 3, 4}),
    sets(0, 1, 1, 1, {5}, {2}),
]


def test_activated_experts_of_each_layer():
    assert activated_per_layer(ONE) == pytest.approx([(4 + 3 + 3 + 4 + 1) / 5, (2 + 2 + 2 + 3 + 1) / 5])
    assert activated_per_layer([]).size == 0


def test_adjacent_overlap_is_over_the_earlier_set_and_within_a_block():
    pairs = within_blocks(ONE)
    assert pairs.overlap.tolist() == [[2 / 4, 1], [2 / 3, 0], [1 / 4, 1 / 3]]
    assert pairs.jaccard.tolist() == [[2 / 5, 1], [2 / 4, 0], [1 / 4, 1 / 3]]
    assert pairs.num_accepted.tolist() == [2, 3, 4]
    assert pairs.mean_overlap == pytest.approx((2 / 4 + 1 + 2 / 3 + 0 + 1 / 4 + 1 / 3) / 6)
    assert pairs.mean_jaccard == pytest.approx((2 / 5 + 1 + 2 / 4 + 0 + 1 / 4 + 1 / 3) / 6)


def test_overlap_by_gap_counts_the_tokens_of_all_forwards_between():
    pairs = within_blocks(ONE, gap=2)
    assert pairs.overlap.tolist() == [[1 / 4, 0]]
    assert pairs.num_accepted.tolist() == [5]
    assert within_blocks(ONE, gap=3).mean_overlap is None


def test_overlap_by_tokens_accepted():
    again = [f._replace(request=1) for f in ONE]
    grouped = within_blocks([*ONE, *again]).by_accepted()
    assert list(grouped) == [2, 3, 4]
    assert [len(pairs.overlap) for pairs in grouped.values()] == [2, 2, 2]
    assert grouped[3].mean_overlap == pytest.approx((2 / 3 + 0) / 2)


def test_overlap_across_a_block_boundary():
    last = across_blocks(ONE)
    assert last.overlap.tolist() == [[2 / 3, 1]]
    assert last.jaccard.tolist() == [[2 / 5, 2 / 3]]
    assert last.num_accepted.tolist() == [1]
    first = across_blocks(ONE, earlier="first")
    assert first.overlap.tolist() == [[3 / 4, 0]]
    assert first.num_accepted.tolist() == [6]


def test_floor_of_a_boundary_is_the_opening_of_another_request():
    other = [sets(4, 0, 0, 1, {0, 7}, {0}), sets(4, 0, 1, 1, {1, 4}, {1, 5}), sets(4, 1, 0, 1, {0, 2}, {2})]
    last = across_blocks_floor([*ONE, *other])
    # {0, 4, 5} and {2, 3} with {0, 2} and {2}; {1, 4} and {1, 5} with {0, 1, 2, 5} and {2, 3, 4}
    assert last.overlap.tolist() == [[1 / 3, 1 / 2], [1 / 2, 0]]
    first = across_blocks_floor([*ONE, *other], earlier="first")
    assert first.overlap.tolist() == [[2 / 4, 0], [1 / 2, 0]]
    assert (first.num_accepted == -1).all()
    alone = [sets(5, 3, 0, 1, {6}, {6})]
    assert across_blocks_floor([*ONE, *alone]).overlap.tolist() == [[0, 0]]  # counted round: its only opening
    assert across_blocks_floor(ONE).mean_overlap is None


def test_activated_experts_of_each_forward_of_a_block():
    assert activated_by_iteration(ONE) == pytest.approx({0: (3 + 3.5) / 2, 1: (2.5 + 1) / 2, 2: 2.5})


def test_floor_pairs_each_request_with_the_next_in_a_ring():
    other = [sets(4, 0, 0, 1, {0, 7}, {0}), sets(4, 0, 1, 1, {1, 4}, {1, 5})]
    pairs = between_requests([*ONE, *other])
    # 0 with 4, counted round: forwards 0 1 2 3 4 meet 0 1 0 1 0; then 4 with 0
    assert pairs.overlap.tolist() == [
        [1 / 4, 1 / 2],
        [2 / 3, 1 / 2],
        [1 / 3, 0],
        [1 / 4, 0],
        [0, 0],
        [1 / 2, 1],
        [1, 1 / 2],
    ]
    assert (pairs.num_accepted == -1).all()
    assert between_requests(ONE).mean_overlap is None


def test_requests_may_stand_interleaved():
    apart = [*ONE, *(f._replace(request=1) for f in ONE)]
    mixed = [f for pair in zip(apart[:5], apart[5:], strict=True) for f in pair]
    for measure in (within_blocks, across_blocks, between_requests):
        assert measure(mixed).overlap.tolist() == measure(apart).overlap.tolist()


def batch(kinds, expert_ids, num_tokens):
    """A pass of several requests with one layer; only what locality reads means anything."""
    num_requests, num_all = len(kinds), sum(num_tokens)
    nothing = np.zeros(num_all)
    return Pass(
        pass_id=0,
        requests=np.arange(num_requests),
        blocks=np.zeros(num_requests, np.int64),
        iterations=np.arange(num_requests),
        kinds=np.array(kinds),
        num_tokens=np.array(num_tokens),
        kv_lens=np.zeros(num_requests, np.int64),
        num_masked_in=np.zeros(num_requests, np.int64),
        num_accepted=np.arange(num_requests) + 10,
        wall_ns=-1,
        cos_router_input=np.zeros((num_requests, 1), np.float32),
        cos_layer_output=np.zeros((num_requests, 1), np.float32),
        positions=nothing,
        token_ids_in=nothing,
        is_masked_in=nothing,
        argmax_ids=nothing,
        p_argmax=nothing,
        p_current=nothing,
        accepted=nothing,
        edited=nothing,
        expert_ids=np.array(expert_ids)[None],
        gates=np.full((1, num_all, 2), 0.5),
    )


def test_sets_are_of_denoise_forwards_and_of_each_requests_own_tokens():
    kinds = [ForwardKind.DENOISE, ForwardKind.IDLE, ForwardKind.DENOISE, ForwardKind.PREFILL, ForwardKind.COMMIT]
    item = batch(kinds, [[0, 1], [1, 2], [3, 4], [5, 6], [0, 7], [2, 3]], [2, 1, 1, 1, 1])
    found = list(denoise_sets([item], NUM_EXPERTS))
    assert [f.request for f in found] == [0, 2]
    assert [f.num_accepted for f in found] == [10, 12]
    assert [np.flatnonzero(f.activated[0]).tolist() for f in found] == [[0, 1, 2], [5, 6]]
