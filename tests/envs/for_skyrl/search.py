"""A search tool in a tool group, with settings by attribute."""

import re
from typing import Any

from omegaconf import DictConfig
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool

PASSAGES = ["The capital of France is Paris.", "Rome is in Italy.", "Paris lies on the Seine."]


class PassageToolGroup(ToolGroup):
    def __init__(self, topk: int):
        self.topk = topk
        super().__init__(name="PassageToolGroup")

    @tool
    def search(self, query: str) -> str:
        if query is None:
            raise ValueError("no query")
        return " ".join([p for p in PASSAGES if query.lower() in p.lower()][: self.topk])


class SearchEnv(BaseTextEnv):
    def __init__(self, env_config: DictConfig, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 2)
        self.init_tool_groups([PassageToolGroup(topk=env_config.topk)])
        assert self.tool_to_toolgroup == {"search": "PassageToolGroup"}
        self.chat_history = []

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> str:
        return "<information>" + super()._execute_tool(tool_group_name, tool_name, tool_input) + "</information>"

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        answer = re.search(r"<answer>(.*?)</answer>", action)
        if answer or self.turns >= self.max_turns:
            reward = float(bool(answer) and answer.group(1) == self.ground_truth["target"])
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        query = re.search(r"<search>(.*?)</search>", action)
        try:
            text = self._execute_tool("PassageToolGroup", "search", [query.group(1) if query else None])
        except ValueError as error:
            text = str(error)
        info = {"tool_group": "PassageToolGroup", "tool_name": "search", "tool_input": query and query.group(1)}
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": text}], reward=0, done=False, metadata=info
        )
