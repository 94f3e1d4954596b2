"""A tiny gymnasium environment with text observations, registered under a private name."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces


class Guess(gymnasium.Env[str, int]):
    """A game of guessing a number from 1 to 9 in three tries."""

    observation_space = spaces.Text(100)
    action_space = spaces.Discrete(9, start=1)

    def __init__(self, best: float = 1.0) -> None:
        self.best = best

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.left = int(self.np_random.integers(1, 10)), 3
        return "Guess a number from 1 to 9.", {"tries": 3}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        correct = action == self.number
        hint = "It is larger." if action < self.number else "It is smaller."
        return hint, self.best if correct else -0.1, correct, self.left == 0, {"number": self.number, "rest": object()}


class Echo(gymnasium.Env[str, str]):
    """An environment with free text as actions."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(10, min_length=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "Say something.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action, float(len(action)), True, False, {}


gymnasium.register("tests/Guess-v0", entry_point=Guess)
gymnasium.register("tests/Echo-v0", entry_point=Echo)
