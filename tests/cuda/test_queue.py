"""Tests of generation phases of the GPU recipes: a queue of an hour must not trigger a time limit.

All code of a phase is real, with the recipe's settings as resolved for a run on GPUs: generator, agents, router, fleet
and engine actors. Simulated are vLLM, which runs as many sequences at once as the planned cache holds, the messages
between actors, and time (`tests/support/simulated_time.py`). `tests/rollout/test_waiting.py` has real actors and a real
vLLM, with small queues and limits of seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.config.compose import compose
from skyrl_mega.config.derived import CACHE_FILL, length_limit
from skyrl_mega.config.schema import Config, EnvironmentConfig
from skyrl_mega.engines.base import Facts
from skyrl_mega.engines.vllm.spec import EngineSpec
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.fit import parallel_of
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.times import generate_time, mean_concurrency
from skyrl_mega.rollout import generator
from skyrl_mega.rollout.agent.env_pool import Call, Raised
from skyrl_mega.trainer import start_actors
from skyrl_mega.trajectories.trajectory import Status
from tests.conftest import ROOT
from tests.support import simulated_time
from tests.support.simulated_engine import SimulatedEngine

SCALE = 64
"""Real tokens per simulated token: lengths and caches are divided by this number, the time of a token is multiplied."""
FLAGSHIPS = ("dapo", "searchr1_30b")
USER = EnvironmentConfig(classes={"talk": "tests.rollout.user_envs:Talk"})


@dataclass(frozen=True)
class Plan:
    """A scaled recipe with the dry run's figures of its engines."""

    config: Config
    cache: int
    """Tokens in an engine's cache."""
    token_s: float
    """Seconds for a token of every running sequence."""

    @property
    def longest(self) -> int:
        """Largest number of tokens of a trajectory's first request."""
        return self.config.rollout.max_prompt_tokens + self.config.rollout.sampling.max_tokens

    @property
    def places(self) -> int:
        """Sequences of the largest length that an engine runs at once."""
        return min(self.config.rollout.concurrency, self.cache // self.longest)

    @property
    def limit_s(self) -> float:
        """Time limit under test."""
        return self.config.rollout.request_timeout_s


def planned(recipe: str, *settings: str) -> Plan:
    """Returns the plan of a recipe; `settings` change the simulated run, not the planned figures."""
    file = ROOT / "configs" / f"{recipe}.yaml"
    config = compose(file)
    hf, rollout = known(config.model.path), config.rollout
    decoder = architecture(hf).describe(hf)
    planned_batch = batch(config, parallel_of(config)[0])
    memory = engine_memory(config, decoder)
    steps = (
        planned_batch.sequences
        / rollout.engines
        * planned_batch.generated
        / mean_concurrency(config, memory, planned_batch)
    )
    lengths = {
        "max_prompt_tokens": rollout.max_prompt_tokens,
        "sampling.max_tokens": rollout.sampling.max_tokens,
        "max_length": length_limit(rollout),
    }
    scaled = compose(file, [*settings, *(f"rollout.{key}={length // SCALE}" for key, length in lengths.items())])
    return Plan(scaled, memory.tokens // SCALE, SCALE * generate_time(config, decoder, planned_batch) / steps)


class LocalActors:
    """Replacement of `ActorGroup` for engines, in the test's process. A killed engine is not restarted."""

    def __init__(self, name: str, specs: Sequence[EngineSpec], plan: Plan, faults: Sequence[int | None]) -> None:
        self.name = name
        self.facts = Facts(cache_tokens=plan.cache, cache_bytes=plan.cache)
        self.engines = [
            SimulatedEngine(spec, plan.places, plan.token_s, fault, self.facts)
            for spec, fault in zip(specs, faults, strict=True)
        ]
        self.actors = [SimpleNamespace(generate_many=_Method(engine)) for engine in self.engines]
        self.logs = [None] * len(specs)

    def __len__(self) -> int:
        return len(self.actors)

    def call_all(self, method: str, timeout: float, **_: object) -> list[Facts]:
        """Returns the facts of all engines for `start`; their vLLM starts once there is an event loop."""
        assert method == "start"
        return [self.facts] * len(self)

    def replace(self, rank: int, timeout: float) -> None:
        """Raises: no replacement is available."""
        raise ActorFailed(self.name, rank, "start", "no GPU is left")

    def shutdown(self) -> None:
        """Does nothing: there is no process to end."""


class _Method:
    """Actor generator that yields items in sequence and raises errors in Ray's form."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine

    def options(self, **_: Any) -> _Method:
        return self

    async def remote(self, *arguments: Any) -> AsyncIterator[Any]:
        if not hasattr(self.engine, "llm"):
            await self.engine.start()
        try:
            async for item in self.engine.generate_many(*arguments):
                yield _arrived(item)
        except Exception as error:
            raise ray.exceptions.RayTaskError("generate_many", str(error), error).as_instanceof_cause() from None


async def _arrived(item: Any) -> Any:
    return item


class Here:
    """Replacement of `EnvPool` without workers: environment code takes no simulated time."""

    def __init__(self, most: int, count: Callable[[int], None]) -> None:
        pass

    async def run(self, call: Call, limit_s: float, *, inline: bool = False) -> Any:
        """Returns the function's value."""
        value, error = call.run()
        if error is not None:
            raise Raised(error)
        return value


Fleets = Callable[..., tuple[Fleet, LocalActors]]


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fleets:
    """Returns a function that starts a plan's engines as a run on GPUs does."""
    monkeypatch.setattr(generator, "EnvPool", Here)
    (tmp_path / "config.json").write_text("{}")

    def start(plan: Plan, first_stalls_after: int | None = None, say: Any = print) -> tuple[Fleet, LocalActors]:
        groups: list[LocalActors] = []

        def spawn(name: str, _: type, arguments: list[dict[str, Any]], **__: Any) -> LocalActors:
            faults = [first_stalls_after, *[None] * (len(arguments) - 1)]
            groups.append(LocalActors(name, [a["spec"] for a in arguments], plan, faults))
            return groups[0]

        monkeypatch.setattr(start_actors, "ActorGroup", SimpleNamespace(spawn=spawn))
        setup = start_actors.Setup(
            plan.config, {}, tmp_path, device="cuda", folder=tmp_path, stack=ExitStack(), say=say
        )
        fleet = start_actors.start_engines(setup, None)
        fleet.serve(range(len(groups[0])))
        return fleet, groups[0]

    return start


def play(fleet: Fleet, plan: Plan, count: int) -> float:
    """Runs `count` trajectories with prompts and responses of the largest length; returns the phase's seconds."""
    rollout = plan.config.rollout
    chat: Any = SimpleNamespace(
        stop_tokens=(),
        one_message=False,
        render=lambda *_: [1] * rollout.max_prompt_tokens,
        following=lambda *_: [2],
        text=lambda _: "",
    )
    prompts = [Prompt(i, [{"role": "user", "content": ""}], "talk", {}) for i in range(count)]
    phase = generator.Generator(fleet, chat, rollout, USER)._generate(prompts, 1, rollout.sampling, "0/1", None)
    trajectories, seconds = simulated_time.run(phase)
    ended = {(t.status, t.response_length) for t in trajectories}
    assert ended == {(Status.TRUNCATED_TOKENS, rollout.sampling.max_tokens)}
    return seconds


def test_a_step_of_dapo_waits_for_hours_and_ends(fleets: Fleets) -> None:
    """Runs a step's number of trajectories of the largest length at the dry run's speed."""
    plan = planned("dapo")
    fleet, actors = fleets(plan)
    data = plan.config.data
    count = data.prompts_per_step * data.samples_per_prompt
    seconds = play(fleet, plan, count)
    assert seconds > 10 * plan.limit_s
    assert fleet.serving == list(range(len(actors)))
    for engine in actors.engines:
        assert engine.llm.most == CACHE_FILL * plan.cache // plan.longest  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", FLAGSHIPS)
def test_slow_tokens_and_a_queue_of_ten_caches_end_nothing(fleets: Fleets, recipe: str) -> None:
    """Runs responses that alone take longer than the limit."""
    plan = planned(recipe, "rollout.engines=1")
    slow = replace(plan, token_s=1.25 * plan.limit_s / plan.config.rollout.sampling.max_tokens)
    fleet, _ = fleets(slow)
    seconds = play(fleet, slow, 10 * slow.places)
    assert seconds > 10 * plan.limit_s
    assert fleet.serving == [0]


@pytest.mark.parametrize("recipe", FLAGSHIPS)
def test_an_engine_that_stands_still_is_found_within_the_limit(fleets: Fleets, recipe: str) -> None:
    """Checks that the requests of a stalled engine, queued requests included, go to other engines."""
    plan = planned(recipe)
    messages: list[tuple[float, str]] = []
    tokens = 3
    fleet, actors = fleets(
        plan, tokens * plan.places, lambda text: messages.append((asyncio.get_running_loop().time(), text))
    )
    play(fleet, plan, 3 * plan.places * len(actors))
    [(seconds, text)] = messages
    assert f"got a token for {plan.limit_s:g} s" in text
    assert 0 <= seconds - tokens * plan.token_s - plan.limit_s < 2
    assert fleet.serving == list(range(1, len(actors)))
