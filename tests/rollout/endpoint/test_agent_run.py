"""A trajectory whose environment runs an agent: status, reward, metadata and time of every ending."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from skyrl_mega.cli.agent_checks import check_agents
from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config, EnvironmentConfig, RolloutConfig, RunConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent import agent_loop
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory
from tests.rollout.endpoint.user_agents import Asking, ask
from tests.support.agents import LIMITS, FakeEngine

ASKING = EnvironmentConfig(classes={"asking": "tests.rollout.endpoint.user_agents:Asking"})


def play(engine: FakeEngine, *endings: str, most: int = 8, settings: EnvironmentConfig = ASKING, **limits: Any) -> Any:
    """Plays a trajectory for each ending at once."""

    async def everything() -> list[Trajectory]:
        pool, given = EnvPool(most), replace(LIMITS, **{"turn": 1000, **limits})
        weights = {"right": 1.0, "short": 2.0}
        agent = Agent(engine, engine.chat, settings, given, pool, reward_weights=weights, retries=2)  # type: ignore[arg-type]
        prompts = [Prompt(i, [{"role": "user", "content": "hello"}], "asking", {"extra_info": {"then": then}})
                   for i, then in enumerate(endings)]  # fmt: skip
        return await asyncio.gather(*(agent.play(prompt, 0, f"0/{prompt.uid}") for prompt in prompts))

    for records in (Asking.endpoints, Asking.closed, Asking.attempts):
        records.clear()
    return asyncio.run(everything())


def closed(then: str) -> bool:
    """Returns True once an environment is closed: an abandoned thread closes its environment at its end."""
    end = time.monotonic() + 30
    while then not in Asking.closed and time.monotonic() < end:
        time.sleep(0.01)
    return Asking.closed.count(then) == 1


def test_an_agent_is_graded_and_its_key_dies(chat: Renderer) -> None:
    (t,) = play(FakeEngine(chat, text=lambda request, rng: "hello"), "ends")
    assert (t.status, t.reward, t.rewards, t.turns) == (Status.COMPLETED, 2.0, {"right": 1.0, "short": 0.5}, 2)
    assert [step.kind for step in t.steps] == [Kind.PROMPT, Kind.RESPONSE, Kind.OBSERVATION, Kind.RESPONSE]
    assert [step.reward for step in t.steps] == [None, None, None, 2.0]
    assert [m["content"] for m in t.messages] == ["hello", "hello", "more", "hello"]
    assert [step.messages for step in t.steps] == [1, 1, 1, 1]
    assert t.metadata["answer"] == "ends"
    assert t.metrics == {
        "agent_requests": 2, "agent_branches": 1, "agent_dropped_tokens": 0, "agent_dropped_after_stop": 0,
        "agent_dropped_client_gone": 0, "agent_dropped_after_end": 0, "agent_dropped_out_of_time": 0,
        "agent_ignored_parameters": 1, "agent_retokenised_messages": 0, "steps": 2,
    }  # fmt: skip
    assert t.prompt_length == len(chat.render([{"role": "user", "content": "hello"}]))
    assert t.seconds["generate"] > 0 and t.seconds["env"] > 0
    assert sum(step.env_s for step in t.steps) == pytest.approx(t.seconds["env"])
    assert Asking.closed == ["ends"] and Asking.endpoints[0].seconds == LIMITS.trajectory_timeout_s
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        ask(Asking.endpoints[0], t.prompt.messages)


def test_faults_are_no_rewards(chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "PAUSE_S", 0.0)
    silent, raises, wrong, unwell = play(FakeEngine(chat), "silent", "raises", "observations", "unwell")
    assert [t.status for t in (silent, raises, wrong)] == [Status.ERROR_ENV] * 3
    assert silent.metadata["error"] == "environment asking: the agent made no request"
    assert list(silent.tokens) == list(chat.render(silent.prompt.messages)) and silent.turns == 0
    assert "run raised ZeroDivisionError('in run')" in raises.metadata["error"] and raises.turns == 1
    assert "the agent has ended and sees no further messages" in wrong.metadata["error"]
    assert (unwell.status, unwell.retries, unwell.turns) == (Status.COMPLETED, 2, 2)
    assert all(t.reward == 0 and t.metrics["agent_requests"] == t.turns for t in (silent, raises, wrong))


def test_an_agent_that_hangs_is_left_alone(chat: Renderer) -> None:
    Asking.release.clear()
    (t,) = play(FakeEngine(chat), "hangs", trajectory_timeout_s=0.5, env_timeout_s=1.0)
    Asking.release.set()
    assert t.status is Status.ERROR_ENV_TIMEOUT and "run took longer than 1.5 s" in t.metadata["error"]
    assert closed("hangs")


def test_a_retry_repeats_the_names_of_the_requests(chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "PAUSE_S", 0.0)
    engine = FakeEngine(chat)
    play(engine, "unwell")
    names = [request.id for request in engine.started]
    assert names[:3] == [names[0]] * 3 and len(set(names)) == 2


def test_limits_of_the_run_truncate_a_trajectory(chat: Renderer) -> None:
    """Lets agents meet the limits of requests, of the context and of time, of which two then raise."""
    (turns,) = play(FakeEngine(chat), "too many", turns=3)
    assert (turns.status, turns.reward, turns.turns) == (Status.TRUNCATED_TURNS, 0.0, 3)
    assert "HTTPStatusError" in turns.metadata["error"] and turns.metrics["agent_requests"] == 3
    length = len(chat.render([{"role": "user", "content": "hello"}])) + 20
    (context,) = play(FakeEngine(chat, text=lambda request, rng: "hello" * 30), "ends", length=length)
    assert (context.status, context.turns) == (Status.TRUNCATED_TOKENS, 1)
    (late,) = play(FakeEngine(chat), "slow", trajectory_timeout_s=0.4, env_timeout_s=20.0)
    assert (late.status, late.reward) == (Status.TRUNCATED_TIME, 0.0)
    (first,) = play(FakeEngine(chat), "ends", length=10)
    assert first.status is Status.ERROR_ENV, "as for a prompt that leaves no room"


def test_only_an_agent_that_stopped_is_truncated_by_a_limit(chat: Renderer) -> None:
    """Refuses a request of an agent whose judge then raises an exception."""
    (t,) = play(FakeEngine(chat), "too many, judged", turns=3)
    assert (t.status, t.turns) == (Status.ERROR_ENV, 3) and "the judge is away" in t.metadata["error"]


def test_a_fault_of_the_engines_ends_the_phase(chat: Renderer) -> None:
    class Broken(FakeEngine):
        async def generate(self, request: Request) -> Completion:
            raise ActorFailed("engine", 0, "generate_many", "out of memory")

    with pytest.raises(ActorFailed, match="out of memory"):
        play(Broken(chat), "ends")


def test_an_abandoned_agent_is_closed(chat: Renderer) -> None:
    """Cancels a trajectory while its agent waits for the policy."""

    async def abandon() -> None:
        engine = FakeEngine(chat, gate=asyncio.Event())
        agent = Agent(engine, chat, ASKING, LIMITS, EnvPool(2))  # type: ignore[arg-type]
        prompt = Prompt(0, [{"role": "user", "content": "hello"}], "asking", {"extra_info": {"then": "abandoned"}})
        playing = asyncio.create_task(agent.play(prompt, 0, "0/0"))
        while not engine.started:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()

    asyncio.run(abandon())
    assert closed("abandoned")


def test_no_more_agents_work_at_once_than_environment_workers(chat: Renderer) -> None:
    Asking.most = 0
    played = play(FakeEngine(chat, delay_s=0.02), *["ends"] * 6, most=2)
    assert [t.status for t in played] == [Status.COMPLETED] * 6 and Asking.most == 2


def test_settings_without_sense_for_an_agent_are_refused() -> None:
    config = replace(
        Config(), environment=ASKING, rollout=RolloutConfig(step_wise="merged", trajectory_timeout_s=600.0)
    )
    check_agents(config, ["asking", "addition"])
    for changed, why in (
        ({"rollout": RolloutConfig(trajectory_timeout_s=600.0)}, r"rollout\.step_wise = off.*step_wise=merged"),
        ({"rollout": RolloutConfig(step_wise="turns")}, r"rollout\.trajectory_timeout_s = null.*nothing would end"),
        ({"rollout": replace(config.rollout, conversation="one_message")}, r"rollout\.conversation = one_message"),
        ({"run": RunConfig(deterministic=True)}, r"run\.deterministic = true"),
    ):
        with pytest.raises(UserError, match=why):
            check_agents(replace(config, **changed), ["asking"])
        check_agents(replace(config, **changed), ["addition"])
    own = replace(ASKING, options={"asking": {"limit_s": 30.0}})
    check_agents(replace(config, rollout=RolloutConfig(step_wise="turns"), environment=own), ["asking"])
