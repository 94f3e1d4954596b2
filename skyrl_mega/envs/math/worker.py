"""Algebra worker: a line of JSON in (`gold`, `answer`, `seconds`), a line out (true, false, null, or "late").

math-verify's parser reads the LaTeX; sympy compares exactly.

The worker is a separate process, since symbolic algebra can take forever and cannot be stopped by a thread. A timer
interrupts a slow comparison. One long operation on large numbers ignores the timer; then the parent kills the process.
The worker parses a policy's text, and therefore gives up sockets and files before reading the first line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

MEMORY = 2**30
"""Limit of the address space, in bytes; a comparison that needs more fails."""


class Late(BaseException):
    """Signal that the time limit of a comparison passed. Not an Exception: the library catches Exceptions in many
    places."""


def main() -> None:
    """Compares mathematical answers line by line, from standard input to standard output, until the input ends.

    Prints `ready` once the library is loaded and the process is confined. A line of input is a JSON object with `gold`
    and `answer` (LaTeX) and `seconds`. Each gets a line of output: true or false, null if the comparison failed, "late"
    if it exceeded `seconds`.
    """
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Expr, I, expand, nan, oo, simplify, zoo

    logging.disable(logging.CRITICAL)
    conversion = ConversionConfig(lowercase_symbols=False)

    def read(text: str, imaginary: bool) -> Expr | None:
        expression = latex2sympy(
            text, is_real=not imaginary, normalization_config=None, conversion_config=conversion
        ).doit()
        if not isinstance(expression, Expr) or expression.has(nan, zoo):
            return None
        return expression.subs({symbol: I for symbol in expression.free_symbols if symbol.name == "i"})

    def same(gold: str, answer: str) -> bool:
        imaginary = any("i" in re.sub(r"\\[A-Za-z]+", "", text) for text in (gold, answer))
        left, right = read(gold, imaginary), read(answer, imaginary)
        if left is None or right is None:
            return False
        if left == right:
            return True
        if left.has(oo, -oo) or right.has(oo, -oo):
            return False
        return bool(expand(left - right) == 0 or simplify(left - right) == 0)

    same("\\frac{1}{2}", "x+1")  # triggers the library's lazy imports
    same("\\sqrt{8}+x", "2\\sqrt{2}+x")
    _confine()
    signal.signal(signal.SIGALRM, _late)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_compare_in_time(same, json.loads(line))), flush=True)


def _compare_in_time(same: Callable[[str, str], bool], request: dict[str, Any]) -> bool | str | None:
    try:
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        return same(request["gold"], request["answer"])
    except Late:
        return "late"
    except Exception:  # any failure on a policy's text counts as no match
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _late(number: int, frame: FrameType | None) -> NoReturn:
    raise Late


def _confine() -> None:
    """Limits memory and files; beside the project's sandbox also gives up files and sockets."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sandbox = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "sandbox")
    if not os.path.isdir(sandbox):
        return
    sys.path.append(sandbox)
    import kernel
    import syscalls

    try:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.confine(shared=True, counted=True)
        kernel.landlock([*sys.path, sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64"], ["/dev/null"])
    except OSError as error:  # defense in depth: math-verify executes nothing it reads
        print(f"without seccomp or Landlock: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
