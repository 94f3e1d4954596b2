"""Settings in a Python script that uses TRL, read from the syntax tree. The script is never imported or run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate.given import Given
from skyrl_mega.config.migrate.shell import script_text

CONFIGS = ("GRPOConfig", "RLOOConfig", "PPOConfig", "ModelConfig", "ScriptArguments")
"""Configuration classes of TRL and its scripts; their keyword arguments are settings."""
INSTANCES = ("training_args", "config", "args", "grpo_config")
"""Usual variable names of a configuration; assignments to their attributes are settings."""
TRAINERS = ("GRPOTrainer", "RLOOTrainer", "PPOTrainer")
TRAINER_KEYWORDS = {"model": "model_name_or_path", "reward_funcs": "reward_funcs"}
"""Keyword of a trainer → the setting of the command line with the same meaning."""
DATA_KEYWORDS = {"train_dataset": "dataset_name", "eval_dataset": "eval_dataset_name"}
"""Keyword of a trainer with a data set → the setting with the name of the data set."""
ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}
"""Operations between known numbers that are computed."""


def read(path: Path) -> tuple[list[Given], str]:
    """Returns the settings in a script that uses TRL, and a docstring of the script with an example command.

    Settings are keywords of `GRPOConfig` and `GRPOTrainer` (and of their variants for RLOO and PPO), fields set later,
    and the data sets. The docstring is empty if it shows no options. The script is parsed, not run.

    Raises:
        UserError: The file cannot be read, is no Python, or has neither settings nor an example command.
    """
    try:
        tree = ast.parse(script_text(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(
            f"is no Python script ({error})", key=path, fix="give the script that calls GRPOConfig"
        ) from error
    assigned: dict[str, list[ast.expr]] = {}
    for name, node in _assignments(tree):
        assigned.setdefault(name, []).append(node)
    values = {name: nodes[0] for name, nodes in assigned.items() if len(nodes) == 1}
    functions = _imported(tree, path.parent)
    found = [given for call in _calls(tree) for given in _settings(call, values, functions)]
    found += [Given(key, data) for key, data in _data_sets(tree, assigned)]
    found += [_given(name, node, values) for name, node in _fields(tree)]
    command = next((text for text in _docstrings(tree) if " --" in text), "")
    if not found and not command:
        raise UserError(
            "names no setting: neither GRPOConfig(…) nor GRPOTrainer(…) with keywords",
            key=path,
            fix="give the options of its command line instead, as --learning_rate 1e-6",
        )
    return found, command.replace("```", "\n")


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yields the texts at the top of a script, where examples show their command."""
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                yield text


def _fields(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields the fields set on a configuration after its creation, as `training_args.beta = 0.01`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Attribute(instance, name)], value) if ast.unparse(instance) in INSTANCES:
                yield name, value


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names and values of plain assignments."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(name)], value):
                yield name, value
            case ast.Assign([ast.Tuple(targets)], value) if all(isinstance(each, ast.Name) for each in targets):
                yield from ((each.id, value) for each in targets if isinstance(each, ast.Name))


def _calls(tree: ast.AST) -> list[ast.Call]:
    """Returns the calls of configurations and trainers, in the order of the script."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n) in (*CONFIGS, *TRAINERS)]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _imported(tree: ast.AST, folder: Path) -> dict[str, str]:
    """Returns name → `file.py:function` of a function imported from a file beside the script, else its import path.

    TRL's own reward functions keep their names, by which `data_sets` knows them.
    """
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] != "trl":
            file = folder.joinpath(*node.module.split(".")).with_suffix(".py")
            for name in node.names:
                beside = f"{file}:{name.name}" if file.is_file() else ""
                if beside or not node.level:
                    functions[name.asname or name.name] = beside or f"{node.module}.{name.name}"
    return functions


def _settings(call: ast.Call, values: Mapping[str, ast.expr], functions: Mapping[str, str]) -> Iterator[Given]:
    for keyword in call.keywords:
        if keyword.arg is None:
            yield Given(
                f"**{ast.unparse(keyword.value)}", "", "keywords in a variable are known only to running Python"
            )
        elif _called(call) in CONFIGS:
            yield _given(keyword.arg, keyword.value, values)
        elif keyword.arg in TRAINER_KEYWORDS:
            yield from _of_trainer(TRAINER_KEYWORDS[keyword.arg], keyword.value, values, functions)
        elif keyword.arg not in ("args", "config", "processing_class", *DATA_KEYWORDS):
            yield _given(keyword.arg, keyword.value, values)


def _of_trainer(
    key: str, node: ast.expr, values: Mapping[str, ast.expr], functions: Mapping[str, str]
) -> Iterator[Given]:
    """Yields a setting given to the trainer; a function is named by its file or import, a parsed option is left out."""
    if ast.unparse(node).endswith(f".{key}"):  # model_args.model_name_or_path is on the command line
        return
    if key == "reward_funcs":
        nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
        yield Given(key, [_function(each, functions) for each in nodes])
    else:
        yield _given(key, node, values)


def _function(node: ast.expr, functions: Mapping[str, str]) -> str:
    """Returns the name of a reward function, with its file if the script imports it; a text stays as it is."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    name = ast.unparse(node)
    return functions.get(name, name)


def _given(key: str, node: ast.expr, values: Mapping[str, ast.expr]) -> Given:
    try:
        return Given(key, _value(node, values, 0))
    except ValueError:
        return Given(key, ast.unparse(node), f"{ast.unparse(node)[:60]} is known only to running Python")


def _value(node: ast.expr, values: Mapping[str, ast.expr], depth: int) -> Any:
    """Returns the value of a literal, a name assigned once, or arithmetic on them; raises ValueError otherwise."""
    if isinstance(node, ast.Name) and node.id in values and depth < 10:
        return _value(values[node.id], values, depth + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = _value(node.left, values, depth + 1), _value(node.right, values, depth + 1)
        if {type(left), type(right)} <= {int, float} and (right or not isinstance(node.op, ast.FloorDiv)):
            return ARITHMETIC[type(node.op)](left, right)
        raise ValueError("no numbers")
    return ast.literal_eval(node)


def _data_sets(tree: ast.Module, assigned: Mapping[str, list[ast.expr]]) -> Iterator[tuple[str, str]]:
    """Yields setting and name of the data sets given to a trainer."""
    for call in _calls(tree):
        for keyword in call.keywords:
            if _called(call) in TRAINERS and keyword.arg in DATA_KEYWORDS:
                names = [*_loaded(keyword.value, assigned, 0)]
                yield from ((DATA_KEYWORDS[keyword.arg], name) for name in names[:1])


def _loaded(node: ast.expr, assigned: Mapping[str, list[ast.expr]], depth: int) -> Iterator[str]:
    """Yields the names given to `load_dataset` behind an expression, through names and methods such as `.map`."""
    if depth > 8:
        return
    match node:
        case ast.Name(name):
            for value in assigned.get(name, []):
                yield from _loaded(value, assigned, depth + 1)
        case ast.Call(args=[given, *_]) if _called(node) == "load_dataset":
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                yield given.value
        case ast.Subscript(value) | ast.Call(ast.Attribute(value)):
            yield from _loaded(value, assigned, depth + 1)
