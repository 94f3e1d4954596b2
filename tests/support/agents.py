"""A policy without a model for agents: replies with random text in random tokens, and a record of all requests."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np

from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from tests.support.tokenizers import byte_level, directory

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Call with <tool_call>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template with tools in Qwen's form."""
PIECES = (
    *("hello world", " 123", "def f(x):\n\treturn x", "the user said 42", "STOP", "\n\nObservation: ", "naïve 語", ""),
    *('<tool_call>\n{"name": "look", "arguments": {"at": 3, "b": [1]}}\n</tool_call>', '<tool_call>\n{"name": '),
    *('<tool_call>\n{"arguments": {}, "name": "go"}\n</tool_call>', "<|im_start|>user\n", "</think>", " "),
)
"""Parts of replies."""
LIMITS = TrajectoryLimits(turn=60, response=4000, length=5000, turns=100, env_timeout_s=60.0, trajectory_timeout_s=60.0)
ROUTE = (2, 3)
"""MoE layers and experts per token of the routes."""


def pieces_chat(path: Path) -> Renderer:
    """Returns a renderer with pieces of several letters, so that a text has many tokenisations."""
    folder = directory(path, byte_level(), TEMPLATE, eos_token="<|im_end|>", model={"eos_token_id": None})
    return Renderer(str(folder))


def routes_of(tokens: Sequence[int]) -> np.ndarray:
    """Returns the routes of a sequence of tokens: they depend on the token and on the position."""
    position = np.arange(len(tokens))[:, None, None]
    return ((np.asarray(tokens)[:, None, None] * 31 + position + np.arange(6).reshape(ROUTE)) % 251 + 1).astype(
        np.uint8
    )


@dataclass
class FakeEngine:
    """A router with a random policy. `asked` records requests and answers in the order of the answers."""

    chat: Renderer
    delay_s: float = 0.0
    """Longest time until an answer."""
    routes: bool = False
    text: Callable[[Request, Random], str] | None = None
    """Text of a reply; None mixes `PIECES`."""
    gate: asyncio.Event | None = None
    """Answers wait for this event."""
    asked: list[tuple[Request, Completion]] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)

    async def generate(self, request: Request) -> Completion:
        """Returns a random reply that depends on the request's seed alone."""
        assert request.id not in self.under_way, "the router refuses two requests of the same name"
        self.started.append(request)
        self.under_way.add(request.id)
        rng = Random(request.seed)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(rng.random() * self.delay_s)
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 5))) if self.text is None else self.text(request, rng)
        tokens = [*self.tokens(text, rng), self.chat.end]
        finish = "stop" if len(tokens) <= request.max_tokens else "length"
        tokens = tokens[: request.max_tokens]
        logprobs = [-rng.random() for _ in tokens]
        versions = ((1, 0), (2, len(tokens) // 2)) if len(tokens) > 3 and rng.random() < 0.3 else ((1, 0),)
        read = [*request.tokens, *tokens][:-1]
        routes = routes_of(read)[request.routes_from :] if self.routes else None
        completion = Completion(f"{request.id}@0f", tokens, array("f", logprobs), finish, versions, routes)
        self.under_way.remove(request.id)
        self.asked.append((request, completion))
        return completion

    def tokens(self, text: str, rng: Random) -> list[int]:
        """Returns one of a text's many tokenisations."""
        cuts = sorted({0, len(text), *(rng.randint(0, len(text)) for _ in range(len(text) // 3))})
        return [token for a, b in pairwise(cuts) for token in self.chat.encode(text[a:b])]

    def expect(self, trajectories: int) -> None:
        """Does nothing: no trajectory waits for others."""

    def leave(self) -> None:
        """Does nothing, like `expect`."""

    def close(self) -> None:
        """Does nothing: no request is in flight at the end."""
