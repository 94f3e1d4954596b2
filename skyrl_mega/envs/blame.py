"""Location of a fault in an environment's own source file: the first place for the author to look."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry
from skyrl_mega.envs.agent import AgentEnv
from skyrl_mega.envs.validate import BadOutput

PACKAGE = Path(__file__).parents[1]
ENVIRONMENTS = Path(__file__).parent
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
"""Folders of Python's own modules and of installed packages."""


def fault_location(error: BaseException | None, name: str, config: EnvironmentConfig) -> str | None:
    """Returns the place of a fault as `/path/my_env.py, line 12, in step: the line's text`; None if the environment
    cannot be found or has no source file.

    The place is the innermost frame outside Python, installed packages and this package; for a built-in environment,
    the innermost frame in the environment's own folder. Without such a frame, or without an exception (a step timed out
    or broke the contract), the place is the definition of the class's `step`, of an agent's `run`, or of the reward
    function, without a line's text. Exceptions that caused `error` are not examined.

    Args:
        error: The exception raised by the environment; None without.
        name: Registered name of the environment.
        config: Names and import paths.
    """
    raised = error if not isinstance(error, BadOutput) else None  # BadOutput is raised in this package
    frames = traceback.extract_tb(raised.__traceback__) if raised else []
    try:
        cls = registry.resolve(name, config)
        method = cls.run if issubclass(cls, AgentEnv) else cls.step
        source = inspect.getsourcefile(step := getattr(cls, "users_code", method))
        env_file = Path(source or "").absolute()
    except (UserError, TypeError, OSError):
        return None
    for frame in reversed(frames):
        file = Path(frame.filename).absolute()
        if file == env_file or _is_users(file):
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line or ''}".rstrip(": ")
    return (
        f"{env_file}, line {step.__code__.co_firstlineno}, in {step.__name__}"
        if hasattr(step, "__code__")
        else str(env_file)
    )


def _is_users(file: Path) -> bool:
    """Returns True if a file is not part of Python, an installed package, or this package without its environments."""
    if file.is_relative_to(ENVIRONMENTS):
        return file.parent != ENVIRONMENTS
    return file.is_file() and not any(file.is_relative_to(folder) for folder in (PACKAGE, *LIBRARIES))
