"""Mathematics with an answer that can be checked (DAPO, AIME, MATH)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.config.errors import UserError
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.math import check
from skyrl_mega.envs.math.answer import TAIL, extract
from skyrl_mega.envs.options import filled, one_of


class MathEnv(BaseTextEnv):
    """One turn. `right` for the right answer, `wrong` for another or none.

    The answer is the last `\\boxed{…}` or `Answer:` line, whichever comes later, in the last characters of the text. It
    is right when it is the same number, or the same expression by algebra.
    """

    metrics: ClassVar[tuple[str, ...]] = ("correct",)
    NAME: ClassVar[str] = "math"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "right": 1.0,
        "wrong": 0.0,
        "answer": "either",
        "tail": TAIL,
        "algebra": True,
        "timeout_s": 5.0,
    }
    """`environment.options.math`. answer: either, boxed or line; tail: characters that are looked at, 0 for all;
    algebra: whether expressions are compared beyond their text; timeout_s: for one comparison."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.options = filled(self.NAME, self.env_config, self.DEFAULTS)

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses unknown options and rewards that are no numbers."""
        given = filled(cls.NAME, options, cls.DEFAULTS)
        one_of(cls.NAME, "answer", given["answer"], ("either", "boxed", "line"))
        for key in ("right", "wrong", "tail", "timeout_s"):
            if isinstance(given[key], bool) or not isinstance(given[key], int | float):
                raise UserError(f"environment.options.{cls.NAME}.{key}={given[key]!r}; allowed: a number")

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Refuses to start without the library that does algebra."""
        if filled(cls.NAME, options, cls.DEFAULTS)["algebra"]:
            check.check()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges a solution."""
        text = action.split("<|im_end|>")[0]
        answer = extract(text[-int(self.options["tail"]) :], self.options["answer"])
        correct = answer is not None and self.is_right(answer)
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(self.options["right"] if correct else self.options["wrong"]),
            done=True,
            metadata={"parsed_answer": answer, "correct": correct},
        )

    def is_right(self, answer: str) -> bool:
        """Whether an answer is the ground truth."""
        seconds = float(self.options["timeout_s"]) if self.options["algebra"] else None
        return check.same(str(self.ground_truth), answer, seconds)
