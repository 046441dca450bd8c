import pytest

from simulator.clock import Clock, Stage


def test_what_is_past_cannot_be_scheduled():
    clock = Clock()
    clock.wait(clock.at(Stage.LAND, 7))
    with pytest.raises(ValueError, match="ISSUE at 7 ns: delay_ns is -1, must be at least 0"):
        clock.at(Stage.ISSUE, -1)
    clock.wait(clock.at(Stage.PICK))
    assert clock.now_ns == 7
