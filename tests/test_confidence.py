import numpy as np
import pytest
from reference import pass_of, shape_of
from strategies import random_passes

from policies.confidence import confidence_at, read_all
from policies.contract import PolicyError
from policies.steps import Steps, step_at

IDS = np.zeros((1, 3, 1), np.int64)


def one_block():
    """Three positions: the first is accepted in forward 0 with .9 and edited in 2, the second in 1 with .8."""
    masked = [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    accepted = [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]
    edited = [[0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]
    p_argmax = [[0.9, 0.3, 0.2], [0.95, 0.8, 0.25], [0.6, 0.7, 0.35], [0.5, 0.4, 0.45]]
    p_current = [[np.nan, np.nan, np.nan], [0.85, np.nan, np.nan], [0.1, 0.75, np.nan], [0.55, 0.65, np.nan]]
    return [
        pass_of(
            IDS,
            i,
            iterations=[i],
            is_masked_in=np.array(masked[i], bool),
            accepted=np.array(accepted[i], bool),
            edited=np.array(edited[i], bool),
            p_argmax=np.array(p_argmax[i]),
            p_current=np.array(p_current[i]),
        )
        for i in range(4)
    ]


def readings(passes, **knobs):
    knobs = {"same_iter": True, "decoded": "prob", "flip_scale": 1.0} | knobs
    found = read_all(passes, shape_of(1, 1), **knobs)
    return np.split(found.values, found.offsets[1:-1])


def rows(found):
    return [row.tolist() for row in found]


def test_probabilities_of_what_stands_there():
    assert rows(readings(one_block())) == [[0.9, 0.3, 0.2], [0.85, 0.8, 0.25], [0.6, 0.75, 0.35], [0.55, 0.65, 0.45]]


def test_decoded_positions_count_as_certain():
    found = rows(readings(one_block(), decoded="one"))
    assert found == [[0.9, 0.3, 0.2], [1.0, 0.8, 0.25], [0.6, 1.0, 0.35], [1.0, 1.0, 0.45]]


def test_decoded_positions_keep_what_they_were_accepted_with():
    found = rows(readings(one_block(), decoded="at_accept"))
    assert found == [[0.9, 0.3, 0.2], [0.9, 0.8, 0.25], [0.6, 0.8, 0.35], [0.6, 0.8, 0.45]]


def test_what_was_just_accepted_is_scaled_once():
    found = rows(readings(one_block(), flip_scale=0.5, decoded="at_accept"))
    assert found == [[0.45, 0.3, 0.2], [0.9, 0.4, 0.25], [0.6, 0.8, 0.35], [0.6, 0.8, 0.45]]


@pytest.mark.parametrize("decoded", ["prob", "one", "at_accept"])
def test_without_the_oracle_gates_see_the_forward_before(decoded):
    own, lagged = (readings(one_block(), same_iter=same, decoded=decoded) for same in (True, False))
    assert rows(lagged) == [[1.0, 1.0, 1.0], *rows(own[:-1])]


def test_plain_readings_are_those_of_the_steps():
    shape, passes = random_passes(np.random.default_rng(3), batch=2, edits=True)
    found = read_all(passes, shape, same_iter=False, decoded="prob", flip_scale=1.0)
    steps = Steps(shape)
    for pass_ in passes:
        step = step_at(steps.read(pass_), 0)
        assert (confidence_at(found, step) == step.confidence).all()
        assert (confidence_at(None, step) == step.confidence).all()


def test_another_trace_is_refused():
    shape, passes = random_passes(np.random.default_rng(3), prompt_length=0, num_requests=1)
    found = read_all(passes[:1], shape, same_iter=False, decoded="prob", flip_scale=1.0)
    steps = Steps(shape)
    steps.read(passes[0])
    with pytest.raises(PolicyError, match="shorter trace"):
        confidence_at(found, step_at(steps.read(passes[1]), 0))
    wide = pass_of(np.zeros((3, 9, 4), np.int64) + np.arange(4))
    with pytest.raises(PolicyError, match="another trace"):
        confidence_at(found, step_at(Steps(shape).read(wide), 0))
    with pytest.raises(PolicyError, match="there are no passes"):
        read_all([], shape, same_iter=False, decoded="one", flip_scale=1.0)
