"""Check of a user's environment class: constructor and methods accept the calls that a run makes."""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.agent import AgentEnv
from skyrl_mega.envs.tools import ToolEnv

METHODS = {"init": ("prompt",), "step": ("action",), "close": ()}
"""Method → positional arguments of a run's call."""
AGENT_METHODS = {"init": ("prompt",), "run": ("endpoint", "prompt"), "close": ()}
"""The same for an `AgentEnv`."""


def check(cls: type, key: str, path: str) -> None:
    """Checks, by signatures alone, that a run can create a class and call its methods: `init`, `step` (for an agent
    `run`), `close`, and `judge` of a `ToolEnv`. Creates and calls nothing.

    Args:
        cls: Environment class.
        key: Setting with the class's path, for errors.
        path: The class's path, for errors.

    Raises:
        UserError: The constructor or a method does not accept its arguments.
    """
    if wrong := _wrong_call(cls):
        problem, form = wrong
        raise UserError(problem, key=key, value=path, fix=f"write `def {form}`")


@cache
def _wrong_call(cls: type) -> tuple[str, str] | None:
    """Returns the first call that a class does not accept, and the form that would; None without one."""
    try:
        constructor = inspect.signature(cls, follow_wrapped=False)
    except (TypeError, ValueError):  # a class written in C may have no signature
        constructor = None
    if constructor and (error := _refusal(constructor, env_config=None, extras=None)):
        problem = f"{cls.__name__} cannot be created by {cls.__name__}(env_config=…, extras=…): {error}"
        return problem, "__init__(self, env_config=None, extras=None)"
    is_judged = issubclass(cls, ToolEnv) and cls.step is ToolEnv.step
    methods = AGENT_METHODS if issubclass(cls, AgentEnv) else METHODS
    for name, arguments in (methods | ({"judge": ("answer",)} if is_judged else {})).items():
        method = inspect.getattr_static(cls, name)
        if isinstance(method, FunctionType):  # other callables may bind their arguments in ways of their own
            error = _refusal(inspect.signature(method, follow_wrapped=False), cls, *arguments)
            if error:
                problem = f"{cls.__name__}.{name} cannot be called by {name}({', '.join(arguments)}): {error}"
                return problem, f"{name}({', '.join(('self', *arguments))})"
    return None


def _refusal(signature: inspect.Signature, *args: object, **kwargs: object) -> str:
    """Returns the reason why a signature does not accept arguments; empty if it does."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""
