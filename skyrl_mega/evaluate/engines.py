"""The project's own engines, with the weights of a Hugging Face directory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.cluster.placement import reserve
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.derived import engine_ranks, evaluation_concurrency, evaluation_sampling
from skyrl_mega.config.pools import label_of
from skyrl_mega.config.schema import Config
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.rollout.player import Player
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.start_actors import Setup, start_engines
from skyrl_mega.trainer.start_workers import start_workers


@dataclass(frozen=True)
class EngineSource:
    """Source of players, which run an evaluation's trajectories on engines."""

    generator: Generator
    """Owns the engines."""
    config: Config
    """The evaluation's settings."""

    @property
    def at_once(self) -> int:
        """Maximum number of concurrent trajectories."""
        return evaluation_concurrency(self.config, endpoint=False)

    @asynccontextmanager
    async def player(self) -> AsyncIterator[Player]:
        """Yields a player with the evaluation's sampling settings, for use in a single event loop. Afterwards the
        player's router is closed."""
        player = self.generator.player(evaluation_sampling(self.config))
        try:
            yield player
        finally:
            player.router.close()

    def refill(self) -> None:
        """Lets all running engines serve, with the weights of `model.path`; if none runs, restarts the failed engines
        and waits for the first. Every restart is bounded by `cluster.start_timeout_s`.

        Raises:
            ActorFailed: No engine could be restarted.
        """
        fleet = self.generator.fleet
        fleet.serve(fleet.ensure_running())


@contextmanager
def own_engines(config: Config, chat: Renderer, folder: Path, console: Console) -> Iterator[EngineSource]:
    """Starts engines with the weights in `model.path`, and rollout workers if configured; yields a source of players,
    which run trajectories on the engines.

    Engines, workers and the Ray session end with the `with` block, also after an error.

    Args:
        config: The settings, with the device decided.
        chat: Tokenizer and chat template.
        folder: Folder of the evaluation, for logs.
        console: Shows the progress.

    Raises:
        UserError: vLLM rejects the settings, or the cluster at RAY_ADDRESS does not answer.
        ClusterError: Ray did not start, or lacks the GPUs.
        ActorFailed: An actor did not start within `cluster.start_timeout_s`.
    """
    device, workers = config.cluster.device, config.rollout.engines * engine_ranks(config.rollout)
    say: Callable[[str], None] = console.say
    with ExitStack() as stack:
        with console.phase("start ray"):
            actors = workers + config.environment.processes
            gpus, limit = workers if device == "cuda" else 0, config.cluster.start_timeout_s
            stack.enter_context(session(actors=actors, gpus=gpus, timeout_s=limit, say=say))
        with console.phase("start engines"):
            model = Path(config.model.path).absolute()
            rollout = config.rollout
            pool = config.cluster.pools.engines if os.environ.get("RAY_ADDRESS") else None
            label = label_of(pool) if pool else None
            places = reserve(rollout.engines, gpus=engine_ranks(rollout), label=label) if device == "cuda" else None
            setup = Setup(config, read_config(model), model, device=device, folder=folder, stack=stack, say=say)
            fleet = start_engines(setup, places, weights="auto")
            rollout_workers = start_workers(setup)
        fleet.serve(fleet.ensure_running())
        weights = config.algorithm.reward_weights
        generator = stack.enter_context(
            Generator(fleet, chat, config.rollout, config.environment, reward_weights=weights, workers=rollout_workers)
        )
        yield EngineSource(generator, config)
