"""Settings of environments and of the retrieval service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional
from urllib.parse import urlsplit

from skyrl_mega.common.limits import ENVIRONMENT_WORKERS
from skyrl_mega.config.schema.fields import MOST, Refusals, at_least, between

REWARD_FUNCTION = "reward_function"
"""Name of the environment of `environment.reward_function`."""


@dataclass
class RetrieverConfig:
    """Retrieval service of environment `search`: an existing service (`url`) or a service started by the run
    (`index`)."""

    url: Optional[str] = None
    """Address of an existing service; null starts a service on loopback for the duration of this run."""
    index: Optional[str] = None
    """Index folder of the service started by the run."""
    build: Optional[str] = None
    """Arguments of `python -m skyrl_mega.retriever build` to create `index` if missing or built with other
    arguments."""
    serve: str = ""
    """Additional arguments of `python -m skyrl_mega.retriever serve` for the service started by the run."""
    topk: int = at_least(1, 3)
    """Number of passages per search."""
    passage_chars: int = at_least(1, 4000)
    """Maximum number of characters shown per passage; the rest is cut off."""
    timeout_s: float = at_least(0.1, 30.0)
    """Time limit per search in seconds, including retries; then the policy reads that the search failed."""
    token_variable: str = "SKYRL_MEGA_RETRIEVER_TOKEN"
    """Environment variable with the service's token, if the service requires a token."""

    def refusals(self) -> Refusals:
        """Yields a refusal if `url` has no scheme http or https, no host, or an invalid port."""
        if self.url is None:
            return
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number
            valid = False
        if not valid:
            yield "environment.retriever.url", "allowed is http://host:port or https://…"


@dataclass
class EnvironmentTimesConfig:
    """Mean seconds of a trajectory's environment, assumed by `--dry-run` and `--simulate`; a run ignores them."""

    start_s: float = at_least(0, 0.0)
    """Mean seconds before the first turn, such as the start of a container."""
    turn_s: float = at_least(0, 0.0)
    """Mean seconds after each turn, such as a command. `--environment` replaces the value."""
    end_s: float = at_least(0, 0.0)
    """Mean seconds after the last turn, in addition to `turn_s`, such as tests."""

    @property
    def given(self) -> bool:
        """True if any time is above 0."""
        return max(self.start_s, self.turn_s, self.end_s) > 0


@dataclass
class EnvironmentConfig:
    """Environments and rollout workers."""

    default: Optional[str] = None
    """Environment of rows with an empty `env_class`."""
    reward_function: Optional[str] = None
    """Import path (`package.module:function` or `path/to/file.py:function`) of a reward function in verl's or TRL's
    form. Judges the rows with an empty `env_class`, in a single turn. `options.reward_function` are further keyword
    arguments of the function."""
    classes: dict[str, str] = field(default_factory=dict)
    """Name → import path (`package.module:Class` or `path/to/file.py:Class`) of your own environments, or of reward
    functions."""
    options: dict[str, Any] = field(default_factory=dict)
    """Environment name → options for the constructor."""
    workers: int = between(1, MOST, ENVIRONMENT_WORKERS)
    """Maximum number of concurrent environment calls, each in a thread; further calls wait, and waiting does not count
    towards the time limit. Also the maximum number of agents at work (docs/agents.md), in threads of their own. With
    `processes`, the threads are divided among the rollout workers."""
    slots: Optional[int] = between(1, MOST, None)
    """Maximum number of open environments in the run; a trajectory waits for a slot before opening an environment. null
    opens all requested environments before the first turn."""
    processes: int = between(0, MOST, 0)
    """Number of rollout workers (processes that run trajectories), spread over the nodes without GPUs if there are any,
    else over all nodes; 0 runs trajectories in threads of the driver. If a rollout worker dies, other workers retry the
    trajectories and the worker is restarted, at most `rollout.restarts` times in total."""
    retries: int = between(0, 100, 2)
    """Number of retries of a trajectory from the prompt, after a service behind the environment failed
    (`InfrastructureFault`). Errors of the environment itself are never retried."""
    max_failed: float = between(0, 1, 0.5)
    """Tolerated share of failed trajectories in a step. If more fail, or all, the run ends and reports the failing
    environments and errors."""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """Retrieval service of environment `search`."""
    times: EnvironmentTimesConfig = field(default_factory=EnvironmentTimesConfig)
    """Assumed seconds of environments, for plans."""

    @property
    def default_name(self) -> str | None:
        """Environment of rows with an empty `env_class`; None if such rows are refused."""
        return REWARD_FUNCTION if self.reward_function else self.default

    def refusals(self) -> Refusals:
        """Yields refusals of `default` beside `reward_function`, and of more `processes` than `slots` or `workers`."""
        if self.reward_function and self.default not in (None, REWARD_FUNCTION):
            yield "environment.default", "environment.reward_function judges these rows; leave one of the two out"
        for name, many in (("slots", self.slots), ("workers", self.workers)):
            if many is not None and self.processes > many:
                yield (
                    "environment.processes",
                    f"each needs one of the run's environment.{name}, of which there are {many}; give fewer processes, "
                    f"or environment.{name}={self.processes} and more",
                )
