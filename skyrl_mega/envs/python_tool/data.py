"""Rows for questions answered by a short program, but not by a guess."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import integer
from skyrl_mega.envs.row import row

SYSTEM = (
    "You answer questions with the help of Python. To run a program write it inside <python>…</python>; what it prints "
    "comes back inside <output>…</output>. When you know the answer, give it inside <answer>…</answer>."
)


def _primes(n: int, k: int) -> tuple[str, int]:
    total = sum(p for p in range(n, n + k) if p > 1 and all(p % d for d in range(2, math.isqrt(p) + 1)))
    return f"What is the sum of the prime numbers p with {n} <= p < {n + k}?", total


def _digits(n: int, k: int) -> tuple[str, int]:
    return f"What is the sum of the decimal digits of {n} to the power {k}?", sum(map(int, str(n**k)))


def _divisors(n: int, k: int) -> tuple[str, int]:
    number = n * k
    return f"How many positive divisors does {number} have?", sum(number % d == 0 for d in range(1, number + 1))


def _power(n: int, k: int) -> tuple[str, int]:
    return f"What is {n} to the power {k} modulo 10007?", pow(n, k, 10007)


KINDS: list[Callable[[int, int], tuple[str, int]]] = [_primes, _digits, _divisors, _power]
QUESTIONS = 597_571
"""Number of different questions of all kinds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data python`."""
    parser.add_argument("--train", type=integer(1, QUESTIONS), default=1000, help="training questions (default: 1000)")
    parser.add_argument("--test", type=integer(0, QUESTIONS), default=200, help="held-out questions (default: 200)")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows. Questions are unique, within and across the files.
    Deterministic in `args.seed`.

    Raises:
        UserError: More than `QUESTIONS` questions are requested.
    """
    if args.train + args.test > QUESTIONS:
        raise UserError(
            f"only {QUESTIONS:,} questions exist",
            key="--train + --test",
            value=args.train + args.test,
            fix="ask for fewer",
        )
    rng = np.random.default_rng(args.seed)
    answers: dict[str, int] = {}
    while len(answers) < args.train + args.test:
        kind = KINDS[int(rng.integers(len(KINDS)))]
        question, answer = kind(int(rng.integers(20, 1000)), int(rng.integers(20, 200)))
        answers.setdefault(question, answer)
    questions = list(answers.items())
    return {
        "train.parquet": _rows(questions[: args.train], "train"),
        "test.parquet": _rows(questions[args.train :], "test"),
    }


def _rows(questions: list[tuple[str, int]], split: str) -> Iterator[dict[str, Any]]:
    for index, (question, answer) in enumerate(questions):
        yield row(
            data_source="synthetic_python",
            prompt=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            env_class="python",
            ground_truth=str(answer),
            extra_info={"split": split, "index": index},
        )
