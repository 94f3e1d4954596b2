"""The names that `rollout.options` may have, and what each takes: vLLM's engine arguments.

They are read from its source, as the import would take 12 s.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import shown

CLASSES = ("EngineArgs", "AsyncEngineArgs")
TAKES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
"""What is said of a type of vLLM's. Any other is vLLM's to check: literals, lists, mappings and its own classes."""


def check(options: Mapping[str, Any]) -> None:
    """Refuses an argument that the vLLM installed here does not have, and a value that it does not take. Without vLLM
    nobody can tell.

    Raises:
        UserError: The argument, and the nearest that there is, or what it takes.
    """
    known = types()
    for name, value in options.items() if known else ():
        if name not in known:
            near = get_close_matches(str(name), known, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UserError(
                f"rollout.options.{shown(name)}: vLLM has no such engine argument; {hint}allowed are the fields of "
                "vllm.engine.arg_utils.AsyncEngineArgs, by their own names"
            )
        if not _taken(value, known[name]):
            allowed = " or ".join(text for kind, text in TAKES.items() if kind in known[name])
            raise UserError(
                f"rollout.options.{name} = {shown(value)}: allowed is {allowed}; vLLM's own is there without it"
            )


def names() -> frozenset[str]:
    """All of them; none where vLLM is not installed."""
    return frozenset(types())


@cache
def types() -> Mapping[str, frozenset[str]]:
    """What each of them takes, where those are a few of `TAKES`; nothing where another may be among them."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder) / "engine" / "arg_utils.py"
        if file.is_file():
            return dict(_fields(ast.parse(file.read_text(encoding="utf-8"))))
    return {}


def _taken(value: Any, kinds: frozenset[str]) -> bool:
    """Whether an argument of these types, if they are all that it takes, may have a value."""
    kind = "None" if value is None else type(value).__name__
    return not kinds or kind in kinds or (kind == "int" and "float" in kinds)


def _fields(module: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    kinds = frozenset(kind.strip() for kind in ast.unparse(line.annotation).split("|"))
                    yield line.target.id, kinds if kinds <= {*TAKES, "None"} else frozenset()
