"""Rows for GSM8K over several turns: the rows of `gsm8k` with another environment name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from skyrl_mega.envs.gsm8k import data as gsm8k

add_arguments = gsm8k.add_arguments


def tables(args: argparse.Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """Returns file name (`train.parquet`, `test.parquet`) → rows: the rows of `gsm8k`, with the environment
    `gsm8k_multi_turn`, from `args.source` or Hugging Face's hub, which is downloaded.

    Raises:
        UserError: The source cannot be read, or `--shots` lacks training questions. While the rows are read: a row is
            malformed.
    """
    return {
        name: ({**row, "env_class": "gsm8k_multi_turn"} for row in rows) for name, rows in gsm8k.tables(args).items()
    }
