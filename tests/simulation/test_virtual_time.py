"""Virtual time."""

from __future__ import annotations

import pytest

from skyrl_mega.simulation.virtual_time import VirtualLoop


def test_what_is_rounded_off_is_of_the_next_time() -> None:
    with VirtualLoop(tick_s=10.0) as loop:
        for _ in range(50):
            loop.sleep(4.0)
            loop.sleep(14.4)
        assert loop.now == pytest.approx(50 * 18.4, abs=5.0)


def test_time_passes_for_who_looks_more_often_than_the_clock_ticks() -> None:
    with VirtualLoop(tick_s=10.0) as loop:
        for times in range(1, 4):
            loop.wait(lambda: False, 1.0)
            assert loop.now == pytest.approx(10.0 * times)
