"""Trajectories that crash their worker every time, among harmless ones, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import pytest

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.config.schema import SamplingConfig
from skyrl_mega.rollout.workers import crash_isolation
from skyrl_mega.rollout.workers.client import WorkerClient
from skyrl_mega.rollout.workers.crash_isolation import EXPLAINED_PER_RESTART
from skyrl_mega.rollout.workers.link import Answer, WorkerLink
from skyrl_mega.rollout.workers.messages import TrajectoryJob
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.mortal_workers import PROMPT, in_virtual_time, players


@pytest.mark.parametrize("guilty", [[13], [13, 14], [*range(8, 16)]], ids=["one", "two", "eight"])
@pytest.mark.parametrize("processes", [1, 2, 5])
@in_virtual_time
async def test_those_that_end_their_process_every_time_fail_and_no_other_does(
    processes: int, guilty: list[int]
) -> None:
    """Crashes workers with several such trajectories at once: only these fail, although harmless ones run in the same
    workers. Isolation costs no restart in the end."""

    with players(processes, 10, seed=processes) as (player, group, workers, _, lines):
        group.each(dies_of={*guilty})
        played = await asyncio.gather(*(player.play(PROMPT, i, f"name {i}") for i in range(60)))
        assert [t.sample for t in played if t.status is Status.ERROR_INFRASTRUCTURE] == guilty
        assert all(t.status is Status.COMPLETED for t in played if t.sample not in guilty)
        errors = [played[i].metadata["error"] for i in guilty]
        assert all("while it ran alone; last error: its process died" in error for error in errors)
        assert sum(" 3 of them while it ran alone" in error for error in errors) >= 1, (
            "the first one; then two are enough"
        )
        assert played[13].remote_arrays.ref.good, "the others go on"
        crashes = sum(" is out of service: " in line for line in lines)
        assert workers.restarts == 10 - crashes // EXPLAINED_PER_RESTART, "all is explained"
        assert sum(" failed: environment  crashed " in line for line in lines) == len(guilty)


@pytest.mark.parametrize("processes", [3, 4, 16])
@pytest.mark.parametrize("seed", range(4))
@in_virtual_time
async def test_where_workers_die_of_nothing_that_they_play_nothing_fails(seed: int, processes: int) -> None:
    """Kills workers at random, every two minutes per worker; a trajectory takes 20 s."""
    chance, deaths = Random(seed), 0

    with players(processes, 1000, seed) as (player, group, workers, _, _):
        group.each(lasts_s=(10.0, 30.0))
        slots = asyncio.Semaphore(4 * processes)

        async def play(sample: int) -> Trajectory:
            async with slots:
                return await player.play(PROMPT, sample, str(sample))

        playing = [asyncio.create_task(play(i)) for i in range(100 * processes)]
        while not all(task.done() for task in playing):
            await asyncio.sleep(chance.expovariate(processes / 120))
            if up := workers.running():
                chance.choice([*up.values()]).die()
                deaths += 1
        assert all(t.status is Status.COMPLETED for t in await asyncio.gather(*playing))
    assert deaths > 2 * processes


@in_virtual_time
async def test_another_of_a_prompt_that_ends_its_process_is_alone_from_the_start() -> None:
    with players(2, 10) as (player, group, _, _, _):
        group.each(dies_of={*range(8)})
        first = await player.play(PROMPT, 0, "first")
        lives = len(group.every)
        others = [asyncio.create_task(player.play(replace(PROMPT, uid=1), 60 + i, str(i))) for i in range(20)]
        second = await player.play(PROMPT, 1, "second")
        assert [first.status, second.status] == [Status.ERROR_INFRASTRUCTURE] * 2
        assert len(group.every) == lives + 2, "two crashes are enough"
        assert all(t.status is Status.COMPLETED for t in await asyncio.gather(*others))
        names = [name for worker in group.every for name in worker.names if name.isdecimal()]
        assert len(names) == 20, "it took no other along"


@pytest.mark.parametrize("processes", [1, 3])
@in_virtual_time
async def test_what_a_worker_plays_for_another_session_counts_too(processes: int) -> None:
    """Runs two sessions on the same workers, such as a service and an evaluation: each has crashing trajectories, and
    no harmless trajectory of either fails."""

    with players(processes, 10) as (player, group, workers, engines, _):
        group.each(dies_of={3, 40})
        any_engines: Any = engines
        other = WorkerClient(workers, any_engines, SamplingConfig(), service=False, spans=lambda: None)
        other._keys = count(1000)
        asked = [(player, i) for i in range(30)] + [(other, i) for i in range(30, 60)]
        played = await asyncio.gather(*(p.play(replace(PROMPT, uid=i), i, str(i)) for p, i in asked))
        assert [t.sample for t in played if t.status.failed] == [3, 40]
        for session in (player, other):
            session.close()


@in_virtual_time
async def test_a_run_whose_workers_crash_on_every_trajectory_ends() -> None:
    """Ends after a bounded number of restarts, with the cause."""

    with players(3, 2) as (player, group, _, _, _):
        group.each(dies_of={*range(500)})
        asked = (player.play(replace(PROMPT, uid=i), i, str(i)) for i in range(500))
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert any(isinstance(error, ActorFailed) and "its process died" in str(error) for error in ended)
        assert len(group.every) <= 3 + (2 + 2 * 3 + 1) * EXPLAINED_PER_RESTART


@pytest.mark.parametrize("processes", [1, 2])
@in_virtual_time
async def test_two_unrelated_crashes_do_not_hold_up_a_step(processes: int) -> None:
    """Quarantines all trajectories of a worker at once; these leave quarantine in groups, not one after the other."""

    with players(processes, 10) as (player, group, _, _, _):
        group.each(lasts_s=(20.0, 40.0))
        clock = asyncio.get_running_loop().time
        playing = [asyncio.create_task(player.play(replace(PROMPT, uid=i), i, str(i))) for i in range(128)]
        for life in range(2):
            while len(group.every) <= life or not group.every[life].tasks:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)
            group.every[life].die()
        assert all(t.status is Status.COMPLETED for t in await asyncio.gather(*playing))
        assert clock() < 8 * 40


@pytest.mark.parametrize("restarts", [0, 1])
@in_virtual_time
async def test_while_a_crash_is_isolated_the_budget_may_be_exceeded(restarts: int) -> None:
    """Isolates four trajectories with a budget of a single restart; with `restarts` 0 no worker is restarted."""

    with players(4, restarts) as (player, group, _, _, lines):
        group.each(dies_of={*range(4)})
        asked = (player.play(replace(PROMPT, uid=i), i, str(i)) for i in range(40))
        ended = await asyncio.gather(*asked, return_exceptions=True)
        if restarts:
            failed = [t.sample for t in ended if isinstance(t, Trajectory) and t.status.failed]
            assert failed == [*range(4)] and not [t for t in ended if isinstance(t, BaseException)]
            assert sum("Restarting it" in line for line in lines) > restarts
        else:
            assert any(isinstance(t, ActorFailed) for t in ended) and len(group.every) == 4, "nobody is started again"


@in_virtual_time
async def test_a_worker_without_a_restart_returns_when_crashes_are_explained() -> None:
    """Gives a worker up after the crashing trajectory used the only restart; the trajectory's failure returns it."""

    with players(3, 1) as (player, group, workers, _, lines):
        for worker in group.actors:
            worker.lasts_s = 10.0, 10.0
        playing = [asyncio.create_task(player.play(replace(PROMPT, uid=i), i, str(i))) for i in range(3)]
        await asyncio.sleep(1)
        group.each(dies_of={0})
        group.actors[0].die()
        await asyncio.sleep(0.5)
        free = next(rank for rank, actor in workers.running().items() if len(actor.names) == 1)
        group.actors[free].die()
        await asyncio.sleep(0.1)
        assert "No restart is left" in lines[-1] and free not in workers.running()
        assert [t.status.failed for t in await asyncio.gather(*playing)] == [True, False, False]
        assert any(f"rollout-{free} is restarted after all" in line for line in lines)


