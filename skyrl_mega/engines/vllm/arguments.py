"""The names that `rollout.options` may have: vLLM's engine arguments.

They are read from its source, as the import would take 12 s.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import shown

CLASSES = ("EngineArgs", "AsyncEngineArgs")


def check(options: Mapping[str, Any]) -> None:
    """Refuses an argument that the vLLM installed here does not have; without vLLM nobody can tell.

    Raises:
        UserError: The argument, and the nearest that there is.
    """
    known = names()
    for name in options if known else ():
        if name not in known:
            near = get_close_matches(str(name), known, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UserError(
                f"rollout.options.{shown(name)}: vLLM has no such engine argument; {hint}allowed are the fields of "
                "vllm.engine.arg_utils.AsyncEngineArgs, by their own names"
            )


@cache
def names() -> frozenset[str]:
    """All of them; none where vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / "engine" / "arg_utils.py"
        if file.is_file():
            return frozenset(_fields(ast.parse(file.read_text(encoding="utf-8"))))
    return frozenset()


def _fields(module: ast.Module) -> list[str]:
    return [
        line.target.id
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
