"""The shared parts for running trajectories in a process: chat template, environments, threads and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Sampling
from skyrl_mega.engines.prefix_affinity import PrefixAffinity
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.routing.lockstep import FixedEngines, in_lockstep
from skyrl_mega.rollout.routing.router import Engines, Router, at_once


@dataclass(frozen=True)
class AgentFactory:
    """A factory of agents, with the parts shared by all agents of a driver or of a rollout worker."""

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

    def agent(
        self,
        engines: Engines,
        sampling: SamplingConfig,
        *,
        lockstep: bool = False,
        service: bool = False,
        mark: str = "",
    ) -> Agent:
        """Returns a new agent with a router of its own on these engines, for use in a single event loop.

        Args:
            engines: The engines; only engines in service receive requests.
            sampling: Sampling parameters.
            service: True for a service, which lasts as long as the run; False for a phase, which ends with its
                trajectories. See `Router`.
            lockstep: True to send the requests of a turn only once all trajectories have one
                (`rollout.routing.lockstep`).
            mark: Suffix of the requests' names at the engines; see `Router`.
        """
        sampling_parameters = Sampling(
            sampling.temperature, sampling.top_p, sampling.top_k, tuple(sampling.stop), self.chat.stop_tokens
        )
        router = Router(
            engines,
            sampling_parameters,
            None if lockstep else self.rollout.concurrency,
            self.rollout.request_timeout_s,
            pick_engine=FixedEngines().choose if lockstep else PrefixAffinity().choose,
            when_to_dispatch=in_lockstep if lockstep else at_once,
            service=service,
            mark=mark,
        )
        return Agent(
            router,
            self.chat,
            self.environments,
            replace(TrajectoryLimits.of(self.rollout), turn=sampling.max_tokens),
            self.threads,
            reward_weights=self.reward_weights,
            retries=self.environments.retries,
        )
