"""Rows for the calculator: sums to compute, and conversations that call the calculator or (a share) guess."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from skyrl_mega.config.command import ROWS, integer, real
from skyrl_mega.envs.base import Message
from skyrl_mega.envs.calculator.env import CalculatorEnv
from skyrl_mega.envs.pairs import disjoint_pairs
from skyrl_mega.envs.row import row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data calculator`."""
    parser.add_argument("--train", type=integer(1, ROWS), default=4000, help="training problems")
    parser.add_argument("--test", type=integer(0, ROWS), default=200, help="held-out problems")
    parser.add_argument("--digits", type=integer(1, 9), default=2, help="digits of each number")
    parser.add_argument(
        "--demonstrations", type=integer(0, ROWS), default=0, help="conversations with the calculator, for the warm-up"
    )
    parser.add_argument("--wrong", type=real(0, 1), default=0.3, help="how likely a demonstration answers without it")
    parser.add_argument(
        "--env", default="calculator", help="environment of the problems, such as an agent's (default: %(default)s)"
    )


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name → rows, to be read once: `train.parquet`, `test.parquet` (also with no row), and
    `demonstrations.parquet` if requested.

    Deterministic in `args.seed`. No test problem is a training problem, not even mirrored. The environment of the
    problems is `args.env`; demonstrations are drawn with repetition from the training problems and always have the
    environment `calculator`, and each one guesses without the calculator with the probability `args.wrong`.

    Raises:
        UserError: `args.digits` allows fewer problems than requested.
    """
    rng = np.random.default_rng(args.seed)
    train, test = disjoint_pairs(args.digits, args.train, args.test, rng)
    tables: dict[str, Iterator[dict[str, Any]]] = {
        "train.parquet": (_row(a, b, "train", args.env) for a, b in train.tolist()),
        "test.parquet": (_row(a, b, "test", args.env) for a, b in test.tolist()),
    }
    if args.demonstrations:
        demonstrated = train[rng.integers(len(train), size=args.demonstrations)]
        guessed = (rng.random(args.demonstrations) < args.wrong).tolist()
        guesses = rng.integers(2 * 10 ** (args.digits - 1), 2 * 10**args.digits - 1, args.demonstrations).tolist()
        tables["demonstrations.parquet"] = (
            _row(a, b, "demonstrations", "calculator", demonstration=_guess(guess) if is_guess else _conversation(a, b))
            for (a, b), is_guess, guess in zip(demonstrated.tolist(), guessed, guesses, strict=True)
        )
    return tables


def _conversation(a: int, b: int) -> list[Message]:
    """Returns a conversation: a call, the result, and the answer."""
    call = {"name": "calculate", "arguments": {"expression": f"{a}+{b}"}}
    call_text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    env = CalculatorEnv(extras={"reward_spec": {"ground_truth": str(a + b)}, "max_turns": 2})
    results = [{"role": m["role"], "content": m["content"]} for m in env.step(call_text)["observations"]]
    return [{"role": "assistant", "content": call_text}, *results, {"role": "assistant", "content": str(a + b)}]


def _guess(number: int) -> list[Message]:
    return [{"role": "assistant", "content": str(number)}]


def _row(a: int, b: int, split: str, env_class: str, **extra: Any) -> dict[str, Any]:
    return row(
        data_source="calculator",
        prompt=[{"role": "user", "content": f"{a}+{b}"}],
        env_class=env_class,
        ground_truth=str(a + b),
        extra_info={"split": split, **extra},
    )
