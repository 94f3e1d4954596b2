"""Two hundred random conversations of agents over HTTP: training uses exactly the tokens at the engine.

The reference is a recording of the engine's inputs and outputs. Every sampled token is trained on once, or counted as
dropped with the reason.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from skyrl_mega.batch.samples import samples_of, trained_tokens
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.routes import COLUMN
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory
from tests.support.agents import LIMITS, FakeEngine, routes_of
from tests.support.random_agent import RandomAgent, branches

ENVIRONMENT = EnvironmentConfig(classes={"random": "tests.support.random_agent:RandomAgent"})
Recorded = list[tuple[Request, Completion]]


def play(engine: FakeEngine, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Plays a trajectory of each prompt, named by its number."""

    async def everything() -> list[Trajectory]:
        agent = Agent(engine, engine.chat, ENVIRONMENT, LIMITS, EnvPool(16))  # type: ignore[arg-type]
        return await asyncio.gather(*(agent.play(prompt, 0, f"0/{prompt.uid}") for prompt in prompts))

    return asyncio.run(everything())


def conversations(t: Trajectory) -> list[tuple[int, int]]:
    """Returns the span of every conversation in the trajectory."""
    starts = [step.start for step in t.steps if step.kind is Kind.PROMPT]
    return list(pairwise([*starts, len(t.tokens)]))


def check_tokens(t: Trajectory, recorded: Recorded) -> None:
    """Compares every trained token, its context, log-prob and version with the recording, to the last bit, and counts
    all other sampled tokens."""
    left, after_stop, versions, start = list(recorded), 0, [], 0
    assert t.steps[0].start == 0 and all(a.end == b.start for a, b in pairwise(t.steps)) and t.steps[-1].end == t.length
    for step in t.steps:
        span = slice(step.start, step.end)
        assert set(t.mask[span]) <= {int(step.kind is Kind.RESPONSE)}
        if step.kind is Kind.PROMPT:
            start = step.start
        if step.kind is not Kind.RESPONSE:
            assert not any(t.logprobs[span])
            continue
        context, reply, logprobs = t.tokens[start : step.start], t.tokens[span], t.logprobs[span]
        place = next(
            place
            for place, (request, completion) in enumerate(left)
            if array("i", request.tokens) == context
            and array("i", completion.tokens[: len(reply)]) == reply
            and array("f", completion.logprobs[: len(reply)]).tobytes() == logprobs.tobytes()
        )
        _, completion = left.pop(place)
        after_stop += len(completion.tokens) - len(reply)
        versions += [(version, step.start + first) for version, first in completion.versions if first < len(reply)]
    gone = sum(len(completion.tokens) for _, completion in left)
    assert t.metrics["agent_dropped_after_stop"] == after_stop
    assert t.metrics["agent_dropped_client_gone"] + t.metrics["agent_dropped_after_end"] == gone
    assert t.metrics["agent_dropped_tokens"] == after_stop + gone
    assert t.written + after_stop + gone == sum(len(completion.tokens) for _, completion in recorded)
    assert t.versions == versions and t.turns == len(recorded) - len(left)


def check_samples(t: Trajectory) -> None:
    """Checks that the samples contain every token of the policy once, each in a single conversation."""
    spans = conversations(t)
    for step_wise in ("merged", "turns"):
        trained: Counter[int] = Counter()
        for sample in samples_of(t, step_wise):
            assert any(start == sample.start and sample.end <= end for start, end in spans)
            where = [i for i in range(sample.trained_from, sample.end) if t.mask[i]]
            assert len(where) == trained_tokens(t, sample)
            trained.update(where)
        assert trained == dict.fromkeys((i for i, mask in enumerate(t.mask) if mask), 1)


def check_routes(t: Trajectory) -> None:
    """Compares the routes of every conversation with the engine's; the last token has none."""
    column = t.columns[COLUMN].values.numpy()
    for start, end in conversations(t):
        assert np.array_equal(column[start : end - 1], routes_of(t.tokens[start : end - 1]))
        assert not column[end - 1].any()


def test_training_uses_the_tokens_at_the_engine(chat: Renderer, tmp_path: Path) -> None:
    check_agents(chat, tmp_path, 30)


@pytest.mark.nightly
def test_training_uses_the_tokens_of_two_hundred_agents(chat: Renderer, tmp_path: Path) -> None:
    check_agents(chat, tmp_path, 200)


def check_agents(chat: Renderer, tmp_path: Path, count: int) -> None:
    """Plays random agents, and checks all trajectories and their file."""
    engine = FakeEngine(chat, delay_s=0.004, routes=True)
    prompts = [
        Prompt(
            uid,
            [{"role": "user", "content": Random(uid).choice(["hello", "the user said 42", ""])}],
            "random",
            {"extra_info": {"seed": f"s{uid}", "hurried": uid % 4 == 0}},
        )
        for uid in range(count)
    ]
    trajectories = play(engine, prompts)
    recorded: dict[str, Recorded] = {}
    for request, completion in engine.asked:
        recorded.setdefault(request.trajectory, []).append((request, completion))
    parquet.write(tmp_path / "t.parquet", trajectories, columns=True)
    assert [replace(t, columns={}) for t in parquet.read(tmp_path / "t.parquet")] == [
        replace(t, columns={}, retries=0) for t in trajectories
    ]
    counted: Counter[str] = Counter()
    for t in trajectories:
        assert not t.status.failed, t.metadata
        check_tokens(t, recorded[f"0/{t.prompt.uid}"])
        check_samples(t)
        check_routes(t)
        if not t.prompt.extras["extra_info"]["hurried"]:
            delivered = RandomAgent.delivered[t.prompt.extras["extra_info"]["seed"]]
            assert t.metrics["agent_branches"] == branches(delivered) == len(conversations(t))
            counted["replies"] += len(delivered)
        counted.update({name: int(value) for name, value in t.metrics.items()})
        counted["canonical"] += sum(
            chat.encode(chat.text(t.tokens[a:b])) == list(t.tokens[a:b]) for a, b in conversations(t)
        )
        counted[t.status] += 1
    assert len({request.id for request in engine.started}) == len(engine.started) == len(engine.asked)
    assert len(trajectories) == count and sum(map(len, recorded.values())) == len(engine.asked)
    assert counted["agent_requests"] > 5 * count and counted["agent_branches"] > 2 * count, counted
    assert counted["agent_dropped_after_stop"] > 5 * count and counted["agent_dropped_client_gone"] > 0, counted
    assert counted["canonical"] < 0.1 * counted["agent_branches"], "hardly any conversation survives re-tokenisation"
    assert counted[Status.COMPLETED] > count / 4 and counted[Status.TRUNCATED_TOKENS] > count / 10, counted
