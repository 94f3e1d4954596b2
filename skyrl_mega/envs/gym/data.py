"""Rows for a gymnasium environment: a prompt and a seed each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from skyrl_mega.config.command import ROWS, integer
from skyrl_mega.envs.row import row

PROMPT = "You act in an environment. In each turn give one action inside <action>…</action>."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m skyrl_mega.data gym`."""
    parser.add_argument("--train", type=integer(1, ROWS), default=1000, help="training rows (default: 1000)")
    parser.add_argument("--test", type=integer(0, ROWS), default=100, help="held-out rows (default: 100)")
    parser.add_argument("--prompt", default=PROMPT, help="the system message: the rules (default: %(default)r)")


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name → rows: `args.train` rows of `train.parquet`, `args.test` rows of `test.parquet`.

    Each row has the system message `args.prompt` and a seed of the environment. No seed occurs twice, in one file or in
    both. Deterministic in `args.seed`.

    Args:
        args: The options of `add_arguments`, and `seed`.
    """
    seeds = np.random.default_rng(args.seed).permutation(args.train + args.test).tolist()
    return {
        "train.parquet": _rows(seeds[: args.train], "train", args.prompt),
        "test.parquet": _rows(seeds[args.train :], "test", args.prompt),
    }


def _rows(seeds: list[int], split: str, prompt: str) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        yield row(
            data_source="gym",
            prompt=[{"role": "system", "content": prompt}],
            env_class="gym",
            ground_truth=None,
            extra_info={"split": split, "seed": seed},
        )
