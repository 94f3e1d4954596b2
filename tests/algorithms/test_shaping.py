"""DAPO's length shaping against equation 13, computed by cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.algorithms.shaping import soft_overlong


def equation_13(length: int, limit: int, buffer: int) -> float:
    if length <= limit - buffer:
        return 0.0
    if length <= limit:
        return ((limit - buffer) - length) / buffer
    return -1.0


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=20),
    limit=st.integers(1, 150),
    share=st.floats(0.01, 1),
    penalty=st.floats(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_soft_overlong_is_equation_13(lengths: list[int], limit: int, share: float, penalty: float) -> None:
    buffer = max(1, int(limit * share))
    got = soft_overlong(torch.tensor(lengths), limit, buffer, penalty).tolist()
    assert got == pytest.approx([penalty * equation_13(n, limit, buffer) for n in lengths], rel=1e-5, abs=1e-6)


def test_no_buffer_no_punishment() -> None:
    assert soft_overlong(torch.tensor([5, 500]), limit=10, buffer=0).tolist() == [0, 0]
