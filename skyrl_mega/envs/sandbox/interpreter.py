"""Paths of a Python interpreter for the sandbox: readable there, unlike other files of the interpreter's folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

INTERPRETER_PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Parts of a Python installation that are readable inside."""


def paths_of_this() -> Iterator[str]:
    """Yields the readable paths of the running interpreter: the existing `INTERPRETER_PARTS` (programs and libraries)
    of its environment and of its base installation, also with links resolved."""
    return _parts(sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))


def paths_of(program: str) -> Iterator[str]:
    """Yields the readable paths of a program's virtual environment, and of the interpreter that the environment is
    based on: existing `INTERPRETER_PARTS`, also with links resolved. Yields nothing for a program outside a virtual
    environment.

    Args:
        program: Absolute path, such as `/home/me/venv/bin/python`.
    """
    prefix = os.path.dirname(os.path.dirname(program))
    try:
        with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8", errors="replace") as settings:
            homes = [line.partition("=")[2].strip() for line in settings if line.partition("=")[0].strip() == "home"]
    except OSError:
        return
    yield from _parts(prefix, *map(os.path.dirname, homes), os.path.dirname(os.path.dirname(os.path.realpath(program))))


def _parts(*prefixes: str) -> Iterator[str]:
    for prefix in prefixes:
        for folder in {prefix, os.path.realpath(prefix)} - {"/usr", "/"}:
            for part in INTERPRETER_PARTS:
                if os.path.exists(path := os.path.join(folder, part)):
                    yield path
                    yield os.path.realpath(path)