@in_virtual_time
async def test_starts_that_fail_are_tried_again() -> None:
    """Repeats failed starts, as often as restarts are left."""

    with players(2, 10) as (player, group, _, _, lines):
        group.each(dies_of={3})
        group.starts_fail = 2
        played = await asyncio.gather(*(player.play(replace(PROMPT, uid=i), i, str(i)) for i in range(20)))
        assert [t.sample for t in played if t.status.failed] == [3]
        assert sum("it did not start" in line for line in lines) == 2


@in_virtual_time
async def test_others_of_its_prompt_run_one_at_a_time() -> None:
    """Isolates trajectories of a crashing prompt, but not a prompt of another data set with the same uid."""

    with players(1, 10) as (player, group, workers, _, _):
        (worker,) = group.actors
        workers.crashing_prompts[PROMPT.uid] = {crash_isolation.prompt_hash(PROMPT)}
        asked = [asyncio.create_task(player.play(PROMPT, i, f"waits {i}")) for i in range(2)]
        await asyncio.sleep(0.8)
        assert len(worker.tasks) == 1
        assert not workers.is_crashing(replace(PROMPT, messages=[{"role": "user", "content": "another"}]))
        assert [t.status for t in await asyncio.gather(*asked)] == [Status.COMPLETED] * 2


@in_virtual_time
async def test_alone_by_chance_is_no_suspect() -> None:
    """Crashes a worker under a trajectory running alone by chance, such as the last of a phase."""

    with players(1, 10) as (player, group, _, _, _):
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        for life in range(3):
            while len(group.every) == life or not group.every[life].tasks:
                await asyncio.sleep(0.05)
            group.every[life].die()
        assert (await playing).status is Status.COMPLETED


def test_what_a_worker_has_not_heard_of_is_not_what_it_died_of() -> None:
    line = WorkerLink(0, None)
    line.ready = True

    async def deaths() -> list[bool]:
        answers: list[Answer] = [asyncio.Future() for _ in range(2)]
        line.waiting = dict(enumerate(answers))
        line.jobs = [TrajectoryJob(0, PROMPT, 0, "", False)]
        line.report_crash("it died")
        lost: list[Any] = [answer.exception() for answer in answers]
        return [one.received for one in lost]

    assert asyncio.run(deaths()) == [False, True]
