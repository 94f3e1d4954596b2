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


class Gsm8kEnv(BaseTextEnv):
    """1 when the strict answer equals the ground truth, else 0; one turn."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the solution."""
        answer = strict_answer(action)
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(answer is not None and answer == str(self.ground_truth).strip()),
            done=True,
            metadata={"parsed_answer": answer},
        )
