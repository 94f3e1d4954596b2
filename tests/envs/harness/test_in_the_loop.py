"""Programs in the sandbox as agents of a run: their tokens are trained on, and no fault earns a reward of 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.engines.base import Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.envs.harness.test_harness import ASK, REWARD
from tests.support.agents import LIMITS, FakeEngine, pieces_chat

TWICE = ASK + "print(ask(ask('2+2')))"
"""A program with two conversations."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return pieces_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def run(chat: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Trajectory]:
    """Returns a function that plays a trajectory with the code of a program."""
    if "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "reward.py").write_text(REWARD)

    def played(code: str) -> Trajectory:
        (tmp_path / "agent.py").write_text(code)
        options = {"command": "python -S agent.py", "reward": "reward.py:score", "timeout_s": 60}
        config = EnvironmentConfig(options={"harness": options})
        prompt = Prompt(3, [{"role": "user", "content": "2+2"}], "harness", {"reward_spec": {"ground_truth": "4"}})

        async def play() -> Trajectory:
            agent = Agent(engine, chat, config, LIMITS, EnvPool(4), retries=1)  # type: ignore[arg-type]
            return await agent.play(prompt, 0, "0/3")

        return asyncio.run(play())

    def four(request: Request, rng: Random) -> str:
        return "4"

    engine = FakeEngine(chat, text=four)
    played.engine = engine  # type: ignore[attr-defined]
    return played


def test_the_tokens_of_a_program_in_the_sandbox_are_trained_on(run: Callable[[str], Trajectory]) -> None:
    t = run(TWICE)
    assert (t.status, t.reward, t.turns) == (Status.COMPLETED, 1.0, 2), t.metadata
    engine: FakeEngine = run.engine  # type: ignore[attr-defined]
    sampled = [token for _, completion in engine.asked for token in completion.tokens]
    assert [token for token, mask in zip(t.tokens, t.mask, strict=True) if mask] == sampled
    assert t.metrics["agent_branches"] == 2 and t.metrics["length"] == 2 and t.metadata["program"]["exit"] == 0


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("print(4)", Status.ERROR_ENV, "the agent made no request"),
        (TWICE + "\n1 / 0", Status.ERROR_ENV, "exit code 1: ZeroDivisionError"),
        (TWICE + "\nos.kill(os.getpid(), 9)", Status.ERROR_ENV, "by signal 9"),
    ],
)
def test_a_fault_is_no_reward(run: Callable[[str], Trajectory], code: str, status: Status, error: str) -> None:
    t = run(code)
    assert t.status is status and error in t.metadata["error"]


def test_a_program_that_a_limit_ends_is_truncated(run: Callable[[str], Trajectory]) -> None:
    t = run(ASK + "print(ask('2+2'))\nask('word ' * 6000)")
    assert (t.status, t.reward) == (Status.TRUNCATED_TOKENS, 0.0), t.metadata
