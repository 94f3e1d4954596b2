"""Registry of environments by name: built-in classes, and user classes by import path.

A name is resolved from the configuration alone, so every process with the same configuration and working directory
finds the same class. A data row can only name registered environments: data never decides which code is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.config.schema.environment import REWARD_FUNCTION
from skyrl_mega.envs import calls, reward_function, skyrl, skyrl_gym
from skyrl_mega.envs.agent import AgentEnv
from skyrl_mega.envs.base import BaseTextEnv
from skyrl_mega.envs.options import filled
from skyrl_mega.envs.tools import ToolEnv, calls_tools, definitions

BUILT_IN: Mapping[str, str] = {
    "addition": "skyrl_mega.envs.addition.env:AdditionEnv",
    "aime": "skyrl_mega.envs.aime.env:AimeEnv",
    "calculator": "skyrl_mega.envs.calculator.env:CalculatorEnv",
    "gsm8k": "skyrl_mega.envs.gsm8k.env:Gsm8kEnv",
    "gsm8k_multi_turn": "skyrl_mega.envs.gsm8k_multi_turn.env:Gsm8kMultiTurnEnv",
    "gym": "skyrl_mega.envs.gym.env:GymEnv",
    "harness": "skyrl_mega.envs.harness.env:HarnessEnv",
    "lcb": "skyrl_mega.envs.lcb.env:LcbEnv",
    "math": "skyrl_mega.envs.math.env:MathEnv",
    "multiply": "skyrl_mega.envs.multiply.env:MultiplyEnv",
    "python": "skyrl_mega.envs.python_tool.env:PythonToolEnv",
    "search": "skyrl_mega.envs.search.env:SearchEnv",
    "swe": "skyrl_mega.envs.swe.env:SweEnv",
    "text2sql": "skyrl_mega.envs.text2sql.env:Text2SqlEnv",
    "tool_choice": "skyrl_mega.envs.tool_choice.env:ToolChoiceEnv",
    "verifiers": "skyrl_mega.envs.verifiers.env:VerifiersEnv",
}
"""Name → import path of the built-in environments."""

ROW_HOOKS = ("wrong_row", "wrong_ground_truth")
"""Methods of an environment that may refuse a row."""

CONTRACT = ("AgentEndpoint", "AgentEnv", "BaseTextEnv", "BaseTextEnvStepOutput", "Tool", "ToolEnv", "ToolError")
"""Names from this package used by a pasted environment class."""
CONTRACT_IMPORT = f"from skyrl_mega.envs import {', '.join(CONTRACT)}"


def names(config: EnvironmentConfig) -> list[str]:
    """Returns every allowed value of a row's `env_class`, sorted: built-in environments, and the user's own."""
    return sorted({*BUILT_IN, *config.classes, *([REWARD_FUNCTION] if config.reward_function else [])})


def resolve(name: str, config: EnvironmentConfig) -> type[BaseTextEnv]:
    """Imports and returns the class of an environment name: a key of `environment.classes`, the name of a built-in
    environment, or `reward_function`; never an import path. User classes and functions take precedence over built-in
    classes. A class for SkyRL or a reward function is wrapped in an adapter class.

    Args:
        name: The name.
        config: The settings `environment`.

    Raises:
        UserError: The name is unknown, the import fails (also if the user's code raises), or the object is no
            environment.
    """
    if name == REWARD_FUNCTION and config.reward_function:
        return _load(config.reward_function, f"environment.{REWARD_FUNCTION}", "function")
    path = config.classes.get(name) or BUILT_IN.get(name)
    if path is None:
        raise UserError(unknown_name(name, config))
    return _load(path, f"environment.classes.{name}", "class")


def unknown_name(name: str, config: EnvironmentConfig, *, in_row: bool = False) -> str:
    """Returns the error text for an unregistered name: the nearest name, the allowed names, the fix.

    Args:
        name: The name.
        config: Names and import paths.
        in_row: True for the `env_class` of a row, which `environment.reward_function` then does not judge.
    """
    allowed = names(config)
    near = get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    yours = f"your own: environment.classes.{name}=package.module:Class"
    if in_row and config.reward_function:
        yours = (
            f"environment.{REWARD_FUNCTION} judges only rows without env_class: leave env_class out, or give "
            f"environment.classes.{name}={config.reward_function}"
        )
    return f"environment {name!r} is unknown: {hint}allowed: {', '.join(allowed)}; {yours}"


def make(name: str, extras: Mapping[str, Any], config: EnvironmentConfig, max_turns: int | None = None) -> BaseTextEnv:
    """Creates and returns the environment for a trajectory.

    Args:
        name: Registered name.
        extras: The row's columns besides the prompt.
        config: Names, import paths and options.
        max_turns: `rollout.max_turns`; available as `extras["max_turns"]` and `self.max_turns`. None leaves `extras`
            unchanged.

    Raises:
        UserError: The name is unknown, the import path leads nowhere, or an option is invalid.
        Exception: A user's class raised it.
    """
    return create(resolve(name, config), name, extras, config, max_turns)


def create(
    cls: type[BaseTextEnv], name: str, extras: Mapping[str, Any], config: EnvironmentConfig, max_turns: int | None
) -> BaseTextEnv:
    """Creates and returns the environment for a trajectory, from the class of its name.

    Args:
        cls: Class of the name, from `resolve`.
        name: Registered name.
        extras: The row's columns besides the prompt.
        config: Names, import paths and options.
        max_turns: `rollout.max_turns`, available as `extras["max_turns"]`; None leaves `extras` unchanged.

    Raises:
        UserError: An option is invalid.
        Exception: A user's class raised it.
    """
    row_extras = dict(extras) if max_turns is None else {**extras, "max_turns": max_turns}
    return cls(env_config=_settings(cls, config.options.get(name) or {}, config), extras=row_extras)


def runs_inline(cls: type[BaseTextEnv]) -> bool:
    """Returns True if the class itself, not a parent class, declares that no method blocks (`BaseTextEnv.blocking`)."""
    return vars(cls).get("blocking") is False


def needs_close(env: BaseTextEnv) -> bool:
    """Returns True if `close` of the environment's class or instance is not the empty method of `BaseTextEnv`."""
    return type(env).close is not BaseTextEnv.close or "close" in getattr(env, "__dict__", ())


def check(config: EnvironmentConfig, used: Iterable[str] = ()) -> None:
    """Imports every registered class and every name in `used`, and checks all options, before any process starts.

    Args:
        config: The settings `environment`.
        used: Names of further environments, such as those of rows.

    Raises:
        UserError: An import path leads nowhere, a name is unknown, options belong to an unregistered name, an option
            does not exist or has an invalid value, or a reward function cannot be called.
    """
    for name in (*config.classes, *used, *filter(None, [config.default_name])):
        if issubclass(resolve(name, config), reward_function.RewardFunctionEnv):
            check_options(name, config)
    for name in config.options:
        if name not in names(config):
            raise UserError(unknown_name(name, config), key=f"environment.options.{name}")
        check_options(name, config)


def check_reward_function(config: EnvironmentConfig, used: Sequence[str]) -> None:
    """Checks that some row is judged by `environment.reward_function`, if set.

    Args:
        config: Names and import paths.
        used: Environments of the rows; empty if no data file exists yet.

    Raises:
        UserError: All rows name other environments, so the function would never be called.
    """
    if config.reward_function and used and REWARD_FUNCTION not in used:
        raise UserError(
            f"no row uses it: the rows' env_class is {', '.join(used)}",
            key=f"environment.{REWARD_FUNCTION}",
            value=config.reward_function,
            fix=f"give rows without env_class, or environment.classes.{used[0]}={config.reward_function}",
        )


def check_options(name: str, config: EnvironmentConfig) -> Mapping[str, Any]:
    """Returns the options of the environment `name`, checked and completed with defaults. A class without `OPTIONS`
    accepts any.

    Raises:
        UserError: An option does not exist, a value is not allowed, or `resolve` raises it.
    """
    cls, key, raw_options = resolve(name, config), f"environment.options.{name}", config.options.get(name)
    if not issubclass(cls, BaseTextEnv):
        return filled(key, raw_options, None)
    options = filled(key, raw_options, cls.OPTIONS)
    cls.check_options(options)
    return options


def check_ready(name: str, config: EnvironmentConfig) -> None:
    """Checks the options of the environment `name`, and calls its `check_ready` to check this machine, before any
    process starts. Of a class not derived from `BaseTextEnv`, only the import is checked.

    Raises:
        UserError: An option is invalid, the machine lacks a requirement, or `resolve` raises it.
        Exception: The environment's `check_ready` raised it, such as InfrastructureFault.
    """
    cls = resolve(name, config)
    if issubclass(cls, BaseTextEnv):
        cls.check_ready(_settings(cls, check_options(name, config), config))


def try_machine(name: str, config: EnvironmentConfig) -> None:
    """Calls `try_machine` of the environment `name`, if its class is derived from `BaseTextEnv`.

    Raises:
        UserError: A trajectory could not start on this machine, an option is invalid, or `resolve` raises it.
        Exception: The environment's `try_machine` raised it, such as InfrastructureFault.
    """
    cls = resolve(name, config)
    if issubclass(cls, BaseTextEnv):
        cls.try_machine(_settings(cls, check_options(name, config), config))


def check_columns(name: str, columns: Iterable[str], where: str, config: EnvironmentConfig) -> None:
    """Checks that a reward function in TRL's form can be called with the columns of a file. Accepts any columns for
    verl's form and for other environments.

    Args:
        name: Registered name.
        columns: Names of the file's columns.
        where: Setting and file, for errors.
        config: Names, import paths and options.

    Raises:
        UserError: The function needs a column that the file has not, or does not accept one of the columns; or
            `resolve` raises it.
    """
    cls = resolve(name, config)
    if not issubclass(cls, reward_function.RewardFunctionEnv):
        return
    if wrong := cls.wrong_columns(columns, check_options(name, config)):
        raise UserError(
            f"{wrong} (the arguments are the columns of {where}, TRL's lists and the function's options)",
            key=cls.setting,
            value=config.classes.get(name) or config.reward_function,
            fix="give the rows the column, or the parameter a default; **kwargs takes the other columns",
        )


def row_check(name: str, config: EnvironmentConfig) -> Callable[[Mapping[str, Any]], str | None] | None:
    """Returns an environment's check of rows; None if the environment accepts every row.

    The check takes a row's columns without the prompt, and returns the reason why no answer to the row can earn the
    reward, or None.

    Args:
        name: Registered name.
        config: Names, import paths and options.

    Raises:
        UserError: An option is invalid, or `resolve` raises it.
    """
    cls = resolve(name, config)
    if not issubclass(cls, BaseTextEnv):
        return None
    if all(getattr(cls, hook).__func__ is getattr(BaseTextEnv, hook).__func__ for hook in ROW_HOOKS):
        return None
    options = check_options(name, config)
    return lambda row: cls.wrong_row(row, options)


def _settings(cls: type[BaseTextEnv], options: Mapping[str, Any], config: EnvironmentConfig) -> Mapping[str, Any]:
    """Returns the options, plus `retriever`, the settings of the retrieval service, for an environment using it."""
    return {**options, "retriever": config.retriever} if getattr(cls, "needs_retriever", False) else options


def has_tools(name: str, config: EnvironmentConfig) -> bool:
    """Returns True if the environment is a `ToolEnv`: its policy calls tools in the format of the model's template.

    Raises:
        UserError: The name is unknown, the import fails, or the class's `tools` are not tools.
    """
    tools(name, config)
    return calls_tools(resolve(name, config))


def tools(name: str, config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Returns the tools of an environment's class in chat-template form; [] for a class without tools or with tools per
    row.

    Raises:
        UserError: The name is unknown, the import fails, or the class's `tools` are not tools.
    """
    try:
        return definitions(resolve(name, config))
    except TypeError as error:
        raise UserError(f"environment {name}: {error}") from error


def with_absolute_paths(config: EnvironmentConfig) -> EnvironmentConfig:
    """Returns the configuration with absolute paths of the `file.py:Name` classes and functions, and of files named by
    options, for processes started in another folder; import paths stay as they are.

    Raises:
        UserError: Options belong to an unregistered name, or to a class that cannot be imported.
    """
    classes = {name: imports.absolute(path) for name, path in config.classes.items()}
    options = {name: _absolute_options(name, given, config) for name, given in config.options.items()}
    return replace(
        config, classes=classes, options=options, reward_function=imports.absolute(config.reward_function or "") or None
    )


def _absolute_options(name: str, given: Any, config: EnvironmentConfig) -> Any:
    cls = resolve(name, config)
    return cls.with_absolute_paths(given) if given and issubclass(cls, BaseTextEnv) else given


def _load(path: str, key: str, kind: str) -> type[BaseTextEnv]:
    contract = dict.fromkeys(CONTRACT, CONTRACT_IMPORT)
    cls = imports.load(path, key, kind=kind, contract=contract, stand_ins=skyrl_gym.modules)
    attribute = path.rpartition(":")[2]
    if kind == "function" and isinstance(cls, type):
        raise UserError(
            f"{attribute} is a class; allowed: {reward_function.FORMS}",
            key=key,
            value=path,
            fix=f"for an environment class give environment.classes.mine={path} environment.default=mine instead",
        )
    if callable(cls) and not isinstance(cls, type):
        return reward_function.environment_of(cls, key)
    if isinstance(cls, type) and skyrl.is_skyrl(cls):
        adapted = skyrl.environment_of(cls, key)
        calls.check(cls, key, path)
        return adapted
    if not isinstance(cls, type) or not all(callable(getattr(cls, m, None)) for m in ("init", "step", "close")):
        raise UserError(
            f"{attribute} is no environment; allowed: a class with init, step and close, as "
            "skyrl_mega.envs.BaseTextEnv has them, or a reward function",
            key=key,
            value=path,
        )
    for base, form, purpose in _own_methods(cls):
        name = form.partition("(")[0]
        if getattr(cls, name) is getattr(base, name):
            fix = f"write `def {form}`, {purpose}"
            raise UserError(f"{attribute} has no {name}", key=key, value=path, fix=fix)
    calls.check(cls, key, path)
    return cls


def _own_methods(cls: type) -> Iterator[tuple[type, str, str]]:
    """Yields the methods that a class must override: base class, form of the method, purpose of the method."""
    if issubclass(cls, AgentEnv):
        yield AgentEnv, "run(self, endpoint, prompt)", "which runs the agent and grades it"
    elif issubclass(cls, BaseTextEnv):
        yield BaseTextEnv, "step(self, action)", "which judges a turn"
    if issubclass(cls, ToolEnv) and cls.step is ToolEnv.step:
        yield ToolEnv, "judge(self, answer)", "the reward of an answer"
