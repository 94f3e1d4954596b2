"""A grader with a signal from the first step: what GSM8K's strict one gives a small model is mostly 0."""

from __future__ import annotations

from skyrl_mega.envs.base import BaseTextEnvStepOutput
from skyrl_mega.envs.gsm8k.env import Gsm8kEnv


class Partial(Gsm8kEnv):
    """The strict reward, and up to 0.1 for the share of digits in the text."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the solution."""
        output = super().step(action)
        output["reward"] += 0.1 * sum(c.isdigit() for c in action) / max(len(action), 1)
        return output
