import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_oled import quotas, shares

from policies.capacity import apportion, smooth


def divide(weights, total, lowest, highest):
    return apportion(np.array(weights, float), total, lowest, highest).tolist()


def test_worked_example_of_weights():
    ratio, utilization = np.array([0.2, 0.4, 0.4]), np.array([0.5, 0.5, 1.0])
    assert divide(ratio * utilization, 10, 1, 256) == [1, 3, 6]
    assert [f"{float(quota):.3f}" for quota in quotas((1, 2, 4), 10, 1, 256)] == ["1.429", "2.857", "5.714"]
    assert divide(ratio * utilization, 10_000, 1_000, 256_000) == [1_429, 2_857, 5_714]  # to a thousandth of a slot


@pytest.mark.parametrize(
    ("weights", "total", "slots"),
    [((0, 1, 1), 30, [8, 11, 11]), ((1, 10, 10), 600, [88, 256, 256]), ((1, 1, 100), 300, [22, 22, 256])],
)
def test_worked_examples_of_bounds(weights, total, slots):
    assert divide(weights, total, 8, 256) == slots


def test_layers_without_weight_share_what_the_others_cannot_use():
    assert divide((0, 3, 0), 13, 1, 8) == [3, 8, 2]
    assert divide((0, 3, 0), 24, 1, 8) == [8, 8, 8]


def test_equal_remainders_go_to_the_lower_layer():
    assert divide((1, 4, 7), 4, 0, 9) == [1, 1, 2]
    assert divide((1, 1, 1), 10, 1, 9) == [4, 3, 3]


@st.composite
def divisions(draw):
    num_layers = draw(st.integers(1, 8))
    weight = draw(st.sampled_from([st.integers(0, 4), st.integers(0, 2**20), st.sampled_from([0, 1, 2**20])]))
    weights = draw(st.lists(weight, min_size=num_layers, max_size=num_layers).filter(any))
    lowest = draw(st.integers(0, 8))
    highest = draw(st.integers(lowest, lowest + draw(st.sampled_from([0, 3, 256]))))
    return weights, draw(st.integers(num_layers * lowest, num_layers * highest)), lowest, highest


@given(divisions())
def test_equals_exact_fractions(division):
    assert divide(*division) == shares(*division)


@given(divisions())
def test_sums_up_within_bounds_and_favours_weight(division):
    weights, total, lowest, highest = division
    slots = divide(*division)
    assert sum(slots) == total
    assert all(lowest <= size <= highest for size in slots)
    for one, two in zip(weights, slots, strict=True):
        assert all(two <= other for weight, other in zip(weights, slots, strict=True) if one < weight)


@given(divisions(), st.data())
def test_more_weight_never_costs_slots(division, data):
    weights, total, lowest, highest = division
    layer = data.draw(st.integers(0, len(weights) - 1))
    more = [*weights]
    more[layer] += data.draw(st.integers(1, 2**20))
    assert divide(more, total, lowest, highest)[layer] >= divide(weights, total, lowest, highest)[layer]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 10_000))
def test_any_real_weights_sum_up(weights, per_layer):
    if any(weights):
        slots = divide(weights, per_layer * len(weights), 1, 10_000)
        assert sum(slots) == per_layer * len(weights)
        assert min(slots) >= 1


def smoothed_of(values, ema):
    history, smoothed = np.zeros((5, 1, 1)), np.zeros((1, 1))
    found = []
    for count, value in enumerate(values):
        smooth(np.array([[value]]), history, smoothed, count, ema)
        found.append(float(smoothed[0, 0]))
    return found


def test_smoothing_starts_with_the_first_value():
    assert smoothed_of([3.0, 0.0, 9.0], 1 / 3) == pytest.approx([3.0, 2.0, 13 / 3])
    assert smoothed_of([3.0, 0.0, 9.0], 1.0) == [3.0, 0.0, 9.0]


def test_window_is_the_mean_of_the_last_five():
    assert smoothed_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 0.0) == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0])
