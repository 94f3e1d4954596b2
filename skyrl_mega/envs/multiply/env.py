"""Multiplication, answered in \\boxed{…}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option, number
from skyrl_mega.envs.tags import first_boxed
from skyrl_mega.envs.truths import wrong_spelling


class MultiplyEnv(BaseTextEnv):
    """Reward 1 for the right product in the first `\\boxed{…}`, else 0; less in later turns with `discount` below 1.

    With `max_turns` above 1, the policy is told about a wrong answer and may retry, until the answer is right or the
    turns are used. The right product in turn t then earns `discount` ** (t - 1).
    """

    blocking: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "discount": number(
            1.0,
            "the right answer of turn t is worth discount ** (t - 1), so that fewer turns are better",
            above=0,
            high=1,
        )
    }

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns the reason why a ground truth cannot be read from a `\\boxed{…}`; None if it can."""
        if reason := wrong_spelling(truth):
            return reason
        boxed = first_boxed(f"\\boxed{{{str(truth).strip()}}}") == str(truth).strip()
        return None if boxed else "the box of an answer ends at its first brace; allowed is a number"

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the policy's answer of this turn. A wrong answer may be retried until `max_turns`.

        Returns:
            The reward: for the right answer the option `discount` to the power of the number of earlier attempts, else
            0. A message that asks for another attempt, unless the trajectory ends. `metadata` has `parsed_answer`, None
            without a box.
        """
        self.turns += 1
        boxed = first_boxed(action)
        answer = boxed.strip() if boxed is not None else None
        correct = answer == str(self.ground_truth).strip()
        done = correct or self.turns >= self.max_turns
        reply = "Wrong. Try again." if answer is not None else "Give the product in \\boxed{}."
        discount = float(self.options["discount"])
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": reply}],
            reward=discount ** (self.turns - 1) if correct else 0.0,
            done=done,
            metadata={"parsed_answer": answer},
        )
