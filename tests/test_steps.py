import numba
import numpy as np
import pytest
from hypothesis import given, settings
from reference import pass_of, shape_of
from strategies import change, random_passes, traces

from policies.steps import Steps, count_load, end_of, read_confidence, signals_at, step_at
from tracer.schema import ForwardKind, TraceError

UNKNOWN = np.nan


def reading(passes, shape):
    steps = Steps(shape)
    return [steps.read(pass_) for pass_ in passes]


def forward_of(pass_id, p_argmax, *, request=0, block=0, **columns):
    """A pass of one layer whose tokens all go to expert 0, and whose confidences are all that matters."""
    ids = np.zeros((1, len(p_argmax), 1), np.int64)
    return pass_of(ids, pass_id, requests=[request], blocks=[block], p_argmax=np.array(p_argmax), **columns)


def shown(passes):
    return [forward.confidence.tolist() for forward in reading(passes, shape_of(1, 2))]


def test_a_gate_sees_the_confidence_of_the_forward_before():
    passes = [forward_of(0, [0.9, 0.2]), forward_of(1, [0.8, 0.7]), forward_of(2, [0.6, 0.5])]
    assert shown(passes) == [[1, 1], [0.9, 0.2], [0.8, 0.7]]


def test_confidence_is_of_the_best_token_where_masked_or_edited_else_of_the_present_one():
    pass_ = forward_of(
        0,
        [0.9, 0.8, 0.7],
        is_masked_in=[True, False, False],
        edited=[False, True, False],
        p_current=[UNKNOWN, 0.1, 0.6],
    )
    assert read_confidence(pass_).tolist() == [0.9, 0.8, 0.6]
    assert shown([pass_, forward_of(1, [0.5, 0.5, 0.5])])[1] == [0.9, 0.8, 0.6]
    assert end_of(reading([pass_], shape_of(1, 2))[0]).confidence.tolist() == [0.9, 0.8, 0.6]


def test_a_new_block_and_prefill_start_with_full_confidence():
    prefill = forward_of(0, [UNKNOWN, UNKNOWN], block=-1, kind=ForwardKind.PREFILL, is_masked_in=[False, False])
    passes = [
        prefill,
        forward_of(1, [0.9, 0.2]),
        forward_of(2, [0.3, 0.4], kind=ForwardKind.COMMIT),
        forward_of(3, [0.5, 0.6], block=1),
    ]
    assert shown(passes) == [[1, 1], [1, 1], [0.9, 0.2], [1, 1]]
    assert end_of(reading(passes, shape_of(1, 2))[0]).confidence.tolist() == [1, 1]


def test_requests_do_not_see_each_other():
    together = pass_of(np.zeros((1, 4, 1), np.int64), 1, requests=[0, 3], blocks=[0, 0], p_argmax=[0.1, 0.2, 0.3, 0.4])
    passes = [
        forward_of(0, [0.9, 0.8]),
        together,
        forward_of(2, [0.5, 0.5], request=3),
        forward_of(3, [0.7, 0.7], request=0),
        forward_of(4, [0.6, 0.6], request=3),
    ]
    assert shown(passes) == [[1, 1], [0.9, 0.8, 1, 1], [0.3, 0.4], [0.1, 0.2], [0.5, 0.5]]


def test_confidence_follows_the_position():
    passes = [forward_of(0, [0.9, 0.8, 0.7], positions=[4, 5, 6]), forward_of(1, [0.5, 0.5], positions=[6, 7])]
    assert shown(passes)[1] == [0.7, 1]


@given(traces())
def test_equals_a_search_through_all_earlier_forwards(trace):
    shape, passes = trace
    for index, (pass_, forward) in enumerate(zip(passes, reading(passes, shape), strict=True)):
        expected = []
        for request, block, position in zip(
            pass_.token_requests(pass_.requests), pass_.token_requests(pass_.blocks), pass_.positions, strict=True
        ):
            found = 1.0
            for other in passes[:index]:
                rows = np.flatnonzero(
                    (other.token_requests(other.requests) == request)
                    & (other.token_requests(other.blocks) == block)
                    & (other.positions == position)
                )
                if block >= 0 and rows.size:
                    row = rows[0]
                    best = other.is_masked_in[row] or other.edited[row]
                    found = other.p_argmax[row] if best else other.p_current[row]
            expected.append(found)
        assert forward.confidence.tolist() == expected


