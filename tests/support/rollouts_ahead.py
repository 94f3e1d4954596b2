"""Asynchronous rollouts in virtual time, as in a resumed run."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.trainer.asynchronous import Asynchronous
from tests.support.simulated_time import LONGEST_S
from tests.support.virtual_rollouts import Engines, service_of

PROMPTS = 60


def live(folder: Path, change: Any, prompts: int = PROMPTS) -> tuple[Asynchronous, VirtualLoop, PromptStream]:
    """Returns rollouts of 4 prompts per step in virtual time, restored from the folder if possible."""
    config = Config()
    config.asynchrony.mode, config.asynchrony.max_staleness = "full", 1
    config.data.prompts_per_step, config.data.samples_per_prompt = 4, 2
    change(config)
    random, loop = Random(0), VirtualLoop(LONGEST_S)
    engines = Engines(2, random)
    service = service_of(engines, random, loop)
    stream = PromptStream(prompts, batch=config.data.prompts_per_step)
    every = [Prompt(i, [], "mine", {}) for i in range(prompts)]
    rollouts = Asynchronous(config, every, stream, service, look=lambda: None, refill=lambda: None)
    print(rollouts.restore(folder))
    engines.revive(0)
    rollouts.synced(0)
    return rollouts, loop, stream


def names(groups: list[Any]) -> set[str]:
    """Returns the names of the groups' trajectories."""
    return {t.metadata["name"] for group in groups for t in group.trajectories}


def smaller(config: Config) -> None:
    config.data.prompts_per_step = 1
