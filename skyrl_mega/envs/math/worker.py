"""Compares two expressions: a line of JSON in (`gold`, `answer`, `seconds`), a line out (true, false, null, or "late").

math-verify's parser reads the LaTeX, sympy compares exactly.

A process of its own, since symbolic algebra can take for ever and no thread can stop it. A timer interrupts it; where
it does not listen, in one long operation on large numbers, whoever started it kills it.
It parses what a policy wrote, so it gives up sockets and files before it reads the first line.
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
"""Address space; a comparison that wants more has failed."""


class Late(BaseException):
    """The time is over. No Exception: the library catches those in many places."""


def main() -> None:
    """Answers line by line until its input ends."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Expr, I, expand, nan, oo, simplify, zoo

    logging.disable(logging.CRITICAL)
    ways = ConversionConfig(lowercase_symbols=False)

    def read(text: str, imaginary: bool) -> Expr | None:
        found = latex2sympy(text, is_real=not imaginary, normalization_config=None, conversion_config=ways).doit()
        if not isinstance(found, Expr) or found.has(nan, zoo):
            return None
        return found.subs({symbol: I for symbol in found.free_symbols if symbol.name == "i"})

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

    same("\\frac{1}{2}", "x+1")  # loads what it loads late
    same("\\sqrt{8}+x", "2\\sqrt{2}+x")
    _confine()
    signal.signal(signal.SIGALRM, _late)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_timed(same, json.loads(line))), flush=True)


def _timed(same: Callable[[str, str], bool], order: dict[str, Any]) -> bool | str | None:
    try:
        signal.setitimer(signal.ITIMER_REAL, order["seconds"])
        return same(order["gold"], order["answer"])
    except Late:
        return "late"
    except Exception:  # whatever algebra makes of a policy's text, it is no match
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _late(number: int, frame: FrameType | None) -> NoReturn:
    raise Late


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "sandbox"))
    import kernel
    import syscalls

    try:
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.confine(shared=True, counted=True)
        kernel.landlock([*sys.path, sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64"], ["/dev/null"])
    except OSError as error:  # a second wall: math-verify runs nothing that it reads
        print(f"without seccomp or Landlock: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
