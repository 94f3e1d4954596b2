"""GSM8K: grade-school word problems (arXiv:2110.14168), answered as `#### number`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option
from skyrl_mega.envs.truths import wrong_spelling


def strict_answer(text: str) -> str | None:
    """Returns the number after the first `#### ` with a number in a text, without commas; a full stop directly behind
    the number belongs to the result. None without such a number.

    Only the first number counts, so a policy cannot list guesses; the strict grading of SkyRL and verl does the same.
    """
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match.group(1).replace(",", "") if match else None


def is_right(answer: str | None, ground_truth: object) -> bool:
    """Returns True if the strict answer equals the ground truth, possibly written as `1,234` or `$1,234`; False for
    None."""
    return answer is not None and answer == re.sub(r"[,$]", "", str(ground_truth)).strip()


def wrong_truth(truth: Any) -> str | None:
    """Returns the reason why no strict answer can equal a ground truth; None if an answer can."""
    if reason := wrong_spelling(truth):
        return reason
    reachable = is_right(strict_answer(f"#### {str(truth).replace('$', '').strip()}"), truth)
    return None if reachable else "an answer is read as `#### number`; allowed is a number, such as 18, 1,234 or 2.5"


class Gsm8kEnv(BaseTextEnv):
    """Reward 1 if the strict answer equals the ground truth, else 0; one turn."""

    blocking: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a number in the form of a strict answer; else the reason."""
        return wrong_truth(truth)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the solution `action` and ends the trajectory: returns reward 1 if the number after the first `#### `
        is right, else 0, without messages; `metadata` has `parsed_answer`, None without a number."""
        answer = strict_answer(action)
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(is_right(answer, self.ground_truth)),
            done=True,
            metadata={"parsed_answer": answer},
        )
