"""The task of `benchmarks.long_tail`: several sums per conversation, with a slow tool after each."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from skyrl_mega.envs.addition.env import units_first
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.options import Option, number, whole
from skyrl_mega.envs.row import row
from skyrl_mega.simulation.workload import LogNormal

MOST_SUMS = 8
TOOL_S = 10.0
"""Longest duration of the tool in seconds."""


@dataclass(frozen=True)
class Tail:
    """The distribution of trajectory lengths.

    Args:
        sums: Sums of a trajectory, rounded, 1 to `MOST_SUMS`.
        seconds: Duration of the tool after each sum.
    """

    sums: LogNormal
    seconds: LogNormal

    def draw_sums(self, random: Random) -> int:
        """Returns the number of sums of a trajectory."""
        return max(1, min(MOST_SUMS, round(self.sums.sample(random))))


class Sums(BaseTextEnv):
    """An environment with a sum per turn, answered units first; the reward is the share of right answers.

    The tool's seconds are drawn anew for each trajectory: the same question takes different times.
    """

    requires_ground_truth = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "mean_s": number(0.0, "seconds of the tool, on average", low=0, high=TOOL_S),
        "sigma": number(1.0, "standard deviation of their logarithm", low=0, high=3),
        "seed": whole(0, "draws them", low=0),
    }
    opened: ClassVar[Counter[str]] = Counter()
    counting: ClassVar[threading.Lock] = threading.Lock()

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Gives the first sum."""
        question = prompt[0]["content"]
        with self.counting:
            self.opened[question] += 1
            self.random = Random(f"{self.options['seed']}/{question}/{self.opened[question]}")
        return super().init(prompt)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges a sum, waits for the tool's time, and gives the next sum."""
        info = self.extras["extra_info"]
        right = action.strip() == info["answers"][self.turns]
        self.turns += 1
        tool = LogNormal(float(self.options["mean_s"]), float(self.options["sigma"]))
        if info["split"] == "train":
            time.sleep(min(TOOL_S, tool.sample(self.random)))
        done = self.turns == len(info["answers"])
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": info["questions"][self.turns]}],
            reward=float(right) / len(info["answers"]),
            done=done,
            metadata={},
        )


def rows(split: str, count: int, tail: Tail, seed: int, wrong: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yields conversations; for the split `demonstrations` with a demonstration each, with a share `wrong` of wrong
    answers."""
    random = Random(f"{split}/{seed}")
    for _ in range(count):
        pairs = [(random.randint(10, 99), random.randint(10, 99)) for _ in range(tail.draw_sums(random))]
        questions = [f"{a}+{b}" for a, b in pairs]
        answers = [units_first(a + b) for a, b in pairs]
        info: dict[str, Any] = {"questions": questions, "answers": answers, "split": split}
        if split == "demonstrations":
            demonstrated = [
                units_first(random.randint(20, 198)) if random.random() < wrong else answer for answer in answers
            ]
            info["demonstration"] = _conversation(questions, demonstrated)
        yield row(
            data_source="sums",
            prompt=[{"role": "user", "content": questions[0]}],
            env_class="sums",
            ground_truth="",
            extra_info=info,
        )


def _conversation(questions: list[str], spoken: list[str]) -> list[Message]:
    turns: list[Message] = []
    for number_of, answer in enumerate(spoken):
        if number_of:
            turns.append({"role": "user", "content": questions[number_of]})
        turns.append({"role": "assistant", "content": answer})
    return turns
