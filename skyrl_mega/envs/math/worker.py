"""Compares two answers with math-verify: a line of JSON in (`gold`, `answer`), a line out (true, false or null).

A process of its own, since symbolic algebra can take for ever and no thread can stop it: whoever started it kills it.
It parses what a policy wrote, so it gives up sockets and files before it reads the first line.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys

MEMORY = 4 * 2**30


def main() -> None:
    """Answers line by line until its input ends."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # math-verify tells of every answer that it cannot read
    ways = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(answer: str) -> list[object]:
        found: list[object] = parse(f"\\boxed{{{answer}}}", extraction_config=ways, parsing_timeout=None)
        return found

    def same(gold: str, answer: str) -> bool:
        # float_rounding: how many digits of a decimal answer must agree.
        return bool(verify(read(gold), read(answer), float_rounding=6, timeout_seconds=None))

    same("\\frac{1}{2}", "x+1")  # loads what it loads late
    _confine()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            result = same(order["gold"], order["answer"])
        except Exception:  # whatever algebra makes of a policy's text, it is no match
            result = None
        print(json.dumps(result), flush=True)


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
