"""Mathematics with a checkable answer (DAPO, AIME, MATH)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.math import check, minerva
from skyrl_mega.envs.math.answer import TAIL, extract
from skyrl_mega.envs.options import Option, choice, number, switch, whole
from skyrl_mega.envs.truths import spec_of, wrong_spelling, wrong_text
from skyrl_mega.envs.waiting import waiting


class MathEnv(BaseTextEnv):
    """Mathematics problem; one turn. Reward `right` for the right answer, `wrong` for a wrong answer or none.

    The answer is the last `\\boxed{…}` or `Answer:` line, whichever comes later, in the last characters of the text.
    The answer is right if equal to the ground truth as a number, or by algebra as an expression. `answer: dapo` uses
    the rules of DAPO's published grader instead: the last `Answer:` line, compared as text.
    """

    metrics: ClassVar[tuple[str, ...]] = ("correct",)
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "right": number(1.0, "reward of the right answer"),
        "wrong": number(0.0, "reward of another one, or of none"),
        "answer": choice("either", "boxed", "line", "dapo", doc="the form that is looked for; dapo: DAPO's grader"),
        "tail": whole(TAIL, "characters at the end that are looked at; 0 for all", low=0),
        "algebra": switch(True, "compares expressions beyond their text"),
        "timeout_s": number(5.0, "for one comparison", above=0, high=3600),
    }

    question: str = ""
    """The question: the last user message."""

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Checks that the package math-verify can be imported, if `options["algebra"]` is on.

        Raises:
            UserError: The package cannot be imported; the message gives the pip command.
        """
        if options["algebra"]:
            try:
                import math_verify  # noqa: F401
            except ImportError as error:
                raise UserError(
                    f"environment math: math-verify cannot be imported ({error}); pip install 'math-verify[antlr4_9_3]'"
                ) from error

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Keeps the question, since an expression copied from the question is no answer; returns the prompt
        unchanged, and {}."""
        self.question = next((m["content"] for m in reversed(prompt) if m["role"] == "user"), "")
        return super().init(prompt)

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns None if the truth is a single answer, as text or a number other than NaN; else the reason."""
        if str(truth).strip().lower().lstrip("+-") == "nan":
            return "it is no number; allowed is an answer that can be right"
        return wrong_text(truth)

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why a row's ground truth is malformed, or would not be read as the right answer if a
        solution gave it; None for a valid row, and for a row without a ground truth.
        """
        if reason := super().wrong_row(row, options):
            return reason
        column, spec = spec_of(row)
        truth = spec.get("ground_truth")
        wrong = None if truth is None else _not_found(truth, options)
        return f"column {column}.ground_truth = {shown(truth)}: {wrong}" if wrong else None

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges a solution and ends the trajectory: reward of the option `right` for the right answer, else of the
        option `wrong`. `metadata` has `parsed_answer` (None without an answer) and `correct`.

        Raises:
            InfrastructureFault: The algebra process was killed, or does not start.
        """
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
        """Returns True if an answer equals the ground truth, by the rules of the option `answer`.

        Raises:
            InfrastructureFault: The algebra process was killed, or does not start.
        """
        if self.options["answer"] == "dapo":
            return minerva.same(str(self.ground_truth), answer)
        seconds = float(self.options["timeout_s"]) if self.options["algebra"] else None
        return same(str(self.ground_truth), answer, seconds, self.question)


def same(gold: str, answer: str, seconds: float | None, question: str = "") -> bool:
    """Returns True if an answer equals the gold answer, as mathematics. An empty answer equals nothing. Waits for a
    process do not count as time of the environment.

    Args:
        gold: The right answer.
        answer: The answer to check.
        seconds: Time limit for algebra; after this time the answers count as different. None disables algebra.
        question: The question; an expression copied from the question is no answer.

    Raises:
        InfrastructureFault: The process of the check was killed, or does not start.
    """
    try:
        return check.same(gold, answer, seconds, question, waiting=waiting)
    except check.CheckerFailed as error:
        raise InfrastructureFault(str(error)) from error


def _not_found(truth: Any, options: Mapping[str, Any]) -> str | None:
    """Returns the reason why a ground truth is not found when given as the answer; None if found."""
    dapo, gold = options["answer"] == "dapo", str(truth)
    if dapo and (reason := wrong_spelling(truth)):
        return reason
    if _earns(gold, options["answer"], int(options["tail"])):
        return None
    return "it is not found where it is given as the answer; allowed is the answer alone, short and on one line"


@lru_cache(maxsize=2**16)
def _earns(gold: str, kind: str, tail: int) -> bool:
    """Returns True if a ground truth is found and right when given as the answer.

    Cached: DAPO's files repeat each row a hundred times, and every row is read more than once.
    """
    for solution in (f"\\boxed{{{gold}}}", f"Answer: {gold.strip()}"):
        answer = extract(solution[-tail:], kind)
        if answer is not None and (minerva.same(gold, answer) if kind == "dapo" else check.same(gold, answer, None)):
            return True
    return False
