"""The names and types allowed in `rollout.options`: vLLM's engine arguments.

The names are read from vLLM's source, because the import would take 12 s.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown

CLASSES = ("EngineArgs", "AsyncEngineArgs")
TAKES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
"""Descriptions of vLLM's types in errors. vLLM checks other types (literals, lists, mappings, classes)."""


def check(options: Mapping[str, Any]) -> None:
    """Raises an error for the first entry of `rollout.options` that is no engine argument of the installed vLLM, or has
    a value of another type. Without vLLM nothing is checked.

    Raises:
        UserError: An unknown argument (with the nearest known names), or a value of another type (with the allowed
            types).
    """
    known = types()
    for name, value in options.items() if known else ():
        if name not in known:
            nearest = get_close_matches(str(name), known, n=3)
            hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
            raise UserError(
                f"vLLM has no such engine argument; {hint}allowed are the fields of "
                "vllm.engine.arg_utils.AsyncEngineArgs, by their own names",
                key=f"rollout.options.{shown(name)}",
            )
        if not _accepts(value, known[name]):
            allowed = " or ".join(text for kind, text in TAKES.items() if kind in known[name])
            raise UserError(
                f"allowed is {allowed}; leave the option out to keep vLLM's default",
                key=f"rollout.options.{name}",
                value=shown(value),
            )


def names() -> frozenset[str]:
    """Returns the names of all engine arguments of the installed vLLM; empty without vLLM."""
    return frozenset(types())


@cache
def types() -> Mapping[str, frozenset[str]]:
    """Returns name → allowed types of each vLLM engine argument, such as {"int", "None"}; an empty set for an argument
    with a type unknown to `TAKES`, which is not checked. {} without vLLM. Reads vLLM's source once."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / "engine" / "arg_utils.py"
        if file.is_file():
            return dict(_fields(ast.parse(file.read_text(encoding="utf-8"))))
    return {}


def _accepts(value: Any, kinds: frozenset[str]) -> bool:
    """Returns True if an argument of these types accepts the value; an empty set accepts any."""
    kind = "None" if value is None else type(value).__name__
    return not kinds or kind in kinds or (kind == "int" and "float" in kinds)


def _fields(module: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    kinds = frozenset(kind.strip() for kind in ast.unparse(line.annotation).split("|"))
                    yield line.target.id, kinds if kinds <= {*TAKES, "None"} else frozenset()
