"""Environments for the tests, named by import path like a user's."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message

TALK: Message = {"role": "user", "content": "go on"}


class Talk(BaseTextEnv):
    """An environment answering every turn, without end."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer: Message = {"role": "user", "content": f"turn {self.turns}: {len(action)} letters"}
        return BaseTextEnvStepOutput(observations=[answer], reward=1.0, done=False, metadata={"turns": self.turns})


class Faulty(BaseTextEnv):
    """An environment failing as set in `extra_info.fault`."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.fault = (self.extras.get("extra_info") or {}).get("fault")
        if self.fault == "init":
            raise RuntimeError("no database")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.fault == "raise":
            raise ZeroDivisionError("in step")
        if self.fault == "hang":
            time.sleep(9)
        if self.fault == "timeout":
            raise TimeoutError("its own")
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})

    def close(self) -> None:
        if self.fault == "close":
            raise OSError("already closed")


class Shy:
    """An object with a failing repr."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class ShyError(Exception):
    """An error with a failing repr."""

    def __repr__(self) -> str:
        raise ValueError("no words")


def _raise(error: BaseException) -> Any:
    raise error


GARBAGE: dict[str, Any] = {
    "none": lambda: None,
    "list": lambda: [1],
    "no reward": lambda: {"observations": [], "done": True, "metadata": {}},
    "no observations": lambda: {"reward": 1.0, "done": True},
    "nan": lambda: good(reward=float("nan")),
    "infinite": lambda: good(reward=float("inf")),
    "text reward": lambda: good(reward="1"),
    "named reward": lambda: good(reward={"right": "yes"}),
    "no rewards": lambda: good(reward={}),
    "parts": lambda: good(rewards_at={1: 0.5}),
    "part": lambda: good(rewards_at=[(1, 0.5), (2, 1.0)]),
    "part of nothing": lambda: good(rewards_at=[(0, 0.5)]),
    "yes part": lambda: good(rewards_at=[(True, 0.5)]),
    "huge parts": lambda: good(reward=1e308, rewards_at=[(1, 1e308)]),
    "nan part": lambda: good(rewards_at=[(1, float("nan"))]),
    "text done": lambda: good(done="False"),
    "observations": lambda: good(observations="go on"),
    "message": lambda: good(observations=["go on"]),
    "no content": lambda: good(observations=[{"role": "user"}]),
    "number": lambda: good(observations=[{"role": "user", "content": 7}]),
    "role": lambda: good(observations=[{"role": "referee", "content": "x"}]),
    "surrogate": lambda: good(observations=[{"role": "user", "content": "\ud800"}]),
    "metadata": lambda: good(metadata=[1]),
    "keys": lambda: good(metadata={(1, 2): 3}),
    "calls": lambda: good(metadata={"tool_calls": "search"}),
    "key": lambda: good(postprocessed_action="what it should have said"),
    "shy": lambda: good(reward=Shy()),
    "rewritten": lambda: good(messages=[TALK], observations=[]),
    "both": lambda: good(messages=[TALK], observations=[TALK]),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "stop": lambda: _raise(StopIteration()),
    "cancelled": lambda: _raise(asyncio.CancelledError()),
    "shy error": lambda: _raise(ShyError()),
    "surrogate error": lambda: _raise(ValueError("\ud800")),
}
"""Faulty results of a step, by name."""


def good(**changes: Any) -> Any:
    """Returns a valid result of a step, with these changes."""
    return {"observations": [TALK], "reward": 1.0, "done": False, "metadata": {}, **changes}


class Garbage(BaseTextEnv):
    """An environment with a valid first turn and then the fault `extra_info.fault`; without a fault it ends after three
    turns."""

    def init(self, prompt: list[Message]) -> Any:
        if self.extras["extra_info"]["fault"] == "init":
            return prompt
        return (prompt, {}) if self.extras["extra_info"]["fault"] != "init empty" else ([], {})

    def step(self, action: str) -> Any:
        self.turns += 1
        fault = self.extras["extra_info"]["fault"]
        if self.turns == 2 and fault in GARBAGE:
            return GARBAGE[fault]()
        return good(done=self.turns == 3)


