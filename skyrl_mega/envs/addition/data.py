"""Rows for addition: disjoint training and test problems, and demonstrations with a share of wrong answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from skyrl_mega.config.command import ROWS, integer, real
from skyrl_mega.envs.addition.env import units_first
from skyrl_mega.envs.pairs import disjoint_pairs
from skyrl_mega.envs.row import row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data addition`."""
    parser.add_argument("--train", type=integer(1, ROWS), default=6000, help="training problems")
    parser.add_argument("--test", type=integer(0, ROWS), default=512, help="held-out problems")
    parser.add_argument(
        "--demonstrations", type=integer(0, ROWS), default=20000, help="solved training problems for the warm-up"
    )
    parser.add_argument("--wrong", type=real(0, 1), default=0.3, help="share of the demonstrations that are wrong")
    parser.add_argument("--digits", type=integer(1, 9), default=2, help="digits of each number")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name → rows, to be read once: `train.parquet`, `test.parquet` (also with no row), and
    `demonstrations.parquet` if requested. Deterministic in `args.seed`.

    Demonstrations are drawn with repetition from the training problems. Exactly the share `args.wrong` shows the sum of
    another problem, so a model trained on the demonstrations gives wrong answers equally often and leaves real work for
    RL.

    Raises:
        UserError: `args.digits` allows fewer problems than requested.
    """
    rng = np.random.default_rng(args.seed)
    train, test = disjoint_pairs(args.digits, args.train, args.test, rng)
    tables: dict[str, Iterator[dict[str, Any]]] = {
        "train.parquet": (_row(a, b, args.digits, "train") for a, b in train.tolist()),
        "test.parquet": (_row(a, b, args.digits, "test") for a, b in test.tolist()),
    }
    if args.demonstrations:
        demonstrated = train[rng.integers(len(train), size=args.demonstrations)]
        wrong = rng.permutation(args.demonstrations) < round(args.wrong * args.demonstrations)
        answers = np.where(wrong, _other_sums(demonstrated.sum(axis=1), args.digits, rng), demonstrated.sum(axis=1))
        tables["demonstrations.parquet"] = (
            _row(a, b, args.digits, "demonstrations", demonstration=units_first(answer), wrong=is_wrong)
            for (a, b), answer, is_wrong in zip(demonstrated.tolist(), answers.tolist(), wrong.tolist(), strict=True)
        )
    return tables


def _other_sums(sums: np.ndarray, digits: int, rng: np.random.Generator) -> np.ndarray:
    """Returns, for each sum, a different sum of two numbers of `digits` digits, drawn uniformly."""
    low, high = 2 * 10 ** (digits - 1), 2 * (10**digits - 1)
    drawn = rng.integers(low, high, size=len(sums))  # one value short of the range, so the sum itself can be skipped
    return drawn + (drawn >= sums)


def _row(a: int, b: int, digits: int, split: str, **extra: Any) -> dict[str, Any]:
    return row(
        data_source="addition",
        prompt=[{"role": "user", "content": f"{a}+{b}"}],
        env_class="addition",
        ground_truth=units_first(a + b),
        extra_info={"digits": digits, "split": split, **extra},
    )
