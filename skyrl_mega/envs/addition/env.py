"""Addition with the answer's digits reversed: what a tiny model learns and carries over to new problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option


def units_first(number: int) -> str:
    """A number's digits in reverse: 85 is "58". Written so, each carry of a sum is known before it is needed."""
    return str(number)[::-1]


class AdditionEnv(BaseTextEnv):
    """1 when the answer is exactly the reversed sum (white space around it is ignored), else 0; one turn."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the answer."""
        answer = action.strip()
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(answer == str(self.ground_truth)),
            done=True,
            metadata={"parsed_answer": answer},
        )
