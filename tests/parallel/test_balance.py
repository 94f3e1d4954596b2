"""Tests of balance: properties for any lengths, quality against brute force and on lengths of rollouts."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.parallel.balance import balance
from tests.support.machine import within


@given(
    lengths=st.lists(st.integers(0, 60), max_size=60),
    ranks=st.integers(1, 6),
    budget=st.integers(1, 50),
    multiple=st.integers(1, 4),
)
@settings(max_examples=400, deadline=None)
def test_contract(lengths: list[int], ranks: int, budget: int, multiple: int) -> None:
    dealt = balance(lengths, ranks, budget, multiple)
    assert len(dealt) == ranks
    micros = len(dealt[0])
    assert micros >= 1 and micros % multiple == 0
    assert all(len(rank) == micros for rank in dealt)
    flat = [i for rank in dealt for micro in rank for i in micro]
    assert sorted(flat) == list(range(len(lengths)))
    for micro in itertools.chain(*dealt):
        assert sum(lengths[i] for i in micro) <= budget or len([i for i in micro if lengths[i]]) == 1
    if len(lengths) >= ranks * micros:
        assert all(micro for rank in dealt for micro in rank)


def fewest_bins(lengths: list[int], budget: int) -> int:
    """Returns the smallest number of bins by exhaustive search."""
    best = len(lengths)

    def place(i: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best and i < len(lengths):
            return
        if i == len(lengths):
            best = min(best, len(bins))
            return
        for b in range(len(bins)):
            if bins[b] + lengths[i] <= budget:
                place(i + 1, [*bins[:b], bins[b] + lengths[i], *bins[b + 1 :]])
        place(i + 1, [*bins, lengths[i]])

    place(0, [])
    return best


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_micro_batches_are_few(lengths: list[int]) -> None:
    """Compares with the bound of first-fit decreasing: at most 11/9 of the fewest bins, plus 6/9 (Dosa 2007)."""
    (rank,) = balance(lengths, 1, 20)
    assert len(rank) <= 11 / 9 * fewest_bins(lengths, 20) + 6 / 9


@pytest.mark.parametrize("ranks, multiple", [(2, 1), (8, 1), (8, 4), (32, 1)])
def test_ranks_are_even_on_rollout_lengths(ranks: int, multiple: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 0.8, size=2048), 32, 8192).astype(int).tolist()
    dealt = balance(lengths, ranks, 16384, multiple)
    tokens = np.array([sum(lengths[i] for micro in rank for i in micro) for rank in dealt])
    assert tokens.max() <= 1.02 * tokens.mean()
    micros = len(dealt[0])
    assert micros <= -(-sum(lengths) // (16384 * ranks)) + multiple


def test_nothing_to_deal() -> None:
    assert balance([], 2, 10, 3) == [[[], [], []], [[], [], []]]


def test_long_sequences_are_dealt_in_little_time() -> None:
    """Balances sequences with four nearly filling a micro-batch, so many numbers of micro-batches are tried in vain."""
    lengths = [32_000] * 8192
    begun = time.process_time()
    dealt = balance(lengths, 2, 131_072)
    assert within(time.process_time() - begun, 2)  # 0.1 s; 4 s with a linear search of the bins for each number
    assert {len(micro) for rank in dealt for micro in rank} == {4}
