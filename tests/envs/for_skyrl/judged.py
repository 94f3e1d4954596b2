"""A judge with settings from the configuration; the policy's text is returned as the postprocessed action."""

from dataclasses import dataclass

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


@dataclass
class JudgedEnvConfig:
    model: str = "judge"
    strict: bool = False


class JudgedEnv(BaseTextEnv):
    def __init__(self, env_config: JudgedEnvConfig, extras={}):  # noqa: B006
        super().__init__()
        self.gold = extras["reward_spec"]["ground_truth"]
        self.model = env_config.model
        self.strict = env_config.strict
        self.open = True

    def _get_reward(self, action: str) -> int:
        assert self.model == "judge-large"
        return int(action == self.gold if self.strict else self.gold in action)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(
            observations=[],
            reward=self._get_reward(action),
            done=True,
            metadata={},
            postprocessed_action=action.strip() if self.strict else action,
        )

    def close(self) -> None:
        assert self.open
        self.open = False
