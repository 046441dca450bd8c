import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_oled import priorities

from policies.contract import PolicyError
from policies.priority import CONFIDENCE, GATE, LOAD, SIGNALS, priority

# t0: e0 .6, e1 .4; t1: e0 .5, e2 .5; t2: e2 .7, e3 .3
IDS = np.array([[0, 1], [0, 2], [2, 3]])
GATES = np.array([[0.6, 0.4], [0.5, 0.5], [0.7, 0.3]])
CONFIDENCES = np.array([0.9, 0.5, 0.2])


def test_worked_example():
    found = priority(IDS, GATES, CONFIDENCES, CONFIDENCE, 5)
    assert found == pytest.approx([0.79 / 1.6, 0.36 / 1.6, 0.39 / 1.6, 0.06 / 1.6, 0])
    assert found.round(5).tolist() == [0.49375, 0.225, 0.24375, 0.0375, 0]  # two of them halves at the fourth digit


def test_sure_tokens_leave_the_gates_and_another_expert_is_best():
    sure = priority(IDS, GATES, np.ones(3), CONFIDENCE, 4)
    assert sure.round(4).tolist() == [0.3667, 0.1333, 0.4, 0.1]
    assert sure.argmax() == 2
    assert priority(IDS, GATES, CONFIDENCES, CONFIDENCE, 4).argmax() == 0
    assert (priority(IDS, GATES, CONFIDENCES, GATE, 4) == sure).all()


def test_load_counts_tokens():
    assert priority(IDS, GATES, CONFIDENCES, LOAD, 4) == pytest.approx(np.array([2, 1, 2, 1]) / 6)


def test_without_any_certainty_all_tokens_count_alike():
    assert (priority(IDS, GATES, np.zeros(3), CONFIDENCE, 4) == priority(IDS, GATES, np.ones(3), GATE, 4)).all()


def test_unknown_confidence_is_refused_where_it_counts():
    unknown = np.array([0.9, np.nan, 0.2])
    with pytest.raises(PolicyError, match="does not know the confidence"):
        priority(IDS, GATES, unknown, CONFIDENCE, 4)
    assert priority(IDS, GATES, unknown, GATE, 4).sum() == pytest.approx(1)


@st.composite
def routes(draw):
    num_experts = draw(st.integers(1, 12))
    num_tokens, top_k = draw(st.integers(1, 8)), draw(st.integers(1, num_experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)
    confidence = np.where(rng.random(num_tokens) < 0.2, 0.0, rng.random(num_tokens))
    return order[:, :top_k].copy(), rng.dirichlet(np.ones(top_k), num_tokens), confidence, num_experts


@given(routes(), st.sampled_from(SIGNALS[1:]))
def test_equals_the_plain_sums_to_the_last_bit(route, signal):
    ids, gates, confidence, num_experts = route
    plain = priorities(ids.tolist(), gates.tolist(), confidence.tolist(), signal)
    found = priority(ids, gates, confidence, SIGNALS.index(signal), num_experts)
    assert found.tolist() == [plain.get(expert, 0.0) for expert in range(num_experts)]


@given(routes(), st.sampled_from([CONFIDENCE, GATE, LOAD]), st.sampled_from([0.25, 2.0]))
def test_sums_to_one_and_ignores_scale(route, signal, scale):
    ids, gates, confidence, num_experts = route
    found = priority(ids, gates, confidence, signal, num_experts)
    assert found.sum() == pytest.approx(1)
    assert (found >= 0).all()
    # a power of two scales every partial sum exactly
    assert (priority(ids, scale * gates, confidence, signal, num_experts) == found).all()
    assert (priority(ids, gates, scale * confidence, signal, num_experts) == found).all()


@given(routes())
def test_equal_gates_of_sure_tokens_count_tokens(route):
    ids, gates, confidence, num_experts = route
    found = priority(ids, np.ones_like(gates), np.ones_like(confidence), CONFIDENCE, num_experts)
    assert (found == priority(ids, gates, confidence, LOAD, num_experts)).all()
