"""Addition with the answer's digits reversed: what a tiny model learns and carries over to new problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option
from skyrl_mega.envs.truths import wrong_spelling


def units_first(number: int) -> str:
    """A number's digits in reverse: 85 is "58". Written so, each carry of a sum is known before it is needed."""
    return str(number)[::-1]


class AdditionEnv(BaseTextEnv):
    """1 when the answer is exactly the reversed sum (white space around it is ignored), else 0; one turn."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Allowed is a text without space around it, which an answer never has."""
        around = str(truth) != str(truth).strip()
        return wrong_spelling(truth) or ("it has space around it; allowed is the answer alone" if around else None)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the answer."""
        answer = action.strip()
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(answer == str(self.ground_truth)),
            done=True,
            metadata={"parsed_answer": answer},
        )
