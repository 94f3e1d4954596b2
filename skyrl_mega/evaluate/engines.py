"""The project's own engines, with the weights of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.cluster.placement import reserve
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.derived import evaluated_at_once, evaluation_sampling
from skyrl_mega.config.schema import Config
from skyrl_mega.rollout.agent_loop import Agent
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.rollout.renderer import Renderer
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.start_actors import Setup, start_engines


@dataclass(frozen=True)
class EngineSource:
    """Agents on engines."""

    generator: Generator
    config: Config

    @property
    def at_once(self) -> int:
        """Trajectories at once."""
        return evaluated_at_once(self.config, endpoint=False)

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Agent]:
        """An agent for one event loop."""
        yield self.generator.agent(evaluation_sampling(self.config))

    def refill(self) -> None:
        """Waits for an engine that is up again; it has its weights from the directory."""
        fleet = self.generator.fleet
        fleet.serve(fleet.present())


@contextmanager
def own_engines(config: Config, chat: Renderer, folder: Path, console: Console) -> Iterator[EngineSource]:
    """Engines that serve `model.path`; they end with this block."""
    device, workers = config.cluster.device, config.rollout.engines * config.rollout.tensor
    say: Callable[[str], None] = console.say
    with ExitStack() as stack:
        with console.phase("start ray"):
            stack.enter_context(session(actors=workers, gpus=workers if device == "cuda" else 0))
        with console.phase("start engines"):
            model = Path(config.model.path).absolute()
            rollout = config.rollout
            places = reserve(rollout.engines, gpus=rollout.tensor) if device == "cuda" else None
            setup = Setup(config, {}, model, device=device, folder=folder, stack=stack, say=say)
            fleet = start_engines(setup, places, weights="auto")
        fleet.serve(fleet.present())
        generator = stack.enter_context(
            Generator(fleet, chat, config.rollout, config.environment, reward_weights=config.algorithm.reward_weights)
        )
        yield EngineSource(generator, config)
