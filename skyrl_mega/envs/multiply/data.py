"""Rows for multiplication: disjoint training and test problems, and conversations with slips in the attempts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import ROWS, integer, real
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.multiply.env import MultiplyEnv
from skyrl_mega.envs.multiply.schoolbook import worked_answer
from skyrl_mega.envs.pairs import disjoint_pairs
from skyrl_mega.envs.row import row

SYSTEM = "You solve multiplication problems. Give the product in \\boxed{}, for example \\boxed{42}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data multiply`."""
    parser.add_argument("--train", type=integer(1, ROWS), default=10000, help="training problems")
    parser.add_argument("--test", type=integer(0, ROWS), default=200, help="held-out problems")
    parser.add_argument("--digits", type=integer(1, 9), default=4, help="digits of each number")
    parser.add_argument("--second", type=integer(1, 9), help="digits of the second number, if others")
    parser.add_argument("--plain", action="store_true", help="leave the system message out")
    parser.add_argument(
        "--demonstrations",
        type=integer(0, ROWS),
        default=0,
        help="conversations for the warm-up; needs --digits 2 or more, --second 1",
    )
    parser.add_argument(
        "--wrong", type=real(0, 1), default=0.5, help="how likely each attempt of a demonstration is wrong"
    )
    parser.add_argument("--turns", type=integer(1, 1000), default=3, help="attempts of a demonstration at most")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name → rows, to be read once: `train.parquet`, `test.parquet` (also with no row), and
    `demonstrations.parquet` if requested. Deterministic in `args.seed`.

    A demonstration is a conversation with the environment about a training problem, drawn with repetition: attempts
    with the work shown, until an attempt is right or `args.turns` are used. A model trained on the demonstrations slips
    equally often and leaves real work for RL.

    Raises:
        UserError: An option is wrong, or the digits allow fewer problems than requested.
    """
    if args.demonstrations and (args.digits < 2 or args.second != 1):
        raise UserError(
            "they show how a number of several digits is multiplied by one digit",
            key="--demonstrations",
            value=args.demonstrations,
            fix="give --digits 2 or more, and --second 1",
        )
    if args.turns < 1:
        raise UserError("allowed: at least 1", key="--turns", value=args.turns)
    rng = np.random.default_rng(args.seed)
    train, test = disjoint_pairs(args.digits, args.train, args.test, rng, args.second)
    tables: dict[str, Iterator[dict[str, Any]]] = {
        "train.parquet": (_row(a, b, args, "train") for a, b in train.tolist()),
        "test.parquet": (_row(a, b, args, "test") for a, b in test.tolist()),
    }
    if args.demonstrations:
        demonstrated = train[rng.integers(len(train), size=args.demonstrations)]
        tables["demonstrations.parquet"] = (
            _row(a, b, args, "demonstrations", demonstration=_conversation(a, b, args, rng))
            for a, b in demonstrated.tolist()
        )
    return tables


def _conversation(a: int, b: int, args: argparse.Namespace, rng: np.random.Generator) -> list[Message]:
    """Returns attempts at `a * b`, with the environment's replies between them."""
    env = MultiplyEnv(extras={"reward_spec": {"ground_truth": str(a * b)}, "max_turns": args.turns})
    messages: list[Message] = []
    done = False
    while not done:
        slip = int(rng.integers(1, args.digits)) if rng.random() < args.wrong else None
        attempt = worked_answer(a, b, slip)
        output = env.step(attempt)
        messages += [{"role": "assistant", "content": attempt}, *output["observations"]]
        done = output["done"]
    return messages


def _row(a: int, b: int, args: argparse.Namespace, split: str, **extra: Any) -> dict[str, Any]:
    system = [] if args.plain else [{"role": "system", "content": SYSTEM}]
    return row(
        data_source="synthetic_multiply",
        prompt=[*system, {"role": "user", "content": f"{a} * {b}"}],
        env_class="multiply",
        ground_truth=str(a * b),
        extra_info={"num_digits": args.digits, "split": split, **extra},
    )
