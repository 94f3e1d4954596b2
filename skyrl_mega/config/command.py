"""Common parts of all command-line programs: options with ranges, one-line errors, and closed output pipes."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from skyrl_mega.common.errors import UserError, UserErrors
from skyrl_mega.common.safe_read import DISK_ERRORS, Malformed, error_reason, is_unicode, parse_json
from skyrl_mega.common.terminal import one_line, printable
from skyrl_mega.common.values import LONGEST_TEXT, Rule, shown
from skyrl_mega.config.keys import keys
from skyrl_mega.config.other_programs import lookup

DONE, FAULT, WRONG_INPUT = 0, 1, 2
"""Exit codes; commands with signal handling also use 75."""
ROWS, MOST = 10**7, 10**9
"""Upper bounds for the number of rows to create, and for row or character limits."""
LONGEST_NAME = 255
"""Maximum bytes of a path component."""
LONGEST = 40
"""Maximum characters of a value in an error message."""

SIGN = "= "
"""Marker before a rejected value in an option's error: argparse puts a colon there, and `error` removes the colon."""


class Parser(argparse.ArgumentParser):
    """Argument parser with UserError instead of a usage page. Rejects arguments that are not UTF-8 or contain NUL,
    which no file could hold."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments like the base class, after checking for valid text.

        Raises:
            UserError: An argument is not UTF-8 or contains NUL, or a value is not allowed.
            SystemExit: After `--help`.
        """
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if "\0" in word or not is_unicode(word):
                raise UserError("allowed is text in UTF-8 without NUL", key=shown(word), fix=f"see {self.prog} --help")
        return super().parse_known_args(words, namespace)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments like the base class, for a command that takes settings (`group.key=value`).

        Raises:
            UserError: An option is unknown or a value is not allowed.
            UserErrors: An option or key belongs to another program (SkyRL, verl, …); names our settings.
            SystemExit: After `--help`.
        """
        words = sys.argv[1:] if args is None else list(args)
        if lines := lookup.options(words, self._option_string_actions):
            raise UserErrors(lines)
        try:
            return super().parse_intermixed_args(words, namespace)
        except UserError:
            if lines := lookup.keys(words, keys()):
                raise UserErrors(lines) from None
            raise

    def add_run(self) -> None:
        """Adds the arguments that name the settings of a run, read by `compose.compose_run`: `--config`, `--directory`,
        and settings over the file's."""
        self.add_argument(
            "--config", required=True, metavar="FILE", help="a .yaml file of a run, such as configs/quickstart.yaml"
        )
        self.add_argument(
            "--directory",
            metavar="DIR",
            help="where relative paths of the settings begin (default: the current directory)",
        )
        self.add_argument(
            "overrides", nargs="*", metavar="group.key=value", help="settings over the file's: run.seed=1"
        )

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raises a SystemExit that ends the command after `--help`; prints nothing and ignores `message`."""
        raise _HelpPrinted(status)

    def error(self, message: str) -> NoReturn:
        """Raises a UserError with the message of argparse and a hint; never returns."""
        named = message.removeprefix("argument ").replace(f": {SIGN}", " ", 1)
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        raise UserError(f"{named}{self._hint(unknown)}", fix=f"see {self.prog} --help")

    def _hint(self, unknown: str) -> str:
        """Returns a hint for an unknown option."""
        name, _, value = unknown.partition("=")
        takes_settings = any(action.dest == "overrides" for action in self._actions)
        if takes_settings and name.startswith("--") and "." in name and name.removeprefix("--") in keys():
            return f"; a setting has no dashes: {name.removeprefix('--')}={value or '…'}"
        near = get_close_matches(name, self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""


class _HelpPrinted(SystemExit):
    """Exit of a command after printing the help."""


def guarded(run: Callable[[], int], as_json: bool = False) -> int:
    """Runs a command, prints its error as lines on standard error, and returns the exit code.

    The code is WRONG_INPUT (2) after a `UserError` or a file that cannot be read or written; FAULT (1) after a disk
    fault, an OSError without a file, or `sys.exit` in user code; DONE (0) after `--help` or if the reader of standard
    output closed, as with `| head`; otherwise the result of `run`. Other exceptions pass through.

    Args:
        run: The command.
        as_json: True to print a `UserError` on standard output too, as JSON.
    """
    _open_streams()
    try:
        code = _run_with_errors(run, as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        return DONE
    except OSError as error:
        if error.filename is not None and error.errno not in DISK_ERRORS:
            print_error(
                f"error: {one_line(str(error.filename))}: {error_reason(error)}; give a path that you may read or write"
            )
            return WRONG_INPUT
        if error.filename is None:
            discard_output(sys.stdout)  # standard output itself may have failed, for example on a full disk
        print_error(f"fault: {one_line(str(error))}")
        return FAULT
    return code


def print_error(line: str) -> None:
    """Writes a line to standard error; does nothing if the stream is closed."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)


