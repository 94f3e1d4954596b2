"""Environments of the tests, named by import path as a user's are."""

from __future__ import annotations

import time

from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message


class Talk(BaseTextEnv):
    """Answers every turn; never done."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer: Message = {"role": "user", "content": f"turn {self.turns}: {len(action)} letters"}
        return BaseTextEnvStepOutput(observations=[answer], reward=1.0, done=False, metadata={"turns": self.turns})


class Faulty(BaseTextEnv):
    """Fails as `extra_info.fault` says."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.fault = (self.extras.get("extra_info") or {}).get("fault")
        if self.fault == "init":
            raise RuntimeError("no database")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.fault == "raise":
            raise ZeroDivisionError("in step")
        if self.fault == "hang":
            time.sleep(4)
        if self.fault == "timeout":
            raise TimeoutError("its own")
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})

    def close(self) -> None:
        if self.fault == "close":
            raise OSError("already closed")
