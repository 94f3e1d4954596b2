"""Consecutive phases of a run, sharing an event loop and the tokens of prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.config.schema import Config, EnvironmentConfig, SamplingConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.event_loop import EventLoop
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.setup import prompts_of
from skyrl_mega.trajectories.trajectory import Group
from tests.support.chats import characters
from tests.support.scripted import Scripted

SAMPLES = 3


class Phases(Generator):
    """A generator with a policy saying `1` in a single turn; `loops` records the event loop of each phase."""

    def __init__(self, chat: Renderer, environments: EnvironmentConfig) -> None:
        fleet: Any = SimpleNamespace(ask=lambda *_, **__: None)
        rollout: Any = SimpleNamespace(request_timeout_s=1.0)
        super().__init__(fleet, chat, rollout, environments)
        self.loops: list[asyncio.AbstractEventLoop] = []

    def player(self, sampling: SamplingConfig, *, service: bool = False) -> Agent:
        self.loops.append(asyncio.get_running_loop())
        limits = TrajectoryLimits(turn=10, response=10, length=1000, turns=1, env_timeout_s=60.0)
        policy: Any = Scripted(self.chat, ["1"] * 100)
        return Agent(policy, self.chat, self.environments, limits, self.threads)

    def play(self, prompts: list[Prompt], step: int) -> list[Group]:
        return self.generate(prompts, SAMPLES, SamplingConfig(), seed=f"0/{step}")


def question(i: int) -> str:
    return f"question {i}?"


def test_a_prompt_is_tokenised_once_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts tokenizations of more prompts than any text cache holds."""
    count = 4200
    rows = [
        {
            "prompt": [{"role": "user", "content": question(i)}],
            "env_class": "multiply",
            "reward_spec": {"ground_truth": "1"},
        }
        for i in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    config = Config()
    config.data.train, config.data.eval = [str(tmp_path / "train.parquet")], []
    chat = characters(tmp_path / "model")
    tokenised: Counter[str] = Counter()
    encode = chat.encode

    def counting(text: str) -> list[int]:
        tokenised[text] += 1
        return encode(text)

    monkeypatch.setattr(chat, "encode", counting)
    prompts, _ = prompts_of(config, chat, Console())
    played = [prompts[0], prompts[1], prompts[-1]]
    with Phases(chat, config.environment) as generator:
        for step in range(1, 4):
            for group in generator.play(played, step):
                assert len(group.trajectories) == SAMPLES and group.trajectories[0].turns == 1
                for t in group.trajectories:
                    text = chat.tokenizer.decode(list(t.tokens[: t.prompt_length]))
                    assert question(group.prompt.uid) in text
    openings = {text: times for text, times in tokenised.items() if "question" in text}
    assert len(openings) == count and set(openings.values()) == {1}


def test_other_messages_than_the_prompts_are_rendered(characters_chat: Renderer) -> None:
    given, other = [{"role": "user", "content": "kept"}], [{"role": "user", "content": "not kept"}]
    fresh = list(characters_chat.render(other))
    kept = characters_chat.prompt(given, "here")
    assert list(characters_chat.render(given)) == list(kept) != fresh
    assert list(characters_chat.render(other)) == fresh
    assert memoryview(characters_chat.render(given)).nbytes == 4 * len(kept)  # type: ignore[arg-type]


def test_phases_share_an_event_loop_that_ends_with_the_run(characters_chat: Renderer) -> None:
    prompt = Prompt(0, [{"role": "user", "content": "1 * 1 = "}], "multiply", {"reward_spec": {"ground_truth": "1"}})
    with Phases(characters_chat, EnvironmentConfig(workers=1)) as generator:
        groups = [generator.play([prompt] * 4, step) for step in (1, 2, 1)]
        assert len(set(generator.loops)) == 1 and not generator.loops[0].is_closed()
    assert generator.loops[0].is_closed()
    tokens = [[t.tokens for group in phase for t in group.trajectories] for phase in groups]
    assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 4 * SAMPLES


def test_a_phase_that_fails_leaves_nothing_under_way() -> None:
    ended: list[str] = []

    async def left_alone() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("left alone")

    async def fails() -> None:
        tasks.append(asyncio.create_task(left_alone()))
        await asyncio.sleep(0)
        raise KeyError("this phase")

    async def others() -> int:
        return len(asyncio.all_tasks()) - 1

    tasks: list[asyncio.Task[None]] = []
    with EventLoop() as loop:
        with pytest.raises(KeyError, match="this phase"):
            loop.run(fails())
        assert ended == ["left alone"] and tasks[0].cancelled()
        assert loop.run(others()) == 0
