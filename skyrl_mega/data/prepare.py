"""Implementation of `python -m skyrl_mega.data`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from skyrl_mega.cluster.atomic_output import refuse_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import Parser, integer, path_of
from skyrl_mega.data.write import is_ours, with_progress, write_rows
from skyrl_mega.envs.registry import BUILT_IN

RECIPES = {
    name: import_module(path.partition(".env:")[0] + ".data")
    for name, path in BUILT_IN.items()
    if name not in ("aime", "harness")
}
"""Built-in environment with rows of its own → module `data` beside it (`add_arguments(parser)` and `tables(args)`)."""


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser: one subcommand per recipe, all with --output and --seed."""
    root = Parser(prog="python -m skyrl_mega.data", description="Prepares parquet files for training.")
    commands = root.add_subparsers(dest="recipe", required=True, metavar="|".join(RECIPES))
    for name, recipe in RECIPES.items():
        command = commands.add_parser(name, help=(recipe.__doc__ or "").splitlines()[0])
        command.add_argument(
            "--output", type=path_of, default=Path("data") / name, help="folder (default: %(default)s)"
        )
        command.add_argument(
            "--seed", type=integer(0, 2**32 - 1), default=0, help="decides every random choice (default: 0)"
        )
        recipe.add_arguments(command)
    return root


def check(arguments: str) -> None:
    """Parses the arguments of `python -m skyrl_mega.data`, given as a single string, and writes no file.

    Raises:
        UserError: The recipe is missing, an option does not exist, or a value is not allowed.
        SystemExit: After printing the help for `--help`.
    """
    parser().parse_args(_words(arguments))


def prepare(arguments: str | Sequence[str]) -> list[Path]:
    """Writes the requested parquet files and returns their paths; prints progress and numbers of rows to stderr.

    A file of an earlier call is replaced; any other existing file is refused.

    Args:
        arguments: Arguments of `python -m skyrl_mega.data`, as a string or already split.

    Raises:
        UserError: An option or a source is wrong, or a file cannot be read or written.
        InfrastructureFault: A sandbox or container of a recipe does not start (`swe --validate`, `text2sql --shots`).
        pyarrow.ArrowException: A value of a source does not have the type of its column.
        SystemExit: After printing the help for `--help`.
    """
    args = parser().parse_args(_words(arguments) if isinstance(arguments, str) else list(arguments))
    written = []
    try:
        tables = RECIPES[args.recipe].tables(args)
        for name in tables:  # check all files before writing the first
            refuse_file(args.output / name, f"--output {args.output}", is_ours)
        for name, rows in tables.items():
            file = args.output / name
            count = write_rows(with_progress(rows, str(file)), file)
            print(f"{file}: {count} rows", file=sys.stderr)
            written.append(file)
    except OSError as error:  # from a source, or from the output folder
        raise UserError(
            f"{error.filename or args.output} cannot be read or written: {error.strerror or error}",
            fix="give a source that you may read, and as --output a folder with room that you may write to",
        ) from error
    return written


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(error, key=text, fix="close the quotation") from error
