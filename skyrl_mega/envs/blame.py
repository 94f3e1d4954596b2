"""Where in an environment's own file a fault came from: what its author looks at first."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry
from skyrl_mega.envs.validate import BadOutput

PACKAGE = Path(__file__).parents[1]
ENVIRONMENTS = Path(__file__).parent
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


def place(error: BaseException | None, name: str, config: EnvironmentConfig) -> str | None:
    """`my_env.py, line 12, in step: the line's text`; None where that cannot be told.

    It is the innermost frame outside of Python, of installed packages and of this one; of a built-in environment, the
    innermost in its own folder. Without such a frame, or without an error (a step that took too long, or gave what the
    contract does not allow), it is where the class defines `step`.

    Args:
        error: What the environment raised.
        name: The environment's.
        config: Names and import paths.
    """
    raised = error if not isinstance(error, BadOutput) else None  # that one is raised here
    frames = traceback.extract_tb(raised.__traceback__) if raised else []
    try:
        source = inspect.getsourcefile(step := registry.resolve(name, config).step)
        own = Path(source or "").absolute()
    except (UserError, TypeError, OSError):
        return None
    for frame in reversed(frames):
        file = Path(frame.filename).absolute()
        if file == own or _is_users(file):
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line or ''}".rstrip(": ")
    return f"{own}, line {step.__code__.co_firstlineno}, in step" if hasattr(step, "__code__") else str(own)


def _is_users(file: Path) -> bool:
    """Whether a file belongs to neither Python, nor an installed package, nor this one but for its environments."""
    if file.is_relative_to(ENVIRONMENTS):
        return file.parent != ENVIRONMENTS
    return file.is_file() and not any(file.is_relative_to(folder) for folder in (PACKAGE, *LIBRARIES))
