"""What trajectories are played with in one process: a template, environments, threads for them, budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Sampling
from skyrl_mega.rollout.again import PersistentAgent
from skyrl_mega.rollout.agent_loop import Limits
from skyrl_mega.rollout.env_pool import EnvPool
from skyrl_mega.rollout.renderer import Renderer
from skyrl_mega.rollout.router import Engines, Router


@dataclass(frozen=True)
class Equipment:
    """Of a run's driver, or of a process that plays trajectories for it."""

    chat: Renderer
    """The model's tokenizer and template."""
    rollout: RolloutConfig
    """Budgets and timeouts."""
    environments: EnvironmentConfig
    """Which environments there are."""
    reward_weights: Mapping[str, float]
    """`algorithm.reward_weights`."""
    threads: EnvPool
    """Runs environments."""

    def agent(self, engines: Engines, sampling: SamplingConfig, router: type[Router]) -> PersistentAgent:
        """An agent on engines, which lives in one event loop.

        Args:
            engines: Those that serve are asked.
            sampling: How tokens are drawn.
            router: Sends requests to the engines.
        """
        drawn = Sampling(
            sampling.temperature, sampling.top_p, sampling.top_k, tuple(sampling.stop), self.chat.stop_tokens
        )
        made = router(engines, drawn, self.rollout.concurrency, self.rollout.request_timeout_s)
        limits = replace(Limits.of(self.rollout), turn=sampling.max_tokens)
        agent = PersistentAgent(made, self.chat, self.environments, limits, self.threads)
        agent.reward_weights = self.reward_weights
        agent.retries = self.environments.retries
        return agent
