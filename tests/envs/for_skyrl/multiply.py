"""Products over several turns: half a point for a boxed answer on the last turn."""

import re
from typing import Any, Dict  # noqa: UP035

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class MultiplyEnv(BaseTextEnv):
    def __init__(self, env_config: Dict[str, Any] = {}, extras: Dict[str, Any] = {}):  # noqa: B006, UP006
        super().__init__()
        assert "reward_spec" in extras, "reward_spec field is required"
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 5)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        boxed = re.search(r"\\boxed\{([^}]+)\}", action)
        answer = boxed.group(1).strip() if boxed else None
        right = answer == str(self.ground_truth)
        if right or self.turns >= self.max_turns:
            reward = 1.0 if right else 0.5 if boxed else 0.0
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"parsed_answer": answer})
        text = f"Your answer '{answer}' is incorrect." if boxed else "Please answer in \\boxed{}."
        return BaseTextEnvStepOutput(
            observations=[{"role": "user", "content": text}],
            reward=0.0,
            done=False,
            metadata={"parsed_answer": answer},
        )