class Quiet(BaseTextEnv):
    """An environment without observations, except for a word after the second turn."""

    def step(self, action: str) -> Any:
        self.turns += 1
        return good(observations=[{"role": "user", "content": "word" if self.turns == 2 else ""}])


class Stuck(BaseTextEnv):
    """An environment hanging until `release`; `closed` records the closed environments."""

    release = threading.Event()
    closed: ClassVar[list[str]] = []

    def step(self, action: str) -> Any:
        if self.extras["extra_info"]["fault"] == "hang":
            self.release.wait(60)
        return good(done=True)

    def close(self) -> None:
        self.closed.append(self.extras["extra_info"]["fault"])


class Counted(BaseTextEnv):
    """An environment with a slow opening; records environments made and closed; fails in `init` as set in
    `extra_info`."""

    made: ClassVar[list[int]] = []
    closed: ClassVar[list[int]] = []

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.made.append(id(self))

    def init(self, prompt: list[Message]) -> Any:
        time.sleep(self.extras["extra_info"].get("opening_s", 0.0))
        if self.extras["extra_info"].get("fails"):
            raise RuntimeError("no database")
        return super().init(prompt)

    def step(self, action: str) -> Any:
        time.sleep(self.extras["extra_info"].get("step_s", 0.0))
        assert id(self) not in self.closed, "closed while a step ran"
        return good(done=True)

    def close(self) -> None:
        self.closed.append(id(self))


class Rewriting(BaseTextEnv):
    """An environment replacing the conversation in every turn except each third; done after six turns."""

    rewrites_history: ClassVar[bool] = True

    def step(self, action: str) -> Any:
        self.turns += 1
        if self.turns % 3 == 0:
            return good(done=self.turns == 6, reward=0.25)
        conversation = [{"role": "user", "content": f"so far: {action}"}, {"role": "assistant", "content": "yes"}, TALK]
        return good(observations=[], messages=conversation, reward=0.5)


class Slow(BaseTextEnv):
    """An environment with steps of `extra_info.seconds`; never ends."""

    def step(self, action: str) -> Any:
        time.sleep(float(self.extras["extra_info"]["seconds"]))
        return good(reward=0.5)


class Calling(BaseTextEnv):
    """An environment naming a tool call in the metadata; done after two turns."""

    def step(self, action: str) -> Any:
        self.turns += 1
        call = {"name": "look", "arguments": {"at": action, "turn": (1, self.turns)}}
        return good(metadata={"tool_calls": [call]}, done=self.turns == 2, reward=self.turns)


class Named(BaseTextEnv):
    """An environment of two turns with two named rewards each; the second turn adds the reward `late`."""

    def step(self, action: str) -> Any:
        self.turns += 1
        late = {"late": 4.0} if self.turns == 2 else {}
        return good(reward={"right": 1.0, "short": -0.25, **late}, done=self.turns == 2)


class Parts(BaseTextEnv):
    """An environment of two turns with rewards for the first and third character of the first answer, and for the first
    character of the second."""

    def step(self, action: str) -> Any:
        self.turns += 1
        parts = [(1, 0.5), (3, 0.25)] if self.turns == 1 else [(1, -1.0)]
        return good(reward=1.0, rewards_at=parts, done=self.turns == 2)


class Noted(BaseTextEnv):
    """An environment with steps of `seconds`; records its processes at opening and closing in the folder
    `extra_info.folder`."""

    def init(self, prompt: list[Message]) -> Any:
        self.note("open")
        return super().init(prompt)

    def step(self, action: str) -> Any:
        time.sleep(float(self.extras["extra_info"].get("seconds", 0.0)))
        return good(done=True)

    def close(self) -> None:
        self.note("close")

    def note(self, what: str) -> None:
        """Makes a file for the event; the name holds the event and the process."""
        folder = Path(self.extras["extra_info"]["folder"])
        (folder / f"{what}-{os.getpid()}-{id(self)}-{time.monotonic_ns()}").touch()
