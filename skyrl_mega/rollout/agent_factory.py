"""The shared parts for running trajectories in a process: chat template, environments, threads and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Sampling
from skyrl_mega.rollout.agent_loop import Limits
from skyrl_mega.rollout.env_pool import EnvPool
from skyrl_mega.rollout.renderer import Renderer
from skyrl_mega.rollout.retry import RetryingAgent
from skyrl_mega.rollout.router import Engines, Router


@dataclass(frozen=True)
class AgentFactory:
    """The shared parts of a run's driver, or of a rollout worker."""

    chat: Renderer
    """Tokenizer and chat template of the model."""
    rollout: RolloutConfig
    """Limits and timeouts."""
    environments: EnvironmentConfig
    """The environments of the run."""
    reward_weights: Mapping[str, float]
    """`algorithm.reward_weights`."""
    threads: EnvPool
    """Threads running environments."""

    def agent(self, engines: Engines, sampling: SamplingConfig, router: type[Router]) -> RetryingAgent:
        """Returns an agent on these engines, for use in a single event loop.

        Args:
            engines: The engines; only engines in service receive requests.
            sampling: Sampling parameters.
            router: Class of the router between agent and engines.
        """
        sampling_parameters = Sampling(
            sampling.temperature, sampling.top_p, sampling.top_k, tuple(sampling.stop), self.chat.stop_tokens
        )
        new_router = router(engines, sampling_parameters, self.rollout.concurrency, self.rollout.request_timeout_s)
        limits = replace(Limits.of(self.rollout), turn=sampling.max_tokens)
        agent = RetryingAgent(new_router, self.chat, self.environments, limits, self.threads)
        agent.reward_weights = self.reward_weights
        agent.retries = self.environments.retries
        return agent
