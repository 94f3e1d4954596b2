"""Trajectories that end their process every time, beside others that do not, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from skyrl_mega.rollout.orders import Order
from skyrl_mega.rollout.player_elsewhere import Line, Waiting
from skyrl_mega.rollout.suspects import admitted
from skyrl_mega.rollout.trajectory import Status, Trajectory
from skyrl_mega.simulation.virtual_time import VirtualLoop
from tests.support.mortal_workers import PROMPT, player_of


@pytest.mark.parametrize("guilty", [[13], [13, 14], [*range(8, 16)]], ids=["one", "two", "eight"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_those_that_end_their_process_every_time_fail_and_no_other_does(count: int, guilty: list[int]) -> None:
    """However many they take along, and though they end one another's. Finding out costs no restart in the end."""

    async def phase() -> None:
        player, group, workers, _, said = player_of(count, 10, seed=count)
        group.dies_of = {*guilty}
        for worker in group.actors:
            worker.dies_of = {*guilty}
        played = await asyncio.gather(*(player.play(PROMPT, i, f"name {i}") for i in range(60)))
        assert [t.sample for t in played if t.status is Status.ERROR_INFRASTRUCTURE] == guilty
        assert all(t.status is Status.COMPLETED for t in played if t.sample not in guilty)
        assert "the last 2 with nothing else, the last one: its process died" in played[13].metadata["error"]
        assert played[13].away.ref.good and workers.restarts > 0, "the others go on"
        assert sum(" has failed: environment : " in line for line in said) == len(guilty)
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


@pytest.mark.parametrize("seed", range(6))
def test_where_workers_die_of_nothing_that_they_play_nothing_fails(seed: int) -> None:
    chance = Random(seed)

    async def phase() -> None:
        player, _, workers, _, _ = player_of(3, 60, seed)
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(120)]
        while not all(task.done() for task in playing):
            await asyncio.sleep(chance.uniform(0.5, 6))
            if (up := workers.up()) and chance.random() < 0.8:
                chance.choice([*up.values()]).die()
        failed = [t.sample for t in await asyncio.gather(*playing) if t.status is not Status.COMPLETED]
        assert not failed
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


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


def test_a_worker_that_plays_for_somebody_else_too_proves_nothing() -> None:
    """As for an evaluation, whose trajectories another session has."""

    async def phase() -> None:
        player, group, workers, _, _ = player_of(1, 10)
        (worker,) = group.actors
        workers.opened(worker, 1)
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.5)
        for _ in range(4):
            (actor,) = group.actors
            workers.opened(actor, 1)
            actor.die()
            await asyncio.sleep(4)
        assert (await playing).status is Status.COMPLETED
        player.close()
        workers.close()

    with VirtualLoop() as loop:
        loop.run(phase())


def test_what_a_worker_has_not_heard_of_is_not_what_it_died_of() -> None:
    line = Line(0, None)
    line.begun = True

    async def deaths() -> list[tuple[bool, bool]]:
        answers: list[asyncio.Future[Trajectory | None]] = [asyncio.Future() for _ in range(2)]
        line.waiting = {key: Waiting(answer, 0) for key, answer in enumerate(answers)}
        line.orders = [Order(0, PROMPT, 0, "", False)]
        line.lose("it died", alone=True)
        lost: list[Any] = [answer.exception() for answer in answers]
        return [(one.death.counts, one.death.alone) for one in lost]

    assert asyncio.run(deaths()) == [(False, False), (True, True)]


def test_who_may_share_a_worker() -> None:
    open_to = partial(admitted, reserved=False)
    assert open_to(0, [1, 1, 0]) and open_to(1, []) and not open_to(0, [2]) and not open_to(1, [0, 3])
    assert not admitted(0, [], reserved=True) and admitted(2, [], reserved=True)
    assert open_to(2, [2] * 31) and not open_to(2, [2] * 32) and not open_to(2, [2, 0])
    assert open_to(3, [2] * 5) and not open_to(2, [3] * 6) and not open_to(2, [4]) and not open_to(9, [2])
