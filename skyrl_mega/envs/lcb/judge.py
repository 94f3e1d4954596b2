"""LiveCodeBench's tests: standard input and output, or calls of a function.

Programs run in the sandbox and see a test's input, never the expected output. The printed output is compared outside,
so a program cannot declare itself right.
"""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from skyrl_mega.envs.sandbox import Sandbox, SandboxResult
from skyrl_mega.envs.sandbox.run import python
from skyrl_mega.envs.sandbox.scoring import TRIES, run_with_retries

CALLER = """import json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
arguments, name = json.loads(sys.stdin.read())
sys.stdin = open(os.devnull)
space = {"__name__": "solution"}
exec("from typing import *\\nimport bisect, collections, functools, heapq, itertools, math, re, string\\n"
     "from collections import *\\nfrom functools import *\\nfrom heapq import *\\nfrom itertools import *\\n"
     "from math import *\\n", space)
exec(compile(open("solution.py").read(), "solution.py", "exec"), space)
function = getattr(space["Solution"](), name) if "Solution" in space else space[name]
result = function(*arguments)
json.dump(result, out, default=list)
out.flush()
os._exit(0)
"""
"""Program that calls the solution's function inside the sandbox; the solution's own prints go to stderr."""


@dataclass(frozen=True)
class Case:
    """A test of a program: an input, and the expected output, on standard input and output or of a function."""

    input: str
    """Standard input; or a function's arguments, a JSON value per line."""
    output: str
    """Expected standard output; or the function's result as JSON."""
    function: str | None = None
    """Name of the function to call; None runs a program on standard input."""


def cases(tests: Any) -> list[Case]:
    """Returns the tests of a row: a list, or JSON of a list, of `input`, `output`, `testtype` (`stdin`, `functional`)
    and `metadata.func_name`.

    Raises:
        ValueError: The value is not a non-empty list of tests, is malformed JSON, or a functional test names no
            function.
        KeyError: A test has no `input` or `output`.
        TypeError, AttributeError: The value or a test is of another type.
    """
    listed = json.loads(tests) if isinstance(tests, str) else list(tests)
    if not isinstance(listed, list):
        raise ValueError(f"it is JSON of a {type(listed).__name__}")
    parsed = []
    for test in listed:
        metadata = test.get("metadata") or {}
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        functional = test.get("testtype") == "functional"
        name = (metadata.get("func_name") or test.get("fn_name")) if functional else None
        if functional and not name:
            raise ValueError("a functional test without metadata.func_name")
        parsed.append(Case(_text(test["input"]), _text(test["output"]), name))
    if not parsed:
        raise ValueError("there is no test")
    return parsed


def code_of(answer: str) -> str | None:
    """Returns the last fenced block of an answer, as LiveCodeBench does; None if there is no block."""
    blocks = re.findall(r"```(?:[a-zA-Z0-9+]*)\n(.*?)```", answer, re.DOTALL)
    return blocks[-1] if blocks else None


def run_tests(code: str, tests: Sequence[Case], box: Sandbox, *, seconds: float, stop: bool) -> list[str]:
    """Runs a program on the tests in order; returns for each test `ok`, `wrong`, or the sandbox's status of a program
    that failed or was ended (`SandboxResult.status`).

    Args:
        code: The program.
        tests: The tests to run.
        box: The sandbox; the limits apply per test.
        seconds: Time limit for all tests together; the remaining tests then count as `timeout`.
        stop: True to stop after the first failing test; the result then has no entries for later tests.

    Raises:
        InfrastructureFault: The sandbox cannot start a program.
        UserError: The machine lacks an isolation feature that the sandbox requires.
    """
    verdicts: list[str] = []
    deadline = time.monotonic() + seconds
    for test in tests:
        remaining_s = min(box.limits.wall_s, deadline - time.monotonic())
        bounded = replace(box, limits=replace(box.limits, wall_s=remaining_s))
        tries = 1 if "memory" in verdicts else TRIES  # a program always exceeding memory is not retried
        verdicts.append(_verdict(code, test, bounded, tries) if remaining_s > 0 else "timeout")
        if stop and verdicts[-1] != "ok":
            break
    return verdicts


def _verdict(code: str, test: Case, box: Sandbox, tries: int) -> str:
    def run(stdin: str, files: dict[str, str]) -> SandboxResult:
        def once(seconds: float) -> SandboxResult:
            return box.run(python(), stdin=stdin, files=files, limits=replace(box.limits, wall_s=seconds))

        return run_with_retries(once, box.limits.wall_s, tries)

    if test.function is None:
        outcome = run(test.input, {"main.py": code})
        correct = same_output(outcome.stdout, test.output)
    else:
        arguments = [_value(line) for line in test.input.split("\n") if line.strip()]
        outcome = run(json.dumps([arguments, test.function]), {"main.py": CALLER, "solution.py": code})
        correct = outcome.status == "ok" and _same_value(outcome.stdout, test.output)
    if outcome.status != "ok":
        return outcome.status
    return "ok" if correct else "wrong"


def same_output(printed: str, expected: str) -> bool:
    """Returns True if the printed and the expected output match line by line, ignoring surrounding space: the same
    text, or equal decimal numbers such as `1.0` and `1`."""
    printed_lines, expected_lines = (
        [line.strip() for line in text.strip().split("\n")] for text in (printed, expected)
    )
    return len(printed_lines) == len(expected_lines) and all(
        a == b or _same_numbers(a, b) for a, b in zip(printed_lines, expected_lines, strict=True)
    )


def _same_numbers(one: str, other: str) -> bool:
    try:
        return [Decimal(x) for x in one.split()] == [Decimal(x) for x in other.split()]
    except InvalidOperation:
        return False


def _same_value(printed: str, expected: str) -> bool:
    expected_value = _value(expected)
    try:
        result = json.loads(printed)
        return bool(result == _with_lists(expected_value)) and isinstance(result, bool) == isinstance(
            expected_value, bool
        )
    except (ValueError, RecursionError):  # invalid JSON, numbers of thousands of digits, deeply nested brackets
        return False


def _with_lists(value: Any) -> Any:
    """Returns a value with tuples replaced by lists, as in JSON."""
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    return value


def _value(text: str) -> Any:
    """Parses JSON, or a Python literal, used by some data sets; returns other text unchanged."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
