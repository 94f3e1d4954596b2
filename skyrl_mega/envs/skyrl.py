"""Adapter for environments written for SkyRL: classes derived from `skyrl_gym`, or from the stand-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, cast

from omegaconf import OmegaConf

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs import skyrl_gym
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.validate import BadOutput

BASES = (skyrl_gym.__name__, f"{skyrl_gym.PACKAGE}.core", f"{skyrl_gym.PACKAGE}.envs.base_text_env")
"""Modules that define SkyRL's base classes: the stand-in, and two of the package."""
CONTRACT = ("observations", "reward", "done", "metadata")
"""Keys of a step's output with the same meaning here; SkyRL ignores unknown keys too."""


class SkyrlEnv(BaseTextEnv):
    """A user's environment for SkyRL; `environment_of` creates the class for a class of the user.

    The user's class gets the options as a `DictConfig`, and the same `extras` as in SkyRL.
    """

    requires_ground_truth = False
    env_type: ClassVar[Callable[..., Any]]
    """The user's class."""
    users_code: ClassVar[Callable[..., Any]]
    """The user's `step`, for reports of faults."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.env = type(self).env_type(env_config=OmegaConf.create(dict(self.options)), extras=dict(self.extras))

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Calls `init` of the user's environment and returns its result: first messages and information. Errors of the
        user's code are raised unchanged."""
        opened: tuple[list[Message], dict[str, Any]] = self.env.init(prompt)
        return opened

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Calls `step` of the user's environment and returns its observations, reward, end and metadata; the result of
        `get_metrics`, if any, goes to `metadata["metrics"]`. A result that is no mapping is returned unchanged, and
        refused later. Errors of the user's code are raised unchanged.

        Raises:
            BadOutput: The environment changes the policy's text (`postprocessed_action`).
        """
        output = self.env.step(action)
        if not isinstance(output, Mapping):
            return output  # refused by envs/validate.py
        if output.get("postprocessed_action") not in (None, action):
            raise BadOutput(
                "step: postprocessed_action differs from the policy's text, and only tokens of the engine are trained "
                "on; allowed: None; end a turn at a string with rollout.sampling.stop"
            )
        kept = {key: output[key] for key in CONTRACT if key in output}
        figures = self.env.get_metrics() if hasattr(self.env, "get_metrics") else {}  # absent in earlier versions
        if figures and isinstance(kept.get("metadata"), Mapping | None):
            kept["metadata"] = {**(kept.get("metadata") or {}), "metrics": dict(figures)}
        return cast(BaseTextEnvStepOutput, kept)

    def close(self) -> None:
        """Closes the user's environment."""
        self.env.close()


def is_skyrl(cls: type) -> bool:
    """Returns True for a class derived from the package `skyrl_gym` or from the stand-in."""
    return any(map(_is_base, cls.__mro__))


@cache
def environment_of(cls: type, setting: str) -> type[SkyrlEnv]:
    """Returns a subclass of `SkyrlEnv` for a user's class; the same subclass for the same arguments.

    Args:
        cls: The user's class, accepted by `is_skyrl`.
        setting: Setting with the class's path, for errors.

    Raises:
        UserError: The class has no `step`.
    """
    owner = next((base for base in cls.__mro__ if "step" in vars(base)), None)
    if owner is None or _is_base(owner):
        fix = "write `def step(self, action)`, which judges a turn"
        raise UserError(f"{cls.__name__} has no step", key=setting, fix=fix)
    body = {"__doc__": cls.__doc__, "env_type": cls, "users_code": staticmethod(vars(owner)["step"])}
    return cast(type[SkyrlEnv], type(cls.__name__, (SkyrlEnv,), body))


def _is_base(cls: type) -> bool:
    return cls.__module__ in BASES
