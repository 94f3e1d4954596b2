"""Multiplication, answered in \\boxed{…}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.options import filled

DEFAULTS = {"discount": 1.0}


class MultiplyEnv(BaseTextEnv):
    """1 for the right product in the first `\\boxed{…}`, else 0.

    With `max_turns` above 1 a wrong answer is told so and may be tried again, until it is right or the turns are used.
    Option `discount` makes the right answer of turn t worth `discount ** (t - 1)`, so that fewer turns are better.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses unknown options and a discount that is none."""
        discount = filled("multiply", options, DEFAULTS)["discount"]
        if isinstance(discount, bool) or not isinstance(discount, int | float) or not 0 < discount <= 1:
            raise UserError(
                f"environment.options.multiply.discount={discount!r}; allowed: a number above 0 and at most 1"
            )

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges one answer."""
        self.turns += 1
        match = re.search(r"\\boxed\{([^}]+)\}", action)
        answer = match.group(1).strip() if match else None
        correct = answer == str(self.ground_truth).strip()
        done = correct or self.turns >= self.max_turns
        reply = "Wrong. Try again." if match else "Give the product in \\boxed{}."
        discount = float(self.env_config.get("discount", DEFAULTS["discount"]))
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": reply}],
            reward=discount ** (self.turns - 1) if correct else 0.0,
            done=done,
            metadata={"parsed_answer": answer},
        )
