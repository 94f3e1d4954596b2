"""Trajectories played in other processes, on a real engine: equal to the driver's, and none lost with a process."""

from __future__ import annotations

import os
import signal
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import Config, EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.event_loop import BackgroundLoop
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.rollout.service import RolloutService, Ticket
from skyrl_mega.rollout.workers.group import Workers
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trainer import saved_rollouts
from skyrl_mega.trainer.start_actors import Setup
from skyrl_mega.trainer.start_workers import start_workers
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.engines import build_model, serving, spec_of, start_engine

ROLLOUT = RolloutConfig(
    kv_cache_gib=0.1, max_prompt_tokens=40, max_length=120, max_turns=3, restarts=1, env_timeout_s=30.0
)
TREES = replace(ROLLOUT, generator="tree_search", generator_options={"depth": 1, "tokens": 4})
SAMPLING = SamplingConfig(max_tokens=12)
CLASSES = {name.lower(): f"tests.rollout.user_envs:{name}" for name in ("Talk", "Slow", "Noted")}
HERE = EnvironmentConfig(classes=CLASSES)
THERE = replace(HERE, processes=2, slots=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", seed=3)


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[ActorGroup]:
    with session(actors=3):
        group = start_engine("engine", spec_of(model, ROLLOUT, weights="auto"), model.parent)
        yield group
        group.shutdown()


@pytest.fixture(scope="module")
def workers(model: Path, engines: ActorGroup) -> Iterator[Workers]:
    with ExitStack() as stack:
        config = Config(rollout=TREES, environment=THERE)
        started = start_workers(Setup(config, {}, model, device="cpu", folder=model.parent, stack=stack, say=print))
        assert started is not None
        yield started


@pytest.fixture(scope="module")
def chat(model: Path) -> Renderer:
    return Renderer(str(model))


def prompts(count: int, env: str = "talk", **extra: object) -> list[Prompt]:
    message = {"role": "user", "content": "hello"}
    return [Prompt(i, [message], env, {"reward_spec": {}, "extra_info": extra}) for i in range(count)]


def told(t: Trajectory) -> tuple[object, ...]:
    """Returns the parts of a trajectory independent of the process."""
    return t.prompt, t.sample, t.tokens, t.mask, t.reward, t.status, t.turns, t.messages, t.metadata, t.prompt_length


def test_they_are_those_that_the_driver_plays(engines: ActorGroup, workers: Workers, chat: Renderer) -> None:
    with Generator(serving(engines), chat, ROLLOUT, HERE) as generator:
        local = [t for group in generator.generate(prompts(12), 4, SAMPLING, seed="0/1") for t in group.trajectories]
    with Generator(serving(engines), chat, ROLLOUT, THERE, workers=workers) as generator:
        generator.spans = []
        asked = prompts(12)
        remote = [t for group in generator.generate(asked, 4, SAMPLING, seed="0/1") for t in group.trajectories]
        assert len(generator.spans) >= 2 * 48, "init and steps of each, for the profiler; its `close` is empty"
        assert all(isinstance(span, Span) for span in generator.spans)
    assert [told(t) for t in remote] == [told(t) for t in local]
    assert (
        max(abs(a - b) for x, y in zip(local, remote, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True))
        < 1e-4
    )
    assert all(t.prompt is asked[i // 4] for i, t in enumerate(remote)), "the driver's own prompts"
    assert max(t.seconds["slot"] for t in remote) > 0, "48 over 16 slots"


def test_whole_groups_are_those_of_the_driver(engines: ActorGroup, workers: Workers, chat: Renderer) -> None:
    asked, made = prompts(6), []
    for environment, players in ((HERE, None), (replace(THERE, slots=None), workers)):
        with Generator(serving(engines), chat, TREES, environment, workers=players) as generator:
            groups = generator.generate(asked, 4, SAMPLING, seed="0/2", own=True)
        made.append([told(t) for group in groups for t in group.trajectories])
        assert all(t.prompt is asked[i] for i, group in enumerate(groups) for t in group.trajectories)
    assert made[0] == made[1] and len(made[0]) == 24


def test_a_service_has_them_played_too(engines: ActorGroup, workers: Workers, chat: Renderer) -> None:
    """Plays through a service, as with `asynchrony.mode=full`: weights may change in between, and workers learn the
    engines again after a sync."""
    asked = prompts(6)
    tickets = [Ticket(i, i, 0, tuple(f"0/1/0/{i}/{s}" for s in range(2))) for i in range(6)]
    by_processes = {}
    for environment, players in ((HERE, None), (THERE, workers)):
        loop, done = BackgroundLoop(), []
        with Generator(serving(engines), chat, ROLLOUT, environment, loop=loop, workers=players) as generator:
            service = RolloutService(generator.player(SAMPLING, service=True), generator.fleet, loop, timeout_s=60.0)
            service.submit(tickets[:4], asked[:4])
            service.engines_changed()
            service.submit(tickets[4:], asked[4:])
            while len(done) < 6:
                assert service.served
                done += service.done(60.0)
        by_processes[environment.processes] = {one.ticket.number: [*map(told, one.group.trajectories)] for one in done}
    assert by_processes[2] == by_processes[0]


def test_what_the_policy_has_said_in_other_processes_is_not_said_twice(
    engines: ActorGroup, workers: Workers, chat: Renderer, tmp_path: Path
) -> None:
    """Saves recorded turns of trajectories waiting for a tool, and resumes without generating these turns again."""
    asked = prompts(2, "noted", folder=str(tmp_path), seconds=5.0)
    tickets = [Ticket(i, i, 0, (f"0/3/0/{i}/a", f"0/3/0/{i}/b")) for i in range(2)]
    loop, deadline = BackgroundLoop(), time.monotonic() + 60
    turns_by_name: dict[str, list[journal.RecordedTurn]] = {}
    with Generator(serving(engines), chat, ROLLOUT, THERE, loop=loop, workers=workers) as generator:
        service = RolloutService(generator.player(SAMPLING, service=True), generator.fleet, loop, timeout_s=60.0)
        service.submit(tickets, asked)
        while len(turns_by_name) < 4:
            assert time.monotonic() < deadline and not service.done(0.0), "its tools take five seconds"
            service.write_turns(tmp_path)
            turns_by_name = journal.read_all(tmp_path)
    again = [replace(t, recorded=[marked(one) for name in t.names for one in turns_by_name[name]]) for t in tickets]
    loop, done = BackgroundLoop(), []
    with Generator(serving(engines), chat, ROLLOUT, THERE, loop=loop, workers=workers) as generator:
        service = RolloutService(generator.player(SAMPLING, service=True), generator.fleet, loop, timeout_s=60.0)
        service.submit(again, asked)
        while len(done) < 2:
            done += service.done(60.0)
        service.write_turns(tmp_path)
    assert journal.read_all(tmp_path) == {}, "they have ended"
    for one in done:
        for t in one.group.trajectories:
            drawn = [p for p, policys in zip(t.logprobs, t.mask, strict=True) if policys]
            assert drawn and set(drawn) == {-9.0}


def marked(one: journal.RecordedTurn) -> journal.RecordedTurn:
    """Returns the turn with log-probs unlike any engine's."""
    completion = one.completion
    return replace(one, completion=replace(completion, logprobs=array("f", [-9.0] * len(completion.tokens))))


def test_what_a_checkpoint_brings_back_is_away_too(engines: ActorGroup, tmp_path: Path) -> None:
    """Restores trajectories by reference if other processes play: a single trajectory held by the driver would bring
    all others there."""
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], "talk", {"reward_spec": {}})
    arrays = array("i", [1, 2]), array("b", [0, 1]), array("f", [0.0, -0.5])
    trajectory = Trajectory(prompt, 0, *arrays, 1, 0.0, Status.COMPLETED, 1, versions=[(0, 1)])
    config, stream = Config(), PromptStream(1, batch=1)
    for processes in (0, 2):
        config.environment.processes = processes
        saved_rollouts.write(tmp_path, config, {"stream": stream.state(), "prompts": [0]}, [trajectory])
        restored = saved_rollouts.read(tmp_path, config, stream, [prompt])
        assert isinstance(restored, tuple)
        (t,) = restored[1]
        assert (t.remote_arrays is not None) == bool(processes) and t.prompt is prompt
        assert (t.tokens, t.logprobs) == (trajectory.tokens, trajectory.logprobs)


def test_a_killed_process_loses_nothing_and_doubles_nothing(
    engines: ActorGroup, workers: Workers, chat: Renderer, tmp_path: Path
) -> None:
    asked = prompts(10, "noted", folder=str(tmp_path), seconds=0.1)
    victim = workers.group.where[0].pid

    def kill() -> None:
        while not [*tmp_path.glob(f"open-{victim}-*")]:
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    progress: list[int] = []
    killing.start()
    with Generator(serving(engines), chat, ROLLOUT, THERE, workers=workers) as generator:
        groups = generator.generate(asked, 4, SAMPLING, seed="0/2", progress=lambda done, _: progress.append(done))
    killing.join()
    opened, closed = (
        Counter(file.name.split("-")[1] for file in tmp_path.glob(f"{what}-*")) for what in ("open", "close")
    )
    assert opened[str(victim)] > closed[str(victim)], "it was killed with environments open"
    del opened[str(victim)], closed[str(victim)]
    assert opened == closed, "every other environment is closed"
    assert progress == [*range(1, 41)]
    played = [t for group in groups for t in group.trajectories]
    with Generator(serving(engines), chat, ROLLOUT, HERE) as generator:
        undisturbed = generator.generate(asked, 4, SAMPLING, seed="0/2")
    assert [told(t) for t in played] == [told(t) for group in undisturbed for t in group.trajectories]
    until = time.monotonic() + 120
    while len(workers.running()) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(workers.running()) == 2 and workers.restarts == 0
    assert not reaper.members(victim)


def test_a_phase_that_is_abandoned_closes_its_environments(
    engines: ActorGroup, workers: Workers, chat: Renderer, tmp_path: Path
) -> None:
    class Ending(Exception):
        pass

    def look() -> None:
        if [*tmp_path.glob("open-*")]:
            raise Ending

    with (
        Generator(serving(engines), chat, ROLLOUT, THERE, look=look, workers=workers) as generator,
        pytest.raises(Ending),
    ):
        generator.generate(prompts(20, "noted", folder=str(tmp_path), seconds=0.3), 4, SAMPLING, seed="0/3")
    opened, closed = (len([*tmp_path.glob(f"{what}-*")]) for what in ("open", "close"))
    assert 0 < opened < 80
    time.sleep(0.5)
    assert len([*tmp_path.glob("open-*")]) == opened, "nothing is opened any more"
    assert closed >= opened - 16, "threads that are inside close theirs when they come back"


def test_without_any_process_the_run_ends_and_says_why(
    engines: ActorGroup, workers: Workers, chat: Renderer, tmp_path: Path
) -> None:
    """Kills the module's workers; must be the last test."""
    for where in workers.group.where:
        os.kill(where.pid, signal.SIGKILL)
    with (
        Generator(serving(engines), chat, ROLLOUT, THERE, workers=workers) as generator,
        pytest.raises(ActorFailed, match=r"rollout-\d .*its process died .*its log: .*rollout-\d.log"),
    ):
        generator.generate(prompts(4), 2, SAMPLING, seed="0/4")
