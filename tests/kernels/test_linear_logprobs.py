"""Tests of the fused head in torch: log_softmax for all shapes, memory, refusals. The kernel is tested in
test_triton.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.kernels import linear_logprobs as head_of
from skyrl_mega.kernels.linear_logprobs import Head, Inputs
from tests.kernels import head_cases
from tests.kernels.head_cases import Case

CASES = st.builds(
    Case,
    tokens=st.integers(1, 40),
    width=st.integers(1, 40),
    vocab=st.integers(1, 3000),
    ranks=st.sampled_from([1, 2, 4]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    soft_cap=st.sampled_from([None, 2.0, 30.0]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    padding=st.integers(0, 600),
    floor=st.booleans(),
    entropy=st.booleans(),
)


@given(CASES)
@settings(max_examples=40, deadline=None)
def test_it_is_log_softmax(case: Case) -> None:
    head_cases.like_autograd(case, torch.float64, "cpu", by_kernel=False, near=1e-9)


@pytest.mark.parametrize("case", head_cases.RAGGED, ids=str)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 3e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_in_lower_precision(case: Case, dtype: torch.dtype, near: float) -> None:
    if case.scale < 1e4:  # a larger scale changes the distribution by rounding
        head_cases.like_autograd(case, dtype, "cpu", by_kernel=False, near=near)


def test_extreme_logits() -> None:
    head_cases.extremes_are_exact("cpu", torch.float32, by_kernel=False)


def test_parts_and_chunks_are_whole_tiles_and_no_more_than_there_are() -> None:
    for columns in (1, 255, 256, 257, 8448, 8449, 37984, 151936, 262144):
        wide, parts = head_of.split_columns(columns), head_of.splits(columns)
        assert parts <= head_of.SPLITS and wide % head_of.TILE_COLUMNS == 0
        assert (parts - 1) * wide < columns <= parts * wide
        chunk = head_of.chunk_columns(columns, 2048)
        assert chunk == min(columns, 2048)


def test_a_twentieth_of_the_chunked_heads_memory() -> None:
    """Compares memory at 30B's head with 8,192 tokens. The chunked head holds a chunk's logits twice and the weight's
    gradient in float32."""
    chunked = 1024 * 151936 * 8 + 151936 * 2048 * 4
    assert head_of.backward_bytes(8192, 151936, 2048, 2) == 8192 * (2048 * 2 + 2048 * 4) < chunked / 20
    assert head_of.forward_bytes(8192, 151936) == 4 * 4 * 33 * 8192 < 1024 * 151936 * 16 / 500


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight, targets = torch.zeros(3, 4), torch.zeros(7, 4), torch.zeros(3, dtype=torch.int64)
    Inputs(hidden, weight, targets, Head(7))
    for wrong in (
        (hidden, torch.zeros(7, 5), targets, Head(7)),
        (hidden, weight.double(), targets, Head(7)),
        (hidden, weight, targets[:2], Head(7)),
        (hidden, weight, targets, Head(8)),
    ):
        with pytest.raises(ValueError, match=r"no head's inputs|valid ones"):
            Inputs(*wrong)
