"""Retries with rewards of each turn, and figures of the trajectory."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

from tests.envs.for_skyrl.scoring import compute_score


class RetryEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = int(extras.get("max_turns", 5))
        self.correct = False

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        return [{"role": "system", "content": "End with '#### ANSWER'."}, *prompt], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        reward = compute_score(action, self.ground_truth, format_score=0.2 / self.max_turns)
        self.correct = reward == 1.0
        done = self.correct or self.turns >= self.max_turns
        more = [] if done else [{"role": "user", "content": "Give a number."}]
        return BaseTextEnvStepOutput(observations=more, reward=reward, done=done, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns, "acc": self.correct, "kind": "text"}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return {"avg_steps": sum(m["steps"] for m in metrics) / len(metrics)}
