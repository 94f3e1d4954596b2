"""Agents for the tests, named by import path like a user's."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import httpx

from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv, AgentStopped
from skyrl_mega.envs.base import BaseTextEnvStepOutput, Message
from skyrl_mega.envs.faults import InfrastructureFault


def ask(endpoint: AgentEndpoint, messages: list[Message], **options: Any) -> str:
    """Returns the text of the policy's reply. Raises HTTPStatusError for a refused request."""
    response = httpx.post(
        f"{endpoint.url}/v1/chat/completions",
        json={"model": endpoint.model, "messages": messages, **options},
        headers={"Authorization": f"Bearer {endpoint.key}"},
        timeout=30,
        trust_env=False,
    )
    response.raise_for_status()
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


class Asking(AgentEnv):
    """An agent of two requests that then does what `extra_info.then` says."""

    endpoints: ClassVar[list[AgentEndpoint]] = []
    closed: ClassVar[list[str]] = []
    attempts: ClassVar[list[str]] = []
    release = threading.Event()
    lock, working, most = threading.Lock(), 0, 0

    @classmethod
    def longest_run_s(cls, options: Mapping[str, Any]) -> float | None:
        limit: float | None = options.get("limit_s")
        return limit

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Counts the agents at work."""
        with self.lock:
            Asking.working += 1
            Asking.most = max(Asking.most, Asking.working)
        try:
            return self.work(endpoint, prompt)
        except httpx.HTTPStatusError as error:
            if self.extras["extra_info"]["then"] == "too many, judged":
                raise ConnectionError("the judge is away") from error
            raise AgentStopped(repr(error)) from error
        finally:
            with self.lock:
                Asking.working -= 1

    def work(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Asks the policy."""
        then = self.extras["extra_info"]["then"]
        self.endpoints.append(endpoint)
        self.attempts.append(then)
        if then == "hangs":
            self.release.wait(30)
        first = [] if then in ("silent", "hangs") else [ask(endpoint, prompt)]
        if then == "raises":
            raise ZeroDivisionError("in run")
        if then == "unwell" and self.attempts.count("unwell") < 3:
            raise InfrastructureFault("the service is away")
        if then == "slow":
            time.sleep(1.0)
        if then.startswith("too many"):
            for _ in range(9):
                ask(endpoint, prompt)
        if first:
            more = [{"role": "assistant", "content": first[0]}, {"role": "user", "content": "more"}]
            ask(endpoint, [*prompt, *more], temperature=0.5)
        output: Any = {
            "observations": [prompt[0]] if then == "observations" else [],
            "reward": {"right": 1.0, "short": 0.5},
            "done": True,
            "metadata": {"metrics": {"steps": 2}, "answer": then},
        }
        return output

    def close(self) -> None:
        self.closed.append(self.extras["extra_info"]["then"])
