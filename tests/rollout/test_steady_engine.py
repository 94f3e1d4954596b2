"""A real CPU engine with steady batches next to one with vLLM's own scheduler, and pauses in flight."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.scheduler import HoldingScheduler
from skyrl_mega.engines.vllm.spec import environment
from tests.support.engines import build_model, complete, spec_of

pytestmark = pytest.mark.nightly

ROLLOUT = RolloutConfig(kv_cache_gib=0.01, concurrency=24, options={"block_size": 32})
LOG = "STEADY_STEPS"
STOPS = Sampling(stop_tokens=(3, 11, 40))


class Logged(HoldingScheduler):
    """A scheduler that appends a letter per step to a file: s for a steady batch, v for vLLM."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Returns the next step's schedule."""
        scheduled = super().schedule(throttle_prefills)
        if scheduled.total_num_scheduled_tokens:
            with Path(os.environ[LOG]).open("a") as file:
                file.write("v" if self.batch is None else "s")
        return scheduled


def started(scheduler: str, model: Path) -> ActorGroup:
    spec = spec_of(model, ROLLOUT, weights="auto", extra={"scheduler_cls": scheduler})
    env = environment(spec) | {LOG: str(model.parent / "steps")}
    group = ActorGroup.spawn(scheduler[-6:], VllmEngine, [{"spec": spec}], timeout=300, env=env, logs=model.parent)
    group.call_all("start", timeout=600)
    return group


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with session(actors=2):
        yield build_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", seed=3)


@pytest.fixture(scope="module")
def ours(model: Path) -> Iterator[ActorGroup]:
    group = started(f"{__name__}.Logged", model)
    yield group
    group.shutdown()


def requests(name: str, count: int = 40) -> list[Request]:
    """Returns requests with four prompts and lengths of 1 to 99 tokens."""
    return [Request(f"{name}/{i}", [5 + i % 4] * (20 + i % 4), 1 + i * 77 % 99, seed=i) for i in range(count)]


def test_answers_equal_those_of_vllms_scheduler(model: Path, ours: ActorGroup) -> None:
    """Compares tokens, log-probs and reasons to the last bit; 16 requests wait for a place in the batch."""
    seen = [complete(ours, requests(name), sampling) for name, sampling in (("all", Sampling()), ("stop", STOPS))]
    steps = (model.parent / "steps").read_text()
    assert steps.count("s") > len(steps) / 3
    plain = started("vllm.v1.core.sched.scheduler.Scheduler", model)
    try:
        expected = [
            complete(plain, requests(name), sampling) for name, sampling in (("all", Sampling()), ("stop", STOPS))
        ]
    finally:
        plain.shutdown()
    assert seen == expected
    assert {c.finish for c in seen[1].values()} == {"stop", "length"}


def test_pauses_while_requests_are_under_way(ours: ActorGroup) -> None:
    """Pauses and resumes four times, as for an update of weights: the answers are those of a run without pauses."""

    def asked(name: str) -> list[Request]:
        return [Request(f"{name}/{i}", [5] * 8, 110, seed=i) for i in range(24)]

    engine = ours.actors[0]

    async def pauses() -> None:
        for _ in range(4):
            await asyncio.sleep(0.1)
            await engine.pause.remote()
            await engine.resume.remote()

    async def collect() -> list[Completion]:
        ended: list[Completion] = []
        async for reference in engine.generate_many.options(num_returns="streaming").remote(
            asked("paused"), Sampling()
        ):
            ended += await reference
        return ended

    async def both() -> list[Completion]:
        return (await asyncio.gather(collect(), pauses()))[0]

    ended = {c.id: c for c in asyncio.run(both())}
    for name, expected in complete(ours, asked("calm")).items():
        seen = ended[name.replace("calm", "paused")]
        assert (seen.tokens, seen.finish) == (expected.tokens, expected.finish)
        assert seen.logprobs == pytest.approx(expected.logprobs, abs=1e-4)  # prefixes are computed again
