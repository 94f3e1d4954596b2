"""An agent for runs: every trajectory uses another API, with the unmodified SDKs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai

from skyrl_mega.envs.agent import AgentEndpoint, AgentEnv
from skyrl_mega.envs.base import BaseTextEnvStepOutput, Message
from skyrl_mega.envs.calculator.env import CalculatorEnv

FUNCTION: Any = CalculatorEnv.tools[0].definition["function"]
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Any = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: Any = [
    {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
]
OPENAI, ANTHROPIC = openai.OpenAI(api_key="-"), anthropic.Anthropic(api_key="-")
RESULT = "42"


def chat(endpoint: AgentEndpoint, messages: list[Any], stream: bool) -> str:
    """Asks twice by chat completions; the second request repeats the reply."""
    client = OPENAI.with_options(base_url=f"{endpoint.url}/v1", api_key=endpoint.key)
    text = ""
    for _ in range(2):
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
                for _ in events:
                    pass
                message: Any = events.current_completion_snapshot.choices[0].message
        else:
            message = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
        text += message.content or ""
        calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or ()]
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
        repeated = {"role": "assistant", "content": message.content} | ({"tool_calls": calls} if calls else {})
        messages = [*messages, repeated, *(answers or [{"role": "user", "content": "again"}])]
    return text


def responses(endpoint: AgentEndpoint, messages: list[Any], stream: bool) -> str:
    """Asks twice by responses: streamed, the second request names the first, else it repeats the items."""
    client = OPENAI.with_options(base_url=f"{endpoint.url}/v1", api_key=endpoint.key)
    text, further = "", {}
    items: list[Any] = messages
    for _ in range(2):
        if stream:
            with client.responses.stream(model="m", input=items, tools=FLAT_TOOLS, **further) as events:
                response: Any = list(events)[-1].response
        else:
            response = client.responses.create(model="m", input=items, tools=FLAT_TOOLS, **further)
        text += response.output_text
        calls = [item.call_id for item in response.output if item.type == "function_call"]
        answers = [{"type": "function_call_output", "call_id": call, "output": RESULT} for call in calls]
        new = answers or [{"role": "user", "content": "again"}]
        items, further = (
            (new, {"previous_response_id": response.id}) if stream else ([*items, *response.output, *new], {})
        )
    return text


def messages_api(endpoint: AgentEndpoint, messages: list[Any], stream: bool) -> str:
    """Asks twice by Anthropic's messages."""
    client = ANTHROPIC.with_options(base_url=endpoint.url, api_key=endpoint.key)
    system: Any = [message["content"] for message in messages if message["role"] == "system"]
    messages = [message for message in messages if message["role"] != "system"]
    asked: Any = {"model": "m", "max_tokens": 4096, "tools": ANTHROPIC_TOOLS} | (
        {"system": system[0]} if system else {}
    )
    text = ""
    for _ in range(2):
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, **asked)
        text += "".join(block.text for block in message.content if block.type == "text")
        calls = [block.id for block in message.content if block.type == "tool_use"]
        answers = [{"type": "tool_result", "tool_use_id": call, "content": RESULT} for call in calls]
        messages = [*messages, message.to_param(), {"role": "user", "content": answers or "again"}]
    return text


def tokens(endpoint: AgentEndpoint, messages: list[Any], stream: bool) -> str:
    """Continues tokens twice by vLLM's route."""
    context, text = [5, 6, 7], ""
    for _ in range(2):
        body = {"token_ids": context, "sampling_params": {"max_tokens": 8}, "stream": stream, "output_mode": "text"}
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        answer = httpx.post(f"{endpoint.url}/inference/v1/generate", json=body, headers=headers, timeout=300)
        answer.raise_for_status()
        lines = answer.text.split("\n")
        choice = json.loads(lines[0].removeprefix("data: "))["choices"][0]
        text += choice["text"]
        context = [*context, *choice["token_ids"], 8]
    return text


APIS: dict[str, Callable[[AgentEndpoint, list[Any], bool], str]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages_api,
    "tokens": tokens,
}
WAYS = list(itertools.product(APIS, (False, True)))
"""All APIs, not streamed and streamed."""
NUMBERS = itertools.count()


class EveryApi(AgentEnv):
    """An agent of two requests in one conversation. Short words are rewarded, so samples differ."""

    requires_ground_truth = False

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        """Uses the next API."""
        name, stream = WAYS[next(NUMBERS) % len(WAYS)]
        text = APIS[name](endpoint, list(prompt), stream)
        reward = 1.0 / (1 + len(text))
        return {"observations": [], "reward": reward, "done": True, "metadata": {"way": f"{name} {stream}"}}
