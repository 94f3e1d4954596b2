"""The time limit of a trajectory covers playing; judging the answer has a separate limit."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.base import BaseTextEnv
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.sandbox import Sandbox
from skyrl_mega.envs.sandbox.run import CONFINEMENTS, python
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.envs.test_killed_scoring import launcher
from tests.support.scripted import Scripted

TIME_S = 0.2


class SlowSpeaker(Scripted):
    """A policy generating until the trajectory's time is over, as an engine does, and then returning a word."""

    async def generate(self, request: Request) -> Completion:
        assert request.seconds is not None
        await asyncio.sleep(request.seconds)
        return await super().generate(request)


class Judge(BaseTextEnv):
    """An environment taking `extra_info.seconds` to judge, or running a program in a sandbox."""

    def step(self, action: str) -> Any:
        info = self.extras["extra_info"]
        if info.get("sandbox"):
            outcome = Sandbox(without=tuple(CONFINEMENTS)).run(python("-c", "import time; time.sleep(30)"))
            return {"observations": [], "reward": float(outcome.status == "ok"), "done": True}
        time.sleep(info["seconds"])
        return {"observations": [], "reward": 1.0, "done": True}


def judged(chat: Renderer, env_timeout_s: float, **info: Any) -> Trajectory:
    """Plays a trajectory whose time ends during the answer."""
    environments = EnvironmentConfig(classes={"judge": "tests.rollout.test_deadline:Judge"})
    row = {"reward_spec": {"ground_truth": "1"}, "extra_info": info}
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "judge", row)
    limits = TrajectoryLimits(100, 1000, 1000, turns=4, env_timeout_s=env_timeout_s, trajectory_timeout_s=TIME_S)
    policy: Any = SlowSpeaker(chat, ["a word"], finish="timeout")

    async def one() -> Trajectory:
        agent = Agent(policy, chat, environments, limits, EnvPool(2))
        return await agent.play(prompt, 0, "0/1")

    return asyncio.run(one())


def test_what_was_generated_is_judged_after_the_time_is_over(characters_chat: Renderer) -> None:
    """Judges for four times the trajectory's time limit."""
    t = judged(characters_chat, 60.0, seconds=4 * TIME_S)
    assert (t.status, t.reward, t.turns) == (Status.TRUNCATED_TIME, 1.0, 1)
    assert t.seconds["env"] >= 4 * TIME_S


def test_judging_has_a_limit_of_its_own_and_past_it_has_failed(characters_chat: Renderer) -> None:
    t = judged(characters_chat, 0.1, seconds=1.0)
    assert (t.status, t.reward, t.status.failed) == (Status.ERROR_ENV_TIMEOUT, 0.0, True)


def test_a_kill_in_the_middle_of_judging_is_no_reward(characters_chat: Renderer) -> None:
    killing = threading.Thread(target=lambda: os.kill(launcher(), signal.SIGKILL))
    killing.start()
    t = judged(characters_chat, 60.0, sandbox=True)
    killing.join()
    assert (t.status, t.status.failed) == (Status.ERROR_INFRASTRUCTURE, True)
    assert "the sandbox did not report" in t.metadata["error"]


class AtTheEnd(BaseTextEnv):
    """An environment judging in the fourth turn, or in `out_of_time`; a tool call takes `extra_info.seconds`."""

    def step(self, action: str) -> Any:
        time.sleep(self.extras["extra_info"]["seconds"])
        return {"observations": [{"role": "user", "content": "go on"}], "reward": 0.0, "done": False}

    def out_of_time(self) -> Any:
        if self.extras["extra_info"].get("breaks"):
            raise InfrastructureFault("the checker was killed")
        reward = self.extras["extra_info"].get("reward", 0.5)
        return {"observations": [], "reward": reward, "done": True, "metadata": {"judged": "late"}}


class WaitsFirst(Scripted):
    """A policy with an immediate first answer; the second turn waits for an engine until the time is over."""

    async def generate(self, request: Request) -> Completion:
        if self.turns:
            assert request.seconds is not None
            await asyncio.sleep(request.seconds)
            return Completion(request.id, [], [], "timeout", ())
        return await super().generate(request)


def late(chat: Renderer, policy: Any, **info: Any) -> Trajectory:
    environments = EnvironmentConfig(classes={"at_the_end": "tests.rollout.test_deadline:AtTheEnd"})
    row = {"reward_spec": {"ground_truth": "1"}, "extra_info": info}
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "at_the_end", row)
    limits = TrajectoryLimits(100, 1000, 1000, turns=4, env_timeout_s=60.0, trajectory_timeout_s=TIME_S)

    async def one() -> Trajectory:
        agent = Agent(policy, chat, environments, limits, EnvPool(2))
        return await agent.play(prompt, 0, "0/1")

    return asyncio.run(one())


def test_time_that_ends_in_a_tool_is_no_reward_of_0(characters_chat: Renderer) -> None:
    """Calls `out_of_time` before any judgement, and expects the reward."""
    t = late(characters_chat, Scripted(characters_chat, ["a word"] * 4), seconds=2 * TIME_S)
    assert (t.status, t.reward, t.turns, t.metadata["judged"]) == (Status.TRUNCATED_TIME, 0.5, 1, "late")
    assert [step.reward for step in t.steps if step.reward] == [0.5]


def test_time_that_ends_while_an_engine_is_waited_for_is_none_either(characters_chat: Renderer) -> None:
    t = late(characters_chat, WaitsFirst(characters_chat, ["a word"] * 4), seconds=0.0)
    assert (t.status, t.reward, t.turns) == (Status.TRUNCATED_TIME, 0.5, 1)


def test_an_answer_that_is_cut_in_an_environment_that_goes_on_is_judged_too(characters_chat: Renderer) -> None:
    t = late(characters_chat, SlowSpeaker(characters_chat, ["a word"] * 4, finish="timeout"), seconds=0.0)
    assert (t.status, t.reward, t.turns) == (Status.TRUNCATED_TIME, 0.5, 1)


def test_a_judge_that_fails_then_has_failed(characters_chat: Renderer) -> None:
    t = late(characters_chat, Scripted(characters_chat, ["a word"] * 4), seconds=2 * TIME_S, breaks=True)
    assert (t.status, t.reward, t.status.failed) == (Status.ERROR_INFRASTRUCTURE, 0.0, True)


def test_what_it_gives_then_is_told_of_by_its_name(characters_chat: Renderer) -> None:
    t = late(characters_chat, Scripted(characters_chat, ["a word"] * 4), seconds=2 * TIME_S, reward="much")
    assert t.status.failed and "out_of_time: reward = str 'much'; allowed: a finite number" in t.metadata["error"]
