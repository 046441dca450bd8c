import numpy as np
import pytest

from policies.pool import number_in_pool, part_of_pool, pool_of


@pytest.mark.parametrize(
    ("capacity", "pool", "number", "part"),
    [([1, 2, 1], 1, 3, [4, 5, 6, 7]), ([4], 0, 7, list(range(12)))],
)
def test_a_layer_has_a_pool_of_its_own_or_shares_one(capacity, pool, number, part):
    capacity, experts = np.array(capacity), np.arange(12).reshape(3, 4)
    assert pool_of(capacity, 1) == pool
    assert number_in_pool(capacity, 4, 1, 3) == number
    assert part_of_pool(capacity, 1, experts).tolist() == part
    assert part_of_pool(capacity, 1, experts)[number] == experts[1, 3]


def test_one_layer_alone_is_the_same_either_way():
    capacity, experts = np.array([2]), np.arange(4)[None]
    assert (pool_of(capacity, 0), number_in_pool(capacity, 4, 0, 3)) == (0, 3)
    assert part_of_pool(capacity, 0, experts).tolist() == [0, 1, 2, 3]


def test_the_part_is_written_through():
    experts = np.zeros((2, 3), bool)
    part_of_pool(np.array([4]), 1, experts)[4] = True
    assert experts[1].tolist() == [False, True, False]
