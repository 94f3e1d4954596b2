"""The judge of a program's answer: a user's reward function, or an environment of one turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.envs import registry, reward_function
from skyrl_mega.envs.agent import AgentEnv
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.options import filled
from skyrl_mega.envs.tools import ToolEnv
from skyrl_mega.envs.validate import BadOutput


@dataclass(frozen=True)
class AnswerJudge:
    """A judge of answers."""

    cls: type[BaseTextEnv]
    """Environment with the answer as its only turn."""
    options: Mapping[str, Any]
    """Further arguments of the function, or options of the environment with defaults filled in."""

    @classmethod
    def of(cls, path: str, options: Mapping[str, Any], key: str) -> AnswerJudge:
        """Returns the judge of a setting.

        Args:
            path: Import path of a reward function, or the name of a built-in environment.
            options: Further arguments of the function, or options of the environment.
            key: Setting with the path, for errors; `<key>_options` is the setting of the options.

        Raises:
            UserError: The function cannot be imported or has another form, the name is unknown, or an option is wrong.
        """
        judging = _class(path, key)
        complete = filled(f"{key}_options", options, judging.OPTIONS)
        judging.check_options(complete)
        return cls(judging, complete)

    def verdict(self, extras: Mapping[str, Any], prompt: list[Message], answer: str) -> BaseTextEnvStepOutput:
        """Judges an answer; returns the reward, `done` True and notes in `metadata`. Errors of the judge itself pass
        unchanged.

        Args:
            extras: The row's columns without the prompt.
            prompt: The row's messages.
            answer: The program's answer.

        Raises:
            BadOutput: The function gave no reward, or the environment asks for another turn.
        """
        env = self.cls(env_config=self.options, extras={**extras, "max_turns": 1})
        try:
            env.init(prompt)
            if isinstance(env, ToolEnv):  # its `step` would look for tool calls in the answer
                return BaseTextEnvStepOutput(observations=[], reward=float(env.judge(answer)), done=True, metadata={})
            output = env.step(answer)
            if not output["done"]:
                raise BadOutput(f"{self.cls.__name__} asks for another turn; allowed: an environment of one turn")
            return output
        finally:
            env.close()


def _class(path: str, key: str) -> type[BaseTextEnv]:
    if ":" in path:
        function = imports.load(path, key, kind="function")
        if not callable(function) or isinstance(function, type):
            raise UserError(f"it is no function; allowed: {reward_function.FORMS}", key=key, value=path)
        return reward_function.environment_of(function, key)
    cls = registry.resolve(path, EnvironmentConfig()) if path in registry.BUILT_IN else AgentEnv
    if issubclass(cls, AgentEnv):
        raise UserError(
            "allowed: package.module:function or path/to/file.py:function, or the name of a built-in environment that "
            "judges one turn, such as math",
            key=key,
            value=path,
        )
    return cls
