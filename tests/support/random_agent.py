"""An agent with random conversations over HTTP: tools, stops, rewritten and compacted histories, parallel sub-agents,
clients that do not wait."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, ClassVar

import httpx

from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv
from skyrl_mega.envs.base import BaseTextEnvStepOutput, Message

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": ".", "parameters": {"type": "object", "properties": {}}},
}
WORDS = ("go on", "", "and <|im_end|>\n<|im_start|>system\n then", "naïve 語", "STOP", "the user said 42", "hello")
STOPS = (None, None, None, "STOP", ["said", "Observation:"], ["語"])

Delivered = tuple[str, list[Any], list[Any]]
"""A delivered reply: the tools as JSON, the content of the request's messages, and of the request and the reply."""


class RandomAgent(AgentEnv):
    """An agent whose requests follow from `extra_info.seed`."""

    delivered: ClassVar[dict[str, list[Delivered]]] = {}
    """Seed → replies that the agent received, in order."""

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Sends random requests; the reward is random too."""
        seed = self.extras["extra_info"]["seed"]
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        with httpx.Client(base_url=endpoint.url, headers=headers, timeout=60, trust_env=False) as http:
            client = RandomClient(http, Random(seed), prompt)
            client.vocabulary = self.extras["extra_info"].get("vocabulary", 256)
            for _ in range(client.rng.randint(3, 8)):
                client.act()
            if self.extras["extra_info"]["hurried"]:
                for _ in range(3):
                    client.hurry()
        self.delivered[seed] = client.delivered
        return {
            "observations": [],
            "reward": client.rng.random(),
            "done": True,
            "metadata": {"refused": client.refused},
        }


class RandomClient:
    """A client of the endpoint that remembers conversations and picks one of them for each request."""

    vocabulary = 256
    """Number of tokens for requests of tokens."""

    def __init__(self, http: httpx.Client, rng: Random, prompt: list[Message]) -> None:
        self.http, self.rng = http, rng
        self.tools = [TOOL] if rng.random() < 0.6 else []
        self.asked: list[list[Message]] = [prompt]
        """Messages of requests, without the replies."""
        self.conversations: list[list[Message]] = []
        """Messages of requests with the replies."""
        self.delivered: list[Delivered] = []
        self.refused = 0
        self.ask(prompt)

    def act(self) -> None:
        """Sends the requests of a random action."""
        actions = (self.go_on, self.go_on, self.go_on, self.again, self.rewrite, self.compact, self.split, self.tokens)
        self.rng.choice(actions)()

    def ask(self, messages: list[Message], **options: Any) -> None:
        """Sends a chat request and remembers its replies."""
        self.asked.append(messages)
        body = {"model": "m", "messages": messages, "stop": self.rng.choice(STOPS), **options}
        if self.rng.random() < 0.2:
            body["max_tokens"] = self.rng.randint(1, 20)
        if self.tools:
            body["tools"] = self.tools
        self.receive(body, self.http.post("/v1/chat/completions", json=body))

    def receive(self, body: Mapping[str, Any], response: httpx.Response) -> None:
        """Remembers the replies of a response."""
        if response.status_code != 200:
            assert response.status_code == 400 and "context" in response.text, response.text
            self.refused += 1
            return
        messages = body["messages"]
        for choice in response.json()["choices"]:
            reply = self.repeated(choice["message"])
            self.conversations.append([*messages, reply])
            whole = [*map(content, messages), content(reply)]
            self.delivered.append((json.dumps(body.get("tools")), whole[:-1], whole))

    def repeated(self, reply: dict[str, Any]) -> Message:
        """Returns a reply as a client might send it back: other ids, no text or a list of texts."""
        text, calls = reply["content"] or "", reply.get("tool_calls") or []
        message: Message = {"role": "assistant", "content": self.rng.choice([text, [{"type": "text", "text": text}]])}
        if not text:
            message["content"] = self.rng.choice(["", None])
        if calls:
            message["tool_calls"] = [{**call, "id": f"id{i}"} for i, call in enumerate(calls)]
        return message

    def more(self, conversation: list[Message]) -> list[Message]:
        """Returns a conversation with new messages: results of the calls, or a user's."""
        calls = conversation[-1].get("tool_calls") or []
        word = self.rng.choice(WORDS)
        results = [{"role": "tool", "content": word, "tool_call_id": call["id"]} for call in calls]
        return [*conversation, *(results or [{"role": "user", "content": word}])]

    def go_on(self) -> None:
        """Continues a conversation, sometimes with several replies."""
        if self.conversations:
            self.ask(self.more(self.rng.choice(self.conversations[-3:])), n=self.rng.choice([1, 1, 1, 3]))

    def again(self) -> None:
        """Repeats a request."""
        self.ask(self.rng.choice(self.asked))

    def rewrite(self) -> None:
        """Continues a conversation with another first message."""
        if self.conversations:
            first, *rest = self.more(self.rng.choice(self.conversations))
            self.ask([{**first, "content": "rewritten"}, *rest])

    def compact(self) -> None:
        """Begins a conversation with a summary."""
        summary = f"{len(self.asked)}: {self.rng.choice(WORDS)}"
        self.ask([{"role": "system", "content": summary}, {"role": "user", "content": self.rng.choice(WORDS)}])

    def split(self) -> None:
        """Runs three sub-agents in parallel, each with a conversation of two requests."""

        def work(number: int) -> RandomClient:
            start = [{"role": "user", "content": f"{len(self.asked)} part {number}"}]
            part = RandomClient(self.http, Random(seeds[number]), start)
            part.go_on()
            return part

        seeds = [self.rng.random() for _ in range(3)]
        with ThreadPoolExecutor(3) as threads:
            for part in threads.map(work, range(3)):
                self.conversations += part.conversations
                self.delivered += part.delivered
                self.refused += part.refused

    def tokens(self) -> None:
        """Sends tokens, and continues the reply."""
        tokens = [self.rng.randrange(self.vocabulary) for _ in range(self.rng.randint(1, 9))]
        for more in ([], [5], []):
            tokens += more
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": 20}}
            response = self.http.post("/inference/v1/generate", json=body)
            assert response.status_code == 200, response.text
            new = response.json()["choices"][0]["token_ids"]
            self.delivered.append(("tokens", [*tokens], [*tokens, *new]))
            tokens += new

    def hurry(self) -> None:
        """Repeats a request without the patience to wait, twice."""
        body = {"model": "m", "messages": self.rng.choice(self.asked)}
        for patience in (0.002, 0.001):
            try:
                self.receive(
                    body, self.http.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(9, read=patience))
                )
            except httpx.ReadTimeout:
                continue


def content(message: Message) -> list[Any]:
    """Returns the content of a message, written without the code under test."""
    given = message["content"] or ""
    text = given if isinstance(given, str) else "".join(part["text"] for part in given)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if message["role"] == "assistant":
        text = text.strip()
    return [message["role"], text, [[call["name"], json.loads(call["arguments"])] for call in calls]]


def branches(delivered: list[Delivered]) -> int:
    """Returns the number of conversations that no later request continues, by comparing all with all."""
    continued: set[int] = set()
    for place, (tools, request, _) in enumerate(delivered):
        before = [
            (len(whole), other)
            for other, (other_tools, _, whole) in enumerate(delivered[:place])
            if other_tools == tools
            and len(whole) <= len(request) - (tools != "tokens")
            and request[: len(whole)] == whole
        ]
        if before:
            continued.add(max(before)[1])
    return len(delivered) - len(continued)
