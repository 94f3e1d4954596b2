"""Rows for multiplication: training and test problems that share no pair."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from skyrl_mega.envs.pairs import disjoint_pairs
from skyrl_mega.envs.row import row

SYSTEM = "You solve multiplication problems. Give the product in \\boxed{}, for example \\boxed{42}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m skyrl_mega.data multiply`."""
    parser.add_argument("--train", type=int, default=10000, help="training problems")
    parser.add_argument("--test", type=int, default=200, help="held-out problems")
    parser.add_argument("--digits", type=int, default=4, choices=range(1, 10), help="digits of each number")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """File name → rows. Deterministic in `args.seed`."""
    train, test = disjoint_pairs(args.digits, args.train, args.test, np.random.default_rng(args.seed))
    return {
        "train.parquet": (_row(a, b, args.digits, "train") for a, b in train.tolist()),
        "test.parquet": (_row(a, b, args.digits, "test") for a, b in test.tolist()),
    }


def _row(a: int, b: int, digits: int, split: str) -> dict[str, Any]:
    return row(
        data_source="synthetic_multiply",
        prompt=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{a} * {b}"}],
        env_class="multiply",
        ground_truth=str(a * b),
        extra_info={"num_digits": digits, "split": split},
    )
