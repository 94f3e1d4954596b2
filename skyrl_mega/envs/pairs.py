"""Pairs of numbers for arithmetic, with disjoint training and test sets."""

from __future__ import annotations

import numpy as np

# Loaded here, not at its first use: a signal's exception is lost while numpy loads its extension modules.
from numpy.random import Generator

from skyrl_mega.common.errors import UserError

ENUMERATE_UP_TO = 3
"""Largest number of digits for listing every pair (405,450 unordered pairs); above it, pairs are drawn at random and
duplicates dropped.
"""


def disjoint_pairs(
    digits: int, train: int, test: int, rng: Generator, second: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draws distinct pairs of numbers for training and testing.

    A pair and its mirror image (27, 58 and 58, 27) are always in the same set, so every test problem is new.

    Args:
        digits: Digits of each number, 1 to 9; the first digit is not 0.
        train: Number of training pairs.
        test: Number of test pairs.
        rng: Random generator for the choice.
        second: Digits of the second number; None for as many as the first.

    Returns:
        int64 [train, 2] and [test, 2], in random order.

    Raises:
        UserError: The digits allow fewer pairs than requested.
    """
    second = second or digits
    if second == digits:
        unordered = _unordered_pairs(digits, train + test, rng)
        cut = -(-test // 2) if digits > ENUMERATE_UP_TO else _first_with(unordered, test)
        test_pairs, train_pairs = _both_orders(unordered[:cut], rng), _both_orders(unordered[cut:], rng)
    else:
        pairs = _ordered_pairs(digits, second, train + test, rng)
        test_pairs, train_pairs = pairs[:test], pairs[test:]
    if len(train_pairs) < train or len(test_pairs) < test:
        numbers = f"--digits {digits}" if second == digits else f"--digits {digits} and --second {second}"
        raise UserError(
            f"numbers of {numbers} form {81 * 10 ** (digits + second - 2)} pairs, of which "
            f"{len(train_pairs)} remain for training",
            key="--train",
            value=f"{train} --test {test}",
            fix="ask for fewer or for more digits",
        )
    return train_pairs[:train], test_pairs[:test]


def _ordered_pairs(first: int, second: int, wanted: int, rng: Generator) -> np.ndarray:
    """Returns pairs of a `first`-digit and a `second`-digit number; no pair is the mirror image of another."""
    lows = np.array([10 ** (first - 1), 10 ** (second - 1)])
    if first + second <= 2 * ENUMERATE_UP_TO:
        numbers = [np.arange(low, 10 * low) for low in lows]
        return rng.permutation(np.stack(np.meshgrid(*numbers), axis=-1).reshape(-1, 2))
    drawn = rng.integers(lows, 10 * lows, size=(wanted + wanted // 4 + 16, 2))
    return rng.permutation(np.unique(drawn, axis=0))


def _unordered_pairs(digits: int, wanted: int, rng: Generator) -> np.ndarray:
    low, high = 10 ** (digits - 1), 10**digits
    if digits <= ENUMERATE_UP_TO:
        a, b = np.triu_indices(high - low)
        return rng.permutation(np.stack([a, b], axis=1) + low)
    drawn = np.sort(rng.integers(low, high, size=(wanted + wanted // 4 + 16, 2)), axis=1)
    return rng.permutation(np.unique(drawn, axis=0))


def _first_with(unordered: np.ndarray, count: int) -> int:
    """Returns the number of unordered pairs needed for `count` ordered pairs; pairs of equal numbers count once."""
    ordered = np.cumsum(np.where(unordered[:, 0] == unordered[:, 1], 1, 2))
    return int(np.searchsorted(ordered, count)) + 1 if count else 0


def _both_orders(unordered: np.ndarray, rng: Generator) -> np.ndarray:
    mirrored = unordered[unordered[:, 0] != unordered[:, 1]][:, ::-1]
    return rng.permutation(np.concatenate([unordered, mirrored]))
