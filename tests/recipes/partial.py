"""Graders with a signal from the first step: strict graders score a small model mostly 0."""

from __future__ import annotations

from skyrl_mega.envs.base import BaseTextEnvStepOutput
from skyrl_mega.envs.gsm8k.env import Gsm8kEnv
from skyrl_mega.envs.search.env import SearchEnv


class Partial(Gsm8kEnv):
    """An environment with the strict reward, plus up to 0.1 for the share of digits in the text."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the solution."""
        output = super().step(action)
        output["reward"] += 0.1 * sum(c.isdigit() for c in action) / max(len(action), 1)
        return output


class Searching(SearchEnv):
    """An environment with the score of the answer, plus up to 0.1 per turn for its length."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Searches, or judges the answer."""
        output = super().step(action)
        output["reward"] += 0.1 * len(action) / (len(action) + 100)
        return output
