"""GSM8K: grade-school word problems (arXiv:2110.14168), answered as `#### number`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import Option


def strict_answer(text: str) -> str | None:
    """The number after the first `#### `, without thousands separators; None when the format is not kept.

    The first one counts, so that a policy cannot list guesses; SkyRL's and verl's strict grading do the same.
    """
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match.group(1).replace(",", "") if match else None


def is_right(answer: str | None, ground_truth: object) -> bool:
    """Whether the strict answer is the ground truth, which may be written as `1,234` or `$1,234`."""
    return answer is not None and answer == re.sub(r"[,$]", "", str(ground_truth)).strip()


class Gsm8kEnv(BaseTextEnv):
    """1 when the strict answer equals the ground truth, else 0; one turn."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the solution."""
        answer = strict_answer(action)
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(is_right(answer, self.ground_truth)),
            done=True,
            metadata={"parsed_answer": answer},
        )
