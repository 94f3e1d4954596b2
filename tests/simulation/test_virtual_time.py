"""Time that jumps."""

from __future__ import annotations

import pytest

from skyrl_mega.simulation.virtual_time import VirtualLoop


def test_time_passes_for_who_looks_more_often_than_the_clock_ticks() -> None:
    with VirtualLoop(tick_s=10.0) as loop:
        for times in range(1, 4):
            loop.wait(lambda: False, 1.0)
            assert loop.now == pytest.approx(10.0 * times)