@given(traces(signals=None))
def test_signals_are_of_the_gate_and_empty_where_the_trace_has_none(trace):
    shape, passes = trace
    steps = Steps(shape, reads_signals=True)
    for pass_ in passes:
        forward, kept = steps.read(pass_), pass_.signals
        size = pass_.positions.size
        for layer in range(shape.num_layers):
            found = step_at(forward, layer).signals
            assert (found.token_ids == pass_.token_ids_in).all()
            assert (found.positions == pass_.positions).all()
            if kept is None:
                assert [found.score_ids.shape, found.scores.shape, found.sketch.shape] == [(size, 0)] * 3
                assert found.input_norm.shape == (0,)
                assert found.ahead_ids.shape == (3, size, 0)
            else:
                assert (found.sketch == kept.sketch).all()
                for name in ("score_ids", "scores", "input_norm", "ahead_ids"):
                    assert (getattr(found, name) == getattr(kept, name)[layer]).all()
            for array in found:
                assert not array.flags.writeable
                assert array.flags.c_contiguous
                assert array.dtype in (np.int64, np.float64)


@given(traces(signals=True))
@settings(max_examples=10)
def test_a_policy_that_does_not_read_signals_is_not_given_any(trace):
    shape, passes = trace
    assert all(step_at(forward, 0).signals is None for forward in reading(passes, shape))


def test_numba_cuts_steps_with_signals_and_without():
    shape, passes = random_passes(np.random.default_rng(0), signals=True)
    cut = numba.njit(signals_at)
    for reads_signals in (True, False):
        forward = Steps(shape, reads_signals).read(passes[0])
        found, expected = cut(forward.signals, 1), signals_at(forward.signals, 1)
        assert (found is None) == (expected is None)
        for one, two in zip(found or (), expected or (), strict=True):
            assert (one == two).all()


@given(traces())
def test_steps_hold_the_pass(trace):
    shape, passes = trace
    for index, (pass_, forward) in enumerate(zip(passes, reading(passes, shape), strict=True)):
        for layer in range(shape.num_layers):
            step = step_at(forward, layer)
            assert (step.forward, step.layer, step.kind) == (index, layer, int(pass_.kind))
            assert (step.expert_ids == pass_.expert_ids[layer]).all()
            assert (step.gates == pass_.gates[layer]).all()
            assert step.load.tolist() == [(pass_.expert_ids[layer] == e).sum() for e in range(shape.num_experts)]
            assert step.request.tolist() == np.repeat(pass_.requests, pass_.num_tokens).tolist()
            assert step.block.tolist() == np.repeat(pass_.blocks, pass_.num_tokens).tolist()
            assert step.iteration.tolist() == np.repeat(pass_.iterations, pass_.num_tokens).tolist()
        assert step.load.sum() == pass_.num_tokens.sum() * shape.top_k


def test_arrays_are_read_only_and_of_one_kind_whatever_the_reader_gave():
    shape, passes = random_passes(np.random.default_rng(0))
    loose = [
        change(p, expert_ids=np.asfortranarray(p.expert_ids.astype(np.uint16)), gates=p.gates.astype(np.float32))
        for p in passes[:2]
    ]
    for forward in reading([*loose, *passes[2:]], shape):
        for part in (*step_at(forward, 1), *end_of(forward)):
            if isinstance(part, np.ndarray):
                assert not part.flags.writeable
                assert part.flags.c_contiguous
                assert part.dtype in (np.int64, np.float64)


def test_reading_leaves_the_pass_as_it_was():
    pass_ = forward_of(0, [0.9, 0.2])
    before = pass_.p_argmax.copy()
    reading([pass_], shape_of(1, 2))
    assert (pass_.p_argmax == before).all()
    assert pass_.expert_ids.flags.writeable


def test_load_counts_tokens():
    assert count_load(np.array([[[0, 2], [2, 3]], [[1, 0], [1, 2]]]), 4).tolist() == [[1, 0, 2, 1], [1, 2, 1, 0]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.full((2, 1, 1), 4), "pass 7: expert ids from 4 to 4, allowed are 0 to 3"),
        (np.full((2, 1, 1), -1), "pass 7: expert ids from -1 to -1, allowed are 0 to 3"),
        (np.zeros((1, 1, 1), int), r"pass 7: expert_ids are \(1, 1, 1\), the trace's shape needs \(2, 1, 1\)"),
    ],
)
def test_refuses_routing_of_another_shape(ids, message):
    with pytest.raises(TraceError, match=message):
        Steps(shape_of(2, 4)).read(pass_of(ids, 7))
