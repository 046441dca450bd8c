"""What becomes of tokens' experts, by hand: their state, their confidence, and how many they keep."""

import dataclasses

import numpy as np
import pytest
from reference import pass_of

from tracer.locality_routes import TokenState, cosines, routes, stability
from tracer.schema import ForwardKind, TraceError

MASK = 99
MASKED, ACCEPTED, DECODED = TokenState


def forward(pass_id, ids, tokens, p_argmax, p_current, **more):
    """One layer of these experts, a row for each token; a token of 99 is a mask."""
    tokens = np.array(tokens)
    return pass_of(
        np.array([ids]),
        pass_id,
        token_ids_in=tokens,
        is_masked_in=tokens == MASK,
        p_argmax=p_argmax,
        p_current=p_current,
        **more,
    )


# four tokens: one stays a mask, one is accepted, one was decoded, one is edited
FIRST = forward(
    0,
    [[0, 1], [2, 3], [4, 5], [6, 7]],
    [MASK, MASK, 5, 6],
    [0.3, 0.95, 0.6, 0.7],
    [np.nan, np.nan, 0.55, 0.2],
    edited=[False, False, False, True],
)
SECOND = forward(1, [[1, 0], [2, 8], [4, 5], [0, 1]], [MASK, 4, 5, 8], [0.4] * 4, [np.nan, 0.9, 0.8, 0.7])


def test_states_confidences_and_experts_kept():
    (found,) = routes([FIRST, SECOND])
    assert found.state.tolist() == [MASKED, ACCEPTED, DECODED, ACCEPTED]
    assert found.confidence.tolist() == [0.3, 0.95, 0.55, 0.7]  # of the best token for masks and edits
    assert found.num_kept.tolist() == [[2, 1, 2, 0]]


def test_stability_by_state_and_confidence():
    found = stability(routes([FIRST, SECOND]), 1, 2, edges=(0.0, 0.5, 0.7, 1.0))
    assert found.counts[MASKED].tolist() == [[[0, 0, 1]], [[0, 0, 0]], [[0, 0, 0]]]
    assert found.counts[ACCEPTED].tolist() == [[[0, 0, 0]], [[0, 0, 0]], [[1, 1, 0]]]  # an edge is in the bin above
    assert found.counts[DECODED].tolist() == [[[0, 0, 0]], [[0, 0, 1]], [[0, 0, 0]]]
    assert found.kept_ratio([ACCEPTED]) == 0.25
    assert found.kept_ratio([MASKED, ACCEPTED]) == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.kept_ratio(TokenState, 0.5, 1.0) == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.kept_ratio([MASKED], 0.5, 0.7) is None
    assert found.num_tokens(TokenState) == 4
    assert found.num_tokens([ACCEPTED], 0.7, 1.0) == 2
    with pytest.raises(TraceError, match=r"0\.6 .* allowed are the edges"):
        found.kept_ratio([MASKED], 0.6)


def test_a_confidence_of_one_and_an_unknown_one():
    first = forward(0, [[0, 1], [2, 3]], [MASK, MASK], [1.0, np.nan], [np.nan] * 2)
    again = forward(1, [[0, 1], [2, 3]], [MASK, MASK], [1.0, 1.0], [np.nan] * 2)
    found = stability(routes([first, again]), 1, 2)
    assert found.num_tokens(TokenState) == 1
    assert found.kept_ratio([MASKED], 0.99, 1.0) == 1.0


def test_only_successive_denoise_forwards_of_one_block_are_compared():
    same = dataclasses.replace(FIRST, pass_id=1)
    other_block = dataclasses.replace(FIRST, pass_id=2, blocks=np.array([1]))
    commit = dataclasses.replace(FIRST, pass_id=3, kinds=np.array([int(ForwardKind.COMMIT)]))
    other_request = dataclasses.replace(FIRST, pass_id=4, requests=np.array([1]))
    assert len(list(routes([FIRST, same]))) == 1
    assert list(routes([FIRST, other_block])) == []
    assert list(routes([FIRST, commit, other_request])) == []


def test_requests_of_one_pass_and_positions_that_moved():
    def pair(pass_id, ids, positions):
        return pass_of(
            np.array([ids]),
            pass_id,
            requests=(0, 1),
            blocks=(0, 0),
            positions=positions,
            p_argmax=[0.1, 0.2, 0.3, 0.4],
        )

    before = pair(0, [[0], [1], [2], [3]], [0, 1, 8, 9])
    after = pair(1, [[1], [0], [2], [9]], [1, 2, 8, 9])
    first, second = routes([before, after])
    assert first.confidence.tolist() == [0.2]  # of position 1, which both forwards have
    assert first.num_kept.tolist() == [[1]]
    assert second.confidence.tolist() == [0.3, 0.4]
    assert second.num_kept.tolist() == [[1, 0]]


def test_counts_are_of_every_layer():
    ids = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    after = np.array([[[0, 1], [2, 3]], [[0, 4], [5, 6]]])
    found = stability(routes([pass_of(ids, 0), pass_of(after, 1)]), 2, 2)
    assert found.counts.sum(axis=(0, 1)).tolist() == [[0, 0, 2], [1, 1, 0]]
    assert found.kept_ratio([MASKED]) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert found.num_tokens([MASKED]) == 2


def test_cosines_are_of_denoise_forwards_that_follow_another():
    nothing = np.full((1, 1), np.nan, np.float32)
    first = dataclasses.replace(FIRST, cos_router_input=nothing, cos_layer_output=nothing)
    value = np.full((1, 1), 0.5, np.float32)
    second = dataclasses.replace(SECOND, cos_router_input=value, cos_layer_output=value / 2)
    idle = dataclasses.replace(second, kinds=np.array([int(ForwardKind.IDLE)]))
    found = cosines([first, second, idle])
    assert found.router_input.tolist() == [[0.5]]
    assert found.layer_output.tolist() == [[0.25]]
    assert cosines([]).router_input.size == 0
