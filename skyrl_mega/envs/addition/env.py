"""Addition with reversed answer digits: learnable by a tiny model, and transferable to new problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option
from skyrl_mega.envs.truths import wrong_spelling


def units_first(number: int) -> str:
    """Returns a number's digits in reverse: 85 becomes "58". Each carry of a sum is then known in time."""
    return str(number)[::-1]


class AdditionEnv(BaseTextEnv):
    """Reward 1 if the answer is exactly the reversed sum (surrounding white space ignored), else 0; one turn."""

    blocking: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns the reason why a ground truth cannot earn the reward: it is no text or number, is written as 18.0, or
        has surrounding white space, since answers are stripped. None if valid."""
        around = str(truth) != str(truth).strip()
        return wrong_spelling(truth) or ("it has space around it; allowed is the answer alone" if around else None)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the answer `action` and ends the trajectory: returns reward 1 for the sum with its digits in reverse,
        else 0, without messages; `metadata` is {"parsed_answer": the answer without surrounding white space}."""
        answer = action.strip()
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(answer == str(self.ground_truth)),
            done=True,
            metadata={"parsed_answer": answer},
        )
