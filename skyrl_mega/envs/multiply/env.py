"""Multiplication, answered in \\boxed{…}."""

from __future__ import annotations

import re

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput


class MultiplyEnv(BaseTextEnv):
    """1 for the right product in the first `\\boxed{…}`, else 0.

    With `max_turns` above 1 a wrong answer is told so and may be tried again, until it is right or the turns are used.
    """

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges one answer."""
        self.turns += 1
        match = re.search(r"\\boxed\{([^}]+)\}", action)
        answer = match.group(1).strip() if match else None
        correct = answer == str(self.ground_truth).strip()
        done = correct or self.turns >= self.max_turns
        reply = "That is not the product." if answer is not None else "No \\boxed{} was found."
        return BaseTextEnvStepOutput(
            observations=[]
            if done
            else [{"role": "user", "content": f"{reply} Try again, with the answer in \\boxed{{}}."}],
            reward=float(correct),
            done=done,
            metadata={"parsed_answer": answer},
        )
