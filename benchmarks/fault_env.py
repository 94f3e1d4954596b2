"""An addition task with a pseudo-random reward from the answer's letters: even an untrained policy gets a learning
signal."""

from __future__ import annotations

from typing import ClassVar

from skyrl_mega.envs.addition.env import AdditionEnv
from skyrl_mega.envs.base import BaseTextEnvStepOutput


class ParityEnv(AdditionEnv):
    """An environment with reward 1 if the sum of the letters' code points is odd."""

    blocking: ClassVar[bool] = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges an answer."""
        output = super().step(action)
        output["reward"] = float(sum(map(ord, action)) % 2)
        return output