def discard_output(stream: IO[str]) -> None:
    """Redirects a standard stream to /dev/null, including the flush at interpreter exit. Raises OSError for a stream
    without a file descriptor."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def integer(low: int, high: int) -> Callable[[str], int]:
    """Returns the argparse `type` for a whole number from `low` to `high`, both included. The converter raises
    ArgumentTypeError for other text, which the parser turns into a UserError."""
    return partial(_number, Rule(int, low=low, high=high))


def real(low: float, high: float) -> Callable[[str], float]:
    """Returns the argparse `type` for a number from `low` to `high`, both included. The converter raises
    ArgumentTypeError for other text, NaN and infinity."""
    return partial(_number, Rule(float, low=low, high=high))


def path_of(text: str) -> Path:
    """Converts an option's text to a path; the argparse `type` of files and folders. The path need not exist.

    Raises:
        ArgumentTypeError: The text is empty, or it or a name in it is too long for a path.
    """
    if not text or len(text) > LONGEST_TEXT or any(len(part.encode()) > LONGEST_NAME for part in text.split("/")):
        raise argparse.ArgumentTypeError(f"{SIGN}{_quoted(text)}: allowed is the path of a file or folder")
    return Path(text)


def json_object(text: str) -> dict[str, Any]:
    """Converts an option's text to the JSON object in it; the argparse `type` of options that hold further options.

    Raises:
        ArgumentTypeError: The text is no JSON object.
    """
    reason = ""
    try:
        value = parse_json(text)
    except Malformed as error:
        value, reason = None, f"{error}; "
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{SIGN}{_quoted(text)}: {reason}allowed is a JSON object")
    return value


def enter(directory: str) -> None:
    """Changes the working directory of this process to the folder given by `--directory`. Relative paths then start
    there, in all threads.

    Raises:
        UserError: The folder cannot be entered.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise UserError(
            error.strerror,
            key="--directory",
            value=directory,
            fix="give a folder that exists, seen by every node of a cluster",
        ) from error


def _run_with_errors(run: Callable[[], int], as_json: bool) -> int:
    try:
        return run()
    except UserError as error:
        if as_json:
            print(json.dumps({"error": str(error), **error.fields}))
        for line in error.lines:
            print_error(f"error: {line}")
        return WRONG_INPUT
    except _HelpPrinted:
        return DONE
    except SystemExit as error:  # raised by user code: the command ends without having done its work
        at = traceback.extract_tb(error.__traceback__)[-1]
        print_error(
            f"fault: {one_line(at.filename)}, line {at.lineno} called sys.exit({error.code!r}), which ends the whole "
            "command; remove this call"
        )
        return FAULT


def _open_streams() -> None:
    """Makes standard streams safe: a closed stream or an unencodable character must not end a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _number(rule: Rule, text: str) -> Any:
    try:
        value = rule.type(text)
    except ValueError:  # also raised for more digits than Python parses
        value = None
    if not rule.allows(value):
        raise argparse.ArgumentTypeError(f"{SIGN}{_quoted(text)}: {rule.refusal(None)}")
    return value


def _quoted(text: str) -> str:
    return printable(text[:LONGEST]) or "''"
