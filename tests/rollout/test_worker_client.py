"""Rollout workers crashing at any moment, in virtual time: each requested trajectory is played exactly once."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
import ray.exceptions

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.engines.base import Facts
from skyrl_mega.rollout.slots import SlotPlayer, Slots
from skyrl_mega.rollout.workers.messages import EngineAwaitsSync, EngineDead, RolloutFailed
from skyrl_mega.telemetry.events import Event
from skyrl_mega.telemetry.timeline import ActivityReport, Timeline
from tests.support.mortal_workers import PROMPT, in_virtual_time, players


@pytest.mark.parametrize("seed", range(10))
@in_virtual_time
async def test_nothing_is_lost_and_nothing_is_doubled(seed: int) -> None:
    chance, slots = Random(seed), Slots(8)

    with players(3, 12, seed) as (player, group, workers, _, lines):
        agent = SlotPlayer(player, slots)
        playing = [asyncio.create_task(agent.play(PROMPT, i, f"name {i}")) for i in range(150)]
        for _ in range(12):
            await asyncio.sleep(chance.uniform(0.1, 3))
            if up := workers.running():
                chance.choice([*up.values()]).die()
        played = await asyncio.gather(*playing)
        assert [t.sample for t in played] == [*range(150)]
        assert all(t.remote_arrays.ref.good for t in played), "none leads to what died with its worker"
        assert all(t.prompt is PROMPT for t in played)
        names = Counter(name for worker in group.every for name in worker.names)
        assert set(names) == {f"name {i}" for i in range(150)}, "the same names, however often"
        assert sum(names.values()) > 150, "some were played again"
        assert any("is out of service: its process died" in line and "Restarting it" in line for line in lines)
    assert slots.use.most == 8


@pytest.mark.parametrize("seed", range(3))
@in_virtual_time
async def test_a_group_comes_whole_and_once(seed: int) -> None:
    chance = Random(seed)

    with players(3, 12, seed) as (player, group, workers, _, _):
        names = [[f"group {i}/{s}" for s in range(3)] for i in range(40)]
        playing = [asyncio.create_task(player.play_group(PROMPT, given)) for given in names]
        abandoned = asyncio.create_task(player.play_group(PROMPT, ["x/0", "x/1"]))
        await asyncio.sleep(0.5)
        abandoned.cancel()
        for _ in range(6):
            await asyncio.sleep(chance.uniform(0.1, 2))
            if up := workers.running():
                chance.choice([*up.values()]).die()
        played = await asyncio.gather(*playing)
        assert [[t.sample for t in group] for group in played] == [[0, 1, 2]] * 40
        assert all(t.remote_arrays.ref.good and t.prompt is PROMPT for group in played for t in group)
        assert {name for worker in group.every for name in worker.names} >= {name for given in names for name in given}
        assert all(not link.waiting for link in player.links.values()) and abandoned.cancelled()


@in_virtual_time
async def test_others_go_on_without_one_that_stays_away_and_the_last_one_ends_the_run() -> None:
    with players(2, 0) as (player, group, _, _, lines):
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(20)]
        await asyncio.sleep(0.5)
        group.actors[0].die()
        assert len(await asyncio.gather(*playing)) == 20
        assert "No restart is left (rollout.restarts)" in lines[-1]
        assert isinstance(lines[-1], Event) and lines[-1].kind == "actor_given_up"
        group.actors[1].die()
        with pytest.raises(ActorFailed, match=r"rollout-1 .*its process died .*rollout-1\.log"):
            await player.play(PROMPT, 0, "0")


@in_virtual_time
async def test_a_failed_restart_gives_its_own_cause() -> None:
    with players(1, 1) as (player, group, _, _, lines):
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.5)
        group.starts_fail = 1
        group.actors[0].die()
        with pytest.raises(ActorFailed) as raised:
            await playing
        assert raised.value.cause == "construct: it did not start"
        whole = "rollout-0 (rank 0) failed in service: construct: it did not start; its log: rollout-0.log"
        assert str(raised.value) == whole
        assert lines[-1].startswith("rollout-0 is out of service: construct: it did not start. ")


@pytest.mark.parametrize("defect", [False, True], ids=["given up", "a defect"])
@in_virtual_time
async def test_an_error_of_many_trajectories_has_the_frames_of_one(
    defect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with players(1, 0) as (player, group, _, _, _):
        if defect:
            monkeypatch.setattr(player, "_handle", lambda link, event: 1 / 0)
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(50)]
        await asyncio.sleep(0.5)
        if not defect:
            group.actors[0].die()
        outcomes = await asyncio.gather(*playing, return_exceptions=True)
        outcomes += await asyncio.gather(*(player.play(PROMPT, i, str(i)) for i in range(50)), return_exceptions=True)
        assert len(outcomes) == 100
        for outcome in outcomes:
            assert isinstance(outcome, ActorFailed)
            assert len(traceback.extract_tb(outcome.__traceback__)) < 20


@in_virtual_time
async def test_one_that_is_abandoned_is_over_when_its_environment_is_closed() -> None:
    with players(1, 0) as (player, group, _, _, _):
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.5)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert all(task.done() for task in group.actors[0].tasks.values())
        player.close()
        await asyncio.sleep(0.1)
        assert group.actors[0].ended == 1


@in_virtual_time
async def test_what_workers_find_of_engines_reaches_the_driver() -> None:
    """Sends events of workers about engines to the driver: shares of the cache, a dead engine, an engine awaiting a
    sync, and no engine left."""

    with players(2, 0) as (player, group, _, engines, _):
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.5)
        worker = group.actors[0]
        assert worker.engines[0].facts == [Facts(cache_tokens=500, cache_bytes=1), None]
        worker.said.put_nowait(EngineDead(0, "one that was there before", "died"))
        worker.said.put_nowait(EngineAwaitsSync(0, -1))  # from before a sync
        worker.said.put_nowait(EngineAwaitsSync(1, 0))
        await asyncio.sleep(0.1)
        assert (engines.serving, player.awaiting_sync) == ([0, 1], {1})
        worker.said.put_nowait(EngineDead(0, "e0", "died"))
        await asyncio.sleep(0.1)
        assert engines.serving == [1]
        player.rejoin()
        await asyncio.sleep(0.1)
        assert (worker.engines[-1].serving, worker.engines[-1].syncs, player.awaiting_sync) == ([1], 1, set())
        await playing
        failing = asyncio.create_task(player.play(PROMPT, 1, "1"))
        await asyncio.sleep(0.1)
        engines.serving = []
        key = max(worker.tasks, default=-1) if worker.names[-1] == "1" else max(group.actors[1].tasks)
        of = worker if worker.names[-1] == "1" else group.actors[1]
        of.said.put_nowait(RolloutFailed(key, NoServingActor("engine", None, "service", "none is left")))
        with pytest.raises(NoServingActor, match="all are dead"):
            await failing
        engines.serving = [1]
        ending = asyncio.create_task(player.play(PROMPT, 2, "2"))
        await asyncio.sleep(0.1)
        worker.said.put_nowait(EngineDead(1, "e1", "died too"))
        with pytest.raises(ActorFailed, match="died too"):
            await ending


@in_virtual_time
async def test_a_defect_of_ours_is_told_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(line: object, news: object) -> None:
        raise KeyError("a defect")

    with players(2, 0) as (player, _, _, _, _):
        monkeypatch.setattr(player, "_handle", hear)
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(6)]
        for outcome in await asyncio.gather(*playing, return_exceptions=True):
            assert isinstance(outcome, ActorFailed) and "a defect" in str(outcome)


@in_virtual_time
async def test_a_loop_that_ends_waits_until_environments_are_closed() -> None:
    """Cancels all tasks at once, as at the end of a service's loop."""
    closed: list[int] = []

    with players(1, 0) as (player, group, _, _, _):

        async def end(session: str) -> ActivityReport:
            await asyncio.sleep(5)
            closed.append(len(group.actors[0].tasks))
            return Timeline().take()

        group.actors[0].end = SimpleNamespace(remote=group.actors[0]._called(end))
        playing = [asyncio.create_task(player.play(PROMPT, i, str(i))) for i in range(3)]
        await asyncio.sleep(0.5)
        left = [task for task in asyncio.all_tasks() if task in {*playing, player.links[0].listening}]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert closed == [3]


@in_virtual_time
async def test_what_is_abandoned_before_a_worker_has_begun_waits_for_nobody() -> None:
    with players(1, 0) as (player, group, _, _, _):
        group.actors[0].begin = SimpleNamespace(remote=lambda *_: asyncio.ensure_future(asyncio.sleep(30)))
        playing = asyncio.create_task(player.play(PROMPT, 0, "0"))
        await asyncio.sleep(0.1)
        now = asyncio.get_running_loop().time
        start = now()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert now() - start < 1


@in_virtual_time
async def test_orders_that_a_worker_cannot_read_end_the_run() -> None:
    async def refuse(*_: object) -> None:
        raise ray.exceptions.RayTaskError("play", "it does not unpickle", ValueError("it does not unpickle"))

    with players(1, 0) as (player, group, _, _, _):
        group.actors[0].play = SimpleNamespace(remote=lambda *of: asyncio.ensure_future(refuse(*of)))
        with pytest.raises(ActorFailed, match="it does not unpickle"):
            await player.play(PROMPT, 0, "0")
