"""A single turn, registered under a name, with a module of its own package."""

import skyrl_gym
from skyrl_gym.envs import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from tests.envs.for_skyrl.scoring import compute_score


class WordProblemEnv(BaseTextEnv):
    def __init__(self, env_config=None, extras={}):  # noqa: B006
        super().__init__()
        self.ground_truth = extras["reward_spec"]["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = compute_score(action, self.ground_truth)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register(id="word_problem", entry_point=f"{__name__}:WordProblemEnv")
assert isinstance(
    skyrl_gym.make("word_problem", env_config={}, extras={"reward_spec": {"ground_truth": "1"}}), skyrl_gym.Env
)
