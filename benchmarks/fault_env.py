"""Addition whose reward is a coin of the answer's letters: a policy that knows nothing has something to learn from."""

from __future__ import annotations

from skyrl_mega.envs.addition.env import AdditionEnv
from skyrl_mega.envs.base import BaseTextEnvStepOutput


class ParityEnv(AdditionEnv):
    """1 where the sum of the letters' numbers is odd."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges one answer."""
        output = super().step(action)
        output["reward"] = float(sum(map(ord, action)) % 2)
        return output
