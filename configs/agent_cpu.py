"""An agent that adds with a calculator, written with OpenAI's SDK (docs/agents.md)."""

import json
import re

from openai import DefaultHttpxClient, OpenAI

from skyrl_mega.envs import AgentEndpoint, AgentEnv, BaseTextEnvStepOutput, Message, ToolError
from skyrl_mega.envs.calculator.env import CalculatorEnv, calculate

TOOLS = [tool.definition for tool in CalculatorEnv.tools]  # the tool that the warm-up shows to the small model
SDK = OpenAI(base_url="http://127.0.0.1", api_key="-", http_client=DefaultHttpxClient(trust_env=False))  # no proxy


class CalculatorAgent(AgentEnv):
    """Asks the policy until a reply calls no tool, at most `max_turns` times; reward 1 if the last number is right."""

    def run(self, endpoint: AgentEndpoint, prompt: list[Message]) -> BaseTextEnvStepOutput:
        client = SDK.with_options(base_url=f"{endpoint.url}/v1", api_key=endpoint.key)
        messages = list(prompt)
        for _ in range(self.max_turns):
            reply = client.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                result = use_calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
        numbers = re.findall(r"-?\d+", message.content or "")
        right = bool(numbers) and numbers[-1] == self.ground_truth
        return {"observations": [], "reward": float(right), "done": True, "metadata": {}}


def use_calculator(arguments: str) -> str:
    """Returns the value of a call's expression, or an error for the policy."""
    try:
        return calculate(json.loads(arguments)["expression"])
    except (ToolError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"Error: {error}"
