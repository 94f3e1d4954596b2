"""Trajectories that crash their worker every time, among harmless ones, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.rollout import crash_isolation
from skyrl_mega.rollout.crash_isolation import PROBES_PER_RESTART, may_run
from skyrl_mega.rollout.worker_client import PendingRollout, WorkerLink
from skyrl_mega.rollout.worker_messages import Job
from skyrl_mega.simulation.virtual_time import VirtualLoop
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.mortal_workers import PROMPT, player_of


@pytest.mark.parametrize("guilty", [[13], [13, 14], [*range(8, 16)]], ids=["one", "two", "eight"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_those_that_end_their_process_every_time_fail_and_no_other_does(count: int, guilty: list[int]) -> None:
    """Crashes workers with several such trajectories at once: only these fail, although harmless ones run in the same
    workers. Isolation costs no restart in the end."""

    async def phase() -> None:
        player, group, workers, _, lines = player_of(count, 10, seed=count)
        group.dies_of = {*guilty}
        for worker in group.actors:
            worker.dies_of = {*guilty}
        played = await asyncio.gather(*(player.play(PROMPT, i, f"name {i}") for i in range(60)))
        assert [t.sample for t in played if t.status is Status.ERROR_INFRASTRUCTURE] == guilty
        assert all(t.status is Status.COMPLETED for t in played if t.sample not in guilty)
        errors = [played[i].metadata["error"] for i in guilty]
        assert all("while it ran alone; last error: its process died" in error for error in errors)
        assert sum(" 3 of them while it ran alone" in error for error in errors) >= 1, (
            "the first one; then two are enough"
        )
        assert played[13].remote_arrays.ref.good, "the others go on"
        assert workers.restarts == 10 - sum(" crashed: " in line for line in lines) // PROBES_PER_RESTART, (
            "all is explained"
        )
        assert sum(" failed: environment  crashed " in line for line in lines) == len(guilty)
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


@pytest.mark.parametrize("processes", [3, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_where_workers_die_of_nothing_that_they_play_nothing_fails(seed: int, processes: int) -> None:
    """Kills workers at random, every two minutes per worker; a trajectory takes 20 s."""
    chance, deaths = Random(seed), 0

    async def phase() -> None:
        nonlocal deaths
        player, group, workers, _, _ = player_of(processes, 1000, seed)
        group.lasts_s = 10.0, 30.0
        for worker in group.actors:
            worker.lasts_s = group.lasts_s
        slots = asyncio.Semaphore(4 * processes)

        async def play(sample: int) -> Trajectory:
            async with slots:
                return await player.play(PROMPT, sample, str(sample))

        playing = [asyncio.create_task(play(i)) for i in range(100 * processes)]
        while not all(task.done() for task in playing):
            await asyncio.sleep(chance.expovariate(processes / 120))
            if up := workers.up():
                chance.choice([*up.values()]).die()
                deaths += 1
        assert all(t.status is Status.COMPLETED for t in await asyncio.gather(*playing))
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())
    assert deaths > 2 * processes


def test_another_of_a_prompt_that_ends_its_process_is_alone_from_the_start() -> None:
    async def phase() -> None:
        player, group, workers, _, _ = player_of(2, 10)
        group.dies_of = {*range(8)}
        for worker in group.actors:
            worker.dies_of = group.dies_of
        first = await player.play(PROMPT, 0, "first")
        left = workers.restarts
        others = [asyncio.create_task(player.play(replace(PROMPT, uid=1), 60 + i, str(i))) for i in range(20)]
        second = await player.play(PROMPT, 1, "second")
        assert [first.status, second.status] == [Status.ERROR_INFRASTRUCTURE] * 2
        assert workers.restarts == left, "it took no other along"
        assert all(t.status is Status.COMPLETED for t in await asyncio.gather(*others))
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_what_a_worker_plays_for_somebody_else_counts_too() -> None:
    """Places trajectories of another session (such as an evaluation) on the same workers."""

    async def phase() -> None:
        _, group, workers, _, _ = player_of(2, 10)
        (first, second), up = group.actors, workers.up()
        assert [workers.place(up, name, 2) for name in ("mine", "another's")] == [0, 1]
        assert workers.place(up, "no suspect", 0) is None
        workers.finished(second, 2)
        assert workers.place(up, "no suspect", 0) == 1
        assert workers.place({0: first}, "another's", 2) == 0
        loss = workers.crashed(0, first, "it died", received=True)
        workers.finished(first, 2)  # the first caller of `crashed` removes its own trajectory
        assert loss is not None and loss.crash_counts == [2, 2], "none was alone"
        assert workers.crashed(0, first, "it died", received=True) is loss
        assert workers.place({1: second}, "apart", 2) is None
        assert workers.place({1: second}, "no other", 0) is None, "it is kept for the one that waits"
        workers.cancel_wait("apart")
        assert workers.place({1: second}, "no other", 0) == 1
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


@pytest.mark.parametrize("restarts", [0, 1])
def test_while_any_is_suspected_restarts_are_lent(restarts: int) -> None:
    """Restarts workers outside the restart budget while suspects exist, except with `restarts` 0."""

    async def phase() -> None:
        player, group, workers, _, lines = player_of(4, restarts)
        group.dies_of = {*range(4)}
        for worker in group.actors:
            worker.dies_of = group.dies_of
        asked = (player.play(replace(PROMPT, uid=i), i, str(i)) for i in range(40))
        ended = await asyncio.gather(*asked, return_exceptions=True)
        lent = [line for line in lines if "outside the restart budget" in line]
        if restarts:
            failed = [t.sample for t in ended if isinstance(t, Trajectory) and t.status.failed]
            assert lent and failed == [*range(4)] and not [t for t in ended if isinstance(t, BaseException)]
        else:
            assert any(isinstance(t, ActorFailed) for t in ended) and len(group.every) == 4, "nobody is started again"
            assert not lent
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_starts_that_fail_are_tried_again() -> None:
    """Repeats failed starts, as often as restarts are left."""

    async def phase() -> None:
        player, group, workers, _, lines = player_of(2, 10)
        group.dies_of, group.starts_fail = {3}, 2
        for worker in group.actors:
            worker.dies_of = group.dies_of
        played = await asyncio.gather(*(player.play(replace(PROMPT, uid=i), i, str(i)) for i in range(20)))
        assert [t.sample for t in played if t.status.failed] == [3]
        assert sum("it did not start" in line for line in lines) == 2
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_others_of_its_prompt_that_wait_already_are_alone_too() -> None:
    """Isolates waiting trajectories of a crashing prompt, but not a prompt of another data set with the same uid."""

    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 10)
        (worker,) = group.actors
        asked = [asyncio.create_task(player.play(PROMPT, i, f"waits {i}")) for i in range(2)]
        assert workers.place({0: worker}, "suspect", 2) == 0
        await asyncio.sleep(1)
        assert not worker.tasks, "there is no place beside a suspect"
        workers.crashing_prompts[PROMPT.uid] = {crash_isolation.prompt_hash(PROMPT)}
        workers.finished(worker, 2)
        await asyncio.sleep(0.8)
        assert len(worker.tasks) == 1
        assert not workers.is_crashing(replace(PROMPT, messages=[{"role": "user", "content": "another"}]))
        assert [t.status for t in await asyncio.gather(*asked)] == [Status.COMPLETED] * 2
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_alone_by_chance_is_no_suspect() -> None:
    """Crashes a worker under a trajectory running alone by chance, such as the last of a phase."""

    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 10)
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        for life in range(3):
            while len(group.every) == life or not group.every[life].tasks:
                await asyncio.sleep(0.05)
            group.every[life].die()
        assert (await playing).status is Status.COMPLETED
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_what_a_worker_has_not_heard_of_is_not_what_it_died_of() -> None:
    line = WorkerLink(0, None)
    line.ready = True

    async def deaths() -> list[tuple[bool, bool]]:
        answers: list[asyncio.Future[Trajectory | None]] = [asyncio.Future() for _ in range(2)]
        line.waiting = {key: PendingRollout(answer, 0) for key, answer in enumerate(answers)}
        line.jobs = [Job(0, PROMPT, 0, "", False)]
        line.report_crash("it died", solo=True)
        lost: list[Any] = [answer.exception() for answer in answers]
        return [(one.crash.received, one.crash.solo) for one in lost]

    assert asyncio.run(deaths()) == [(False, False), (True, True)]


def test_who_may_share_a_worker() -> None:
    open_to = partial(may_run, reserved=False)
    assert open_to(0, [1, 1, 0]) and open_to(1, []) and not open_to(0, [2]) and not open_to(1, [0, 3])
    assert not may_run(0, [], reserved=True) and may_run(2, [], reserved=True)
    assert open_to(2, [2] * 31) and not open_to(2, [2] * 32) and not open_to(2, [2, 0])
    assert open_to(3, [2] * 5) and not open_to(2, [3] * 6) and not open_to(2, [4]) and not open_to(9, [2])
