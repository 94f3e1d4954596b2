"""Environments and the retrieval service that one of them asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.limits import ENVIRONMENT_WORKERS
from skyrl_mega.config.schema.fields import MOST, at_least, between


@dataclass
class RetrieverConfig:
    """What environment `search` asks: a retrieval service that runs (`url`), or one of the run's own (`index`)."""

    url: Optional[str] = None
    """Address of a service that runs; None starts one for this run on loopback, which ends with it."""
    index: Optional[str] = None
    """Index folder of the run's own service."""
    build: Optional[str] = None
    """Arguments of `python -m skyrl_mega.retriever build`, to make `index` when it is not there or no longer theirs."""
    serve: str = ""
    """More arguments of `python -m skyrl_mega.retriever serve` for the run's own service."""
    topk: int = at_least(1, 3)
    """Passages that a search shows."""
    passage_chars: int = at_least(1, 4000)
    """Characters of a passage that a search shows; what follows is left out."""
    timeout_s: float = at_least(0.1, 30.0)
    """Seconds for one search with all its retries; past it the policy is told that the search failed."""
    token_variable: str = "SKYRL_MEGA_RETRIEVER_TOKEN"
    """Environment variable that holds the service's token, where it wants one."""


@dataclass
class EnvironmentConfig:
    """Environments."""

    default: Optional[str] = None
    """Environment of rows whose `env_class` is empty."""
    classes: dict[str, str] = field(default_factory=dict)
    """Name → import path (`package.module:Class` or `path/to/file.py:Class`) of your own environments."""
    options: dict[str, Any] = field(default_factory=dict)
    """Environment name → options passed to its constructor."""
    workers: int = between(1, MOST, ENVIRONMENT_WORKERS)
    """Calls of environments at once, each in a thread; the others wait, and waiting does not count as their time. With
    `processes` they are divided among them."""
    slots: Optional[int] = between(1, MOST, None)
    """Environments that are open at once in the whole run: a trajectory waits for a slot, and its environment is opened
    then. None opens all that are asked for before the first one is played."""
    processes: int = between(0, MOST, 0)
    """Processes that play the trajectories, spread over the nodes, those without GPUs where there are some; 0 plays
    them in the driver's threads. A trajectory of one that dies is played again; `rollout.restarts` bounds how many are
    started again."""
    retries: int = between(0, 100, 2)
    """How often a trajectory is played again, from its prompt, when a service under its environment failed
    (`InfrastructureFault`). Errors of the environment itself never are."""
    max_failed: float = between(0, 1, 0.5)
    """Share of a step's trajectories that may fail. Where more have, or all, the run ends and says which environments
    failed and how."""
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    """The retrieval service that environment `search` asks."""
