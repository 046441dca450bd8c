import numpy as np
import pytest

from policies.retention import by_priority, lowest_first

SIZES = (0, 1, 2, 63, 64, 65, 128, 129, 300, 1000)  # a run of the sort is 64


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_values", [1, 3, 1_000_000])
def test_by_priority_is_a_sort_by_priority_then_id(size, num_values):
    rng = np.random.default_rng(size + num_values)
    members, priority = rng.random(size) < 0.9, rng.integers(0, num_values, size) / 7
    expected = sorted(np.flatnonzero(members), key=lambda index: (-priority[index], index))
    assert by_priority(members, priority).tolist() == expected
    assert by_priority(members, np.where(members, np.inf, priority)).tolist() == np.flatnonzero(members).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_values", [1, 3, 1_000_000])
def test_lowest_first_puts_the_lowest_in_front_and_loses_nobody(size, num_values):
    rng = np.random.default_rng(size + num_values)
    first, second = (rng.integers(0, num_values, 2 * size) for _ in range(2))
    numbers = rng.permutation(2 * size)[:size]
    ranked = sorted(numbers, key=lambda number: (first[number], second[number], -number))
    for count in (0, 1, size // 2, size - 1, size, size + 1):
        if count >= 0:
            moved = numbers.copy()
            lowest_first(moved, count, first, second)
            assert sorted(moved[:count]) == sorted(ranked[:count])
            assert sorted(moved) == sorted(numbers)
