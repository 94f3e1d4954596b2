"""Environments by name: the built-in ones, and the user's own by import path.

A name is resolved from the configuration alone, so that any process with the same configuration and working directory
finds the same class. A row of data can only name what is registered: data never decides which code is imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs.base import BaseTextEnv
from skyrl_mega.envs.options import filled

BUILT_IN: Mapping[str, str] = {
    "addition": "skyrl_mega.envs.addition.env:AdditionEnv",
    "aime": "skyrl_mega.envs.aime.env:AimeEnv",
    "gsm8k": "skyrl_mega.envs.gsm8k.env:Gsm8kEnv",
    "gsm8k_multi_turn": "skyrl_mega.envs.gsm8k_multi_turn.env:Gsm8kMultiTurnEnv",
    "gym": "skyrl_mega.envs.gym.env:GymEnv",
    "lcb": "skyrl_mega.envs.lcb.env:LcbEnv",
    "math": "skyrl_mega.envs.math.env:MathEnv",
    "multiply": "skyrl_mega.envs.multiply.env:MultiplyEnv",
    "python": "skyrl_mega.envs.python_tool.env:PythonToolEnv",
    "search": "skyrl_mega.envs.search.env:SearchEnv",
    "swe": "skyrl_mega.envs.swe.env:SweEnv",
    "text2sql": "skyrl_mega.envs.text2sql.env:Text2SqlEnv",
}
"""Name → import path of the environments that come with the project."""

CONTRACT = ("BaseTextEnv", "BaseTextEnvStepOutput")
"""What a pasted class takes from this package."""


def names(config: EnvironmentConfig) -> list[str]:
    """Every name that a row's `env_class` may have."""
    return sorted({*BUILT_IN, *config.classes})


def resolve(name: str, config: EnvironmentConfig) -> type[BaseTextEnv]:
    """The class behind a name; the user's own go before the built-in ones.

    Raises:
        UserError: The name is unknown, or its import path leads nowhere.
    """
    path = config.classes.get(name) or BUILT_IN.get(name)
    if path is None:
        raise UserError(unknown_name(name, config))
    return _load(path, f"environment.classes.{name}")


def unknown_name(name: str, config: EnvironmentConfig) -> str:
    """What to say of a name that is not registered: the nearest, the allowed, the fix."""
    allowed = names(config)
    near = get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"environment {name!r} is unknown: {hint}allowed: {', '.join(allowed)}; "
        f"your own: environment.classes.{name}=package.module:Class"
    )


def make(name: str, extras: Mapping[str, Any], config: EnvironmentConfig, max_turns: int | None = None) -> BaseTextEnv:
    """A fresh environment for one trajectory.

    Args:
        name: Registered name.
        extras: What the row carries beside its prompt.
        config: Names, import paths and options.
        max_turns: `rollout.max_turns`; the environment finds it as `extras["max_turns"]` and `self.max_turns`.
    """
    given = dict(extras) if max_turns is None else {**extras, "max_turns": max_turns}
    cls = resolve(name, config)
    return cls(env_config=_settings(cls, config.options.get(name) or {}, config), extras=given)


def check(config: EnvironmentConfig, used: Iterable[str] = ()) -> None:
    """Resolves every registered class and every name in `used`, and checks all options, before any process starts.

    Raises:
        UserError: An import path that leads nowhere, an unknown name, options for a name that is not registered, or
            options that an environment does not have.
    """
    for name in (*config.classes, *used, *filter(None, [config.default])):
        resolve(name, config)
    for name in config.options:
        if name not in names(config):
            raise UserError(f"environment.options.{name}: {unknown_name(name, config)}")
        check_options(name, config)


def check_options(name: str, config: EnvironmentConfig) -> Mapping[str, Any]:
    """An environment's options, filled and checked.

    Raises:
        UserError: One that it does not have, or a value that it does not allow.
    """
    cls, key, given = resolve(name, config), f"environment.options.{name}", config.options.get(name)
    if not issubclass(cls, BaseTextEnv):
        return filled(key, given, None)
    options = filled(key, given, cls.OPTIONS)
    cls.check_options(options)
    return options


def check_ready(name: str, config: EnvironmentConfig) -> None:
    """Lets an environment that rows ask for refuse its options or the machine, before any process starts.

    Raises:
        UserError: It does.
    """
    cls = resolve(name, config)
    if issubclass(cls, BaseTextEnv):
        cls.check_ready(_settings(cls, check_options(name, config), config))


def _settings(cls: type[BaseTextEnv], options: Mapping[str, Any], config: EnvironmentConfig) -> Mapping[str, Any]:
    """Options; with `retriever`, the settings of the retrieval service, for an environment that asks it."""
    return {**options, "retriever": config.retriever} if getattr(cls, "needs_retriever", False) else options


def with_absolute_paths(config: EnvironmentConfig) -> EnvironmentConfig:
    """The same names with file paths made absolute, for processes that start in another folder."""
    classes = {}
    for name, path in config.classes.items():
        source, _, attribute = path.rpartition(":")
        classes[name] = f"{Path(source).absolute()}:{attribute}" if source.endswith(".py") else path
    return replace(config, classes=classes)


def _load(path: str, key: str) -> type[BaseTextEnv]:
    source, _, attribute = path.rpartition(":")
    if not source or not attribute:
        raise UserError(f"{key}={path}: allowed: package.module:Class or path/to/file.py:Class")
    module = _module_of_file(source, key) if source.endswith(".py") else _module_of_name(source, path, key)
    cls = getattr(module, attribute, None)
    if cls is None:
        own = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        near = get_close_matches(attribute, own, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(own) or 'no class'}"
        raise UserError(f"{key}={path}: {source} has no class {attribute}; {hint}")
    if not isinstance(cls, type) or not all(callable(getattr(cls, m, None)) for m in ("init", "step", "close")):
        raise UserError(
            f"{key}={path}: {attribute} is no environment; allowed: a class with init, step and close, "
            "as skyrl_mega.envs.BaseTextEnv has them"
        )
    if issubclass(cls, BaseTextEnv) and cls.step is BaseTextEnv.step:
        raise UserError(f"{key}={path}: {attribute} has no step; write `def step(self, action)`, which judges a turn")
    return cls


def _module_of_file(source: str, key: str) -> ModuleType:
    file = Path(source).absolute()
    if not file.is_file():
        raise UserError(f"{key}: {file} does not exist; give the path of a Python file (relative to {Path.cwd()})")
    # Its own name in sys.modules: dataclasses and pickle look a class's module up there.
    name = f"skyrl_mega_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is read
        del sys.modules[name]
        raise UserError(f"{key}: {file}{_line_of(error, file)} cannot be imported: {_one_line(error)}") from error
    return module


def _module_of_name(source: str, path: str, key: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # as `python -m` has it; a Ray worker starts without
    try:
        return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{key}={path}: {source} cannot be imported: {_one_line(error)}; "
            "allowed: a module that Python finds from the working directory, or path/to/file.py:Class"
        ) from error


def _line_of(error: BaseException, file: Path) -> str:
    """`, line 3` where the error's way led through that line of the file; the last such line."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f", line {lines[-1]}" if lines else ""


def _one_line(error: BaseException) -> str:
    """Type and message; where a name of the contract is missing, the line that brings it."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    text = f"{type(error).__name__}: {' '.join(said.split())}"
    if isinstance(error, NameError) and error.name in CONTRACT:
        text += f"; add `from skyrl_mega.envs import {', '.join(CONTRACT)}`"
    return text
