"""GSM8K over several turns: after a wrong answer the policy gets feedback and may try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.gsm8k.env import is_right, strict_answer, wrong_truth
from skyrl_mega.envs.options import Option

FORMAT_REWARD = 0.2
"""Reward of a trajectory with the right format in every turn and no right answer; split over the turns."""


class Gsm8kMultiTurnEnv(BaseTextEnv):
    """GSM8K over several turns. SkyRL's rewards per turn: 1 for the right answer, ending the trajectory; 0.2 /
    max_turns for a wrong answer in the format `#### number`; 0 for no answer.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    metrics: ClassVar[tuple[str, ...]] = ("correct",)

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a number in the form of a strict answer; else the reason."""
        return wrong_truth(truth)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges an attempt, and asks for another attempt after a wrong answer, until `max_turns`.

        Returns:
            Reward 1 for the right answer, 0.2 / max_turns for a wrong answer in the format `#### number`, and 0 for no
            answer. A message with feedback, unless the trajectory ends: after the right answer, or the last turn.
            `metadata` has `parsed_answer` (None without a number) and `correct`.
        """
        self.turns += 1
        answer = strict_answer(action)
        correct = is_right(answer, self.ground_truth)
        reward = 1.0 if correct else 0.0 if answer is None else FORMAT_REWARD / self.max_turns
        done = correct or self.turns >= self.max_turns
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": self._feedback(answer)}],
            reward=reward,
            done=done,
            metadata={"parsed_answer": answer, "correct": correct},
        )

    def _feedback(self, answer: str | None) -> str:
        verdict = "No answer was found" if answer is None else f"{answer} is not right"
        if self.max_turns - self.turns == 1:
            return f"{verdict}. This is the last attempt: give the final answer as '#### number'."
        return f"{verdict}. Go through it again step by step and give the answer as '#### number'."
