"""Question answering with a Python interpreter: the policy runs programs, reads the output, then answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_mega.envs.math.check import same
from skyrl_mega.envs.options import Option, group, whole
from skyrl_mega.envs.sandbox import CommandLimits, Sandbox, SandboxResult
from skyrl_mega.envs.sandbox.run import python, settings
from skyrl_mega.envs.tags import first_tag
from skyrl_mega.envs.truths import wrong_text

BOX = "environment.options.python.sandbox"
"""Setting of the sandbox."""
LIMITS = CommandLimits(wall_s=10, cpu_s=10)
REASONS = {
    "timeout": "It ran out of time.",
    "output": "It printed too much and was ended.",
    "disk": "It wrote too much and was ended.",
    "memory": "It was ended, as all programs at once had too much memory.",
}


class PythonToolEnv(BaseTextEnv):
    """Question answering with programs. `<python>…</python>` runs in a fresh process each time; the output comes back
    in `<output>…</output>`. `<answer>…</answer>` ends the trajectory: reward 1 if the answer equals the ground truth as
    a number or text, else 0.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "shown_characters": whole(2000, "of what a program printed, its end", low=1),
        "sandbox": group(settings(LIMITS), "limits of one program"),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.box = Sandbox.from_options(self.options["sandbox"], BOX, LIMITS)

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Raises UserError if this machine cannot confine a program as set in the options of the sandbox, and
        InfrastructureFault if the sandbox does not start."""
        Sandbox.from_options(options["sandbox"], BOX).check(BOX)

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns the reason why a ground truth cannot stand between the tags of an answer; None if it can."""
        closes = "</answer>" in str(truth)
        return wrong_text(truth) or ("it closes the answer's own tag; allowed is the answer alone" if closes else None)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Runs the program in `<python>` and returns its output, or judges the text in `<answer>`; the first of the two
        tags counts. A turn with neither gets an explanation.

        The reward of the right answer is 1. Any other end, also by `max_turns`, gets 0. The last turn runs no program.
        `metadata` has at the end `parsed_answer` (None without an answer), and after a program `status`, `seconds` and
        `tool_calls`.

        Raises:
            InfrastructureFault: The sandbox cannot start the program.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        self.turns += 1
        tag = first_tag(action, "python", "answer")
        if tag and tag.name == "answer":
            answer = tag.text.strip()
            correct = same(str(self.ground_truth), answer, None)
            return BaseTextEnvStepOutput(
                observations=[], reward=float(correct), done=True, metadata={"parsed_answer": answer}
            )
        if self.turns >= self.max_turns:
            return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={"parsed_answer": None})
        if tag is None:
            return _reply("Give a program inside <python>…</python>, or the answer inside <answer>…</answer>.", {})
        outcome = self.box.run(python(), files={"main.py": _plain(tag.text)})
        text = report(outcome, int(self.options["shown_characters"]))
        calls = [{"name": "python", "arguments": {"program": _plain(tag.text)}}]
        return _reply(text, {"status": outcome.status, "seconds": outcome.seconds, "tool_calls": calls})


def _reply(text: str, metadata: dict[str, Any]) -> BaseTextEnvStepOutput:
    message = {"role": "user", "content": f"<output>\n{text}\n</output>"}
    return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)


def _plain(code: str) -> str:
    """Returns the program without a surrounding code fence."""
    fenced = re.fullmatch(r"\s*```(?:python)?\n(.*?)```\s*", code, re.DOTALL)
    return fenced.group(1) if fenced else code


def report(outcome: SandboxResult, max_characters: int) -> str:
    """Returns the policy's view of a program's result: stdout, stderr, and the reason of an early end.

    Without any of the three parts the text is `(it printed nothing)`. Of a text with more than `max_characters`
    characters, all parts together, only the last `max_characters` remain, after an additional `…`.
    """
    lines = [outcome.stdout.rstrip(), outcome.stderr.rstrip()]
    if outcome.status in REASONS:
        lines.append(REASONS[outcome.status])
    elif outcome.exit is not None and outcome.exit < 0:
        lines.append(f"It was ended by signal {-outcome.exit}.")
    text = "\n".join(line for line in lines if line) or "(it printed nothing)"
    return text if len(text) <= max_characters else "…" + text[-max_characters:]
