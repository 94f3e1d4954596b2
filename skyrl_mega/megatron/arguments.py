"""Names and types allowed in `policy.options` and related settings: the fields of megatron-core's configurations.

The fields are read from megatron-core's source, because an import would take seconds and require torch with CUDA.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config import megatron_options
from skyrl_mega.config.schema import CriticConfig, PolicyConfig

CLASSES: dict[str, tuple[tuple[str, str], ...]] = {
    "policy.options": (
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
    ),
    "policy.ddp_options": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "policy.optimizer.options": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "critic.optimizer.options": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Setting → (file below megatron/core, class) pairs: first the class itself, then the base classes."""
_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
    "list": ((list,), "a list"),
    "dict": ((dict,), "a mapping"),
}
"""Plain type by name: the types of its values, and their description."""


def check(policy: PolicyConfig, critic: CriticConfig | None = None) -> None:
    """Checks names and types of `policy.options` and related settings against the installed megatron-core. Stops at the
    first wrong option.

    Nothing is checked if megatron-core is not installed, as in a dry run on another machine.

    Args:
        policy: The policy's settings.
        critic: The critic's settings; None for a run without a critic.

    Raises:
        UserError: An option is unknown to megatron-core, with the closest known names; or a value has another type,
            with the allowed type.
    """
    for key, options in megatron_options.options(policy, critic):
        known = fields(key) if options else {}
        for name, value in options.items() if known else ():
            if name not in known:
                _refuse_unknown(key, str(name), known)
            if not _allows(known[name], value):
                raise UserError(f"allowed is {_describe(known[name])}", key=f"{key}.{name}", value=shown(value))


def _refuse_unknown(key: str, name: str, known: Mapping[str, ast.expr]) -> None:
    similar = get_close_matches(name, [n for n in known if n not in megatron_options.DENIED[key]], n=3)
    hint = f"did you mean {' or '.join(similar)}? " if similar else ""
    _, class_name = CLASSES[key][0]
    raise UserError(
        f"megatron-core has no such field; {hint}allowed are the fields of its {class_name}, by their own names",
        key=f"{key}.{shown(name)}",
    )


@cache
def fields(key: str) -> dict[str, ast.expr]:
    """Returns field name → annotation, as a syntax tree, of megatron-core's class for a setting in `CLASSES`; {} if
    megatron-core is not installed. Private fields are left out. The result is cached and shared; do not change it.

    Raises:
        KeyError: `key` is not in `CLASSES`, and megatron-core is installed.
    """
    spec = importlib.util.find_spec("megatron")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        core = Path(folder) / "core"
        if core.is_dir():
            return {
                name: annotation
                for file, class_name in CLASSES[key]
                if (core / file).is_file()
                for name, annotation in _fields(core / file, class_name).items()
            }
    return {}


def _fields(file: Path, class_name: str) -> dict[str, ast.expr]:
    return {
        statement.target.id: statement.annotation
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.target.id[0] != "_"
    }


def _choices(annotation: ast.expr) -> list[ast.expr]:
    """Returns the members of `Optional[X]`, `Union[X, Y]` or `X | Y`; any other annotation as the only member."""
    match annotation:
        case ast.Constant(value=str(text)):
            return _choices(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _choices(left) + _choices(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return [*_choices(inner), ast.Constant(None)]
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return [choice for part in parts for choice in _choices(part)]
    return [annotation]


def _allows(annotation: ast.expr, value: Any) -> bool:
    return any(_matches(choice, value) for choice in _choices(annotation))


def _matches(choice: ast.expr, value: Any) -> bool:
    match choice:
        case ast.Constant(value=None):
            return value is None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return (
                value in ast.literal_eval(inner) if isinstance(inner, ast.Tuple) else value == ast.literal_eval(inner)
            )
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in ("List", "list"):
            return isinstance(value, list) and all(_allows(inner, entry) for entry in value)
        case ast.Name(id=name) if name in _PLAIN:
            return isinstance(value, _PLAIN[name][0]) and (name == "bool" or not isinstance(value, bool))
    return False  # a function, a torch type: no setting can hold it


def _describe(annotation: ast.expr) -> str:
    texts = filter(None, map(_describe_choice, _choices(annotation)))
    return " or ".join(texts) or "nothing, as it is no plain value; leave it out"


def _describe_choice(choice: ast.expr) -> str:
    match choice:
        case ast.Constant(value=None):
            return "null"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            options = ast.literal_eval(inner)
            return "one of " + ", ".join(map(str, options)) if isinstance(options, tuple) else str(options)
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in ("List", "list"):
            return f"a list of {ast.unparse(inner)}"
        case ast.Name(id=name) if name in _PLAIN:
            return _PLAIN[name][1]
    return ""
