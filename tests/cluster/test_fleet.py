"""Failing and restarting actors: availability during the restart, and the end of the old processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.calls import gather
from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet, NoServingActor
from skyrl_mega.cluster.group import ActorGroup, ActorSpec
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.cluster.supervised_group import State, SupervisedGroup
from skyrl_mega.common.errors import UserError
from skyrl_mega.telemetry.events import Event


class Server:
    """An actor that answers after its start; a file named by its number in the folder `trouble` prevents this."""

    def __init__(self, number: int, trouble: str) -> None:
        self.number, self.trouble = number, Path(trouble)
        self.started = False
        self.cleared = 0
        self.asleep: set[str] = set()

    def begun(self) -> bool:
        return self.started

    def empty_cache(self) -> None:
        self.cleared += 1

    def gave(self) -> int:
        return self.cleared

    def start(self, facts: int | None = None) -> int:
        if (self.trouble / str(self.number)).exists():
            raise RuntimeError(f"no memory for {self.number}")
        self.started = True
        self.facts = facts
        return 10 + self.number

    def given(self) -> int | None:
        return self.facts

    def answer(self) -> int:
        assert self.started
        return self.number

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def drain(self) -> None:
        """Returns after the calls before it, like an engine without requests."""

    def sleep(self, parts: list[str]) -> None:
        assert self.started
        self.asleep |= {*parts}

    def wake(self, parts: list[str]) -> None:
        assert self.started
        self.asleep -= {*parts}

    def sleeps(self) -> set[str]:
        return self.asleep


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=8):
        yield


@pytest.fixture
def fleet(ray: None, tmp_path: Path) -> Iterator[Fleet]:
    arguments = [{"number": rank, "trouble": str(tmp_path)} for rank in range(2)]
    group = ActorGroup.spawn("server", Server, arguments, timeout=120, logs=tmp_path / "logs")
    facts = group.call_all("start", timeout=120)
    messages: list[str] = []
    fleet = Fleet(group, restarts=3, start_timeout_s=180, say=messages.append, facts=facts)
    yield fleet
    fleet.close()
    group.shutdown()


def joining(number: int, tmp_path: Path) -> ActorSpec:
    """Returns an actor that joins."""
    return ActorSpec(Server, {"number": number, "trouble": str(tmp_path)})


def reached(fleet: Fleet, rank: int, state: State, seconds: float = 180) -> None:
    """Waits until a rank has a state."""
    deadline = time.monotonic() + seconds
    while fleet.states[rank] is not state:
        fleet.running()
        assert time.monotonic() < deadline, fleet.states
        time.sleep(0.05)


def back(fleet: Fleet, rank: int, seconds: float = 180) -> None:
    """Waits until an actor is up again."""
    deadline = time.monotonic() + seconds
    while rank not in fleet.ensure_running():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_group_that_all_actors_have_left_says_what_to_do() -> None:
    group = SupervisedGroup(MagicMock(), restarts=0, start_timeout_s=1)
    group.group.name = "engine"
    group.states = [State.GONE]
    with pytest.raises(ActorFailed, match="every engine has left the group; resume the run"):
        group.running()


def test_nobody_is_asked_before_being_brought_up_to_date(fleet: Fleet) -> None:
    assert fleet.ensure_running() == [0, 1]
    assert fleet.serving == []
    with pytest.raises(NoServingActor):
        fleet.ask("answer", timeout=120)
    fleet.serve([0, 1])
    fleet.ask("answer", timeout=120)
    fleet.serve([1])
    assert fleet.serving == [1]


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_fails_is_replaced_and_stays_stale(fleet: Fleet, what: signal.Signals) -> None:
    fleet.serve([0, 1])
    old = fleet.group.where[1].pid
    os.kill(old, what)
    fleet.ask("answer", timeout=120 if what is signal.SIGKILL else 20)  # a stopped one answers never
    assert fleet.serving == [0]
    back(fleet, 1)
    assert fleet.group.where[1].pid != old
    assert not reaper.members(old)
    assert fleet.serving == [0]
    fleet.serve(fleet.ensure_running())
    fleet.ask("answer", timeout=120)
    assert fleet.serving == [0, 1]


def test_one_that_is_started_again_is_given_what_the_first_found_and_room(fleet: Fleet) -> None:
    """Restarts an actor: room is made after the end of the old process and before the start of the new process."""
    fleet.serve([0, 1])
    old = fleet.group.where[1].pid
    asked: list[tuple[int, bool, bool]] = []

    @contextmanager
    def room(rank: int) -> Iterator[None]:
        for _ in range(2):
            started = fleet.group.call_one(rank, "begun", timeout=120)
            asked.append((rank, bool(reaper.members(old)), started))
            if not started:
                yield

    fleet.make_room = room
    fleet.retire(1, "a reason")
    back(fleet, 1)
    assert asked == [(1, False, False), (1, False, True)]
    assert fleet.group.call_all("given", timeout=120) == [None, 11]


def test_policy_ranks_on_an_engines_gpus_give_memory_back(fleet: Fleet) -> None:
    """Frees memory of the policy ranks on an engine's GPUs, and waits for a busy rank only up to the timeout.

    Engine 1 with one worker uses rank 1, engine 0 with two workers uses ranks 0 and 1.
    """
    from skyrl_mega.trainer.start_actors import release_policy_cache  # actors import this module: torch costs 2 s

    group, messages = fleet.group, []
    with release_policy_cache(group, 1, 60.0, messages.append, engine=1):
        pass
    assert group.call_all("gave", timeout=120) == [0, 1]
    busy = group.submit(0, "pause", 9.0)
    with release_policy_cache(group, 2, 3.0, messages.append, engine=0):
        pass
    gather([busy], 120)
    assert messages == ["server-0 freed no GPU memory within 3 s; engine-0 restarts and may lack memory"]
    assert group.call_all("gave", timeout=120) == [1, 2]


def test_one_that_cannot_start_uses_up_the_restarts_and_is_the_cause(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "1").touch()
    fleet.serve([0, 1])
    fleet.retire(1, "a reason")
    with pytest.raises(ActorFailed) as raised:
        back(fleet, 1)
    assert raised.value.cause == "start: RuntimeError: no memory for 1", "no sentence about another failure"


def test_one_that_fails_in_its_start_is_ended_before_its_room_is_taken_back(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "1").touch()
    left: list[bool] = []

    @contextmanager
    def room(rank: int) -> Iterator[None]:
        try:
            yield
        finally:
            left.append(bool(reaper.members(fleet.group.where[rank].pid)))

    fleet.make_room = room
    fleet.serve([0, 1])
    fleet.retire(1, "a reason")
    with pytest.raises(ActorFailed, match="no memory for 1"):
        back(fleet, 1)
    assert left and not any(left)


def test_who_fails_to_make_room_is_the_cause_and_costs_no_restart(fleet: Fleet) -> None:
    @contextmanager
    def room(rank: int) -> Iterator[None]:
        raise ActorFailed("policy", 0, "offload", "out of memory")
        yield

    fleet.make_room = room
    fleet.serve([0, 1])
    fleet.retire(1, "a reason")
    for _ in range(2):  # not brought up to date since the restart
        with pytest.raises(ActorFailed, match="policy-0"):
            back(fleet, 1)
        assert fleet.up == [0]
    assert fleet.restarts == 2


def test_where_none_is_up_its_return_is_waited_for(fleet: Fleet) -> None:
    fleet.serve([0, 1])
    for rank in (0, 1):
        os.kill(fleet.group.where[rank].pid, signal.SIGKILL)
    with pytest.raises(NoServingActor, match="died"):
        fleet.ask("answer", timeout=120)
    assert fleet.ensure_running()
    assert fleet.serving == []


def test_after_the_end_nothing_is_started(fleet: Fleet) -> None:
    fleet.serve([0, 1])
    fleet.retire(0, "a reason")
    fleet.close()
    fleet.group.shutdown()
    time.sleep(1)
    assert not any(reaper.members(w.pid) for w in fleet.group.where)


def test_nobody_is_asked_while_parts_are_asleep(fleet: Fleet) -> None:
    fleet.serve([0, 1])
    fleet.sleep(["kv_cache"])
    assert fleet.serving == []
    with pytest.raises(NoServingActor, match="asleep: kv_cache"):
        fleet.ask("answer", timeout=120)
    fleet.sleep(["kv_cache", "engine_weights"])
    assert fleet.group.call_all("sleeps", timeout=120) == [{"kv_cache", "engine_weights"}] * 2
    fleet.wake(["kv_cache"])
    assert fleet.group.call_all("sleeps", timeout=120) == [{"engine_weights"}] * 2
    fleet.wake(["engine_weights"])
    assert fleet.serving == [], "weights that were dropped are not up to date"
    fleet.serve([0, 1])
    fleet.sleep(["kv_cache"])
    fleet.wake(["kv_cache"])
    assert fleet.serving == [0, 1]


def test_one_that_fails_asleep_starts_when_all_parts_are_awake(fleet: Fleet) -> None:
    """Kills a sleeping actor: its process ends at once because its memory belongs to another process, and the restart
    waits until all parts are awake.
    """
    fleet.serve([0, 1])
    fleet.sleep(["kv_cache", "engine_weights"])
    old = fleet.group.where[1].pid
    os.kill(old, signal.SIGKILL)
    fleet.wake(["engine_weights"])
    deadline = time.monotonic() + 120
    while fleet.group.where[1].pid == old:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not reaper.members(old)
    fleet.serve(fleet.ensure_running())
    fleet.sleep(["engine_weights"])
    time.sleep(1)
    assert fleet.ensure_running() == [0]
    fleet.wake(["engine_weights"])
    assert fleet.ensure_running() == [0]
    fleet.wake(["kv_cache"])
    back(fleet, 1)
    assert fleet.group.call_all("sleeps", timeout=120) == [set(), set()]


def test_one_that_is_being_started_is_up_before_the_others_sleep(fleet: Fleet) -> None:
    fleet.serve([0, 1])
    fleet.retire(1, "a reason")
    fleet.sleep(["kv_cache"])
    assert fleet.ensure_running() == [0, 1]
    assert fleet.group.call_all("sleeps", timeout=120) == [{"kv_cache"}] * 2


def test_where_all_have_failed_asleep_room_is_made_and_what_slept_sleeps_again(fleet: Fleet) -> None:
    fleet.serve([0, 1])
    fleet.sleep(["kv_cache", "engine_weights"])
    inside: list[tuple[int, set[str]]] = []

    @contextmanager
    def room(rank: int) -> Iterator[None]:
        yield
        inside.append((rank, fleet.group.call_one(rank, "sleeps", timeout=120)))

    fleet.make_room = room
    for where in fleet.group.where:
        os.kill(where.pid, signal.SIGKILL)
    fleet.wake(["engine_weights"])
    assert inside == []
    assert fleet.ensure_running() == [0, 1], "none may start later, when the room is taken"
    assert sorted(inside) == [(0, {"kv_cache"}), (1, {"kv_cache"})]


def test_an_actor_joins_serves_and_leaves_after_its_calls(fleet: Fleet, tmp_path: Path) -> None:
    events: list[Event] = []
    fleet.say = events.append  # type: ignore[assignment]
    fleet.serve([0, 1])
    assert fleet.add(joining(2, tmp_path)) == 2
    assert fleet.running().keys() == {0, 1}, "a start delays nobody"
    reached(fleet, 2, State.UP)
    assert fleet.facts == [10, 11, 12] and fleet.serving == [0, 1], "stale until the next sync"
    fleet.serve(fleet.ensure_running())
    assert fleet.serving == [0, 1, 2]
    busy = fleet.group.submit(2, "pause", 2.0)
    pid = fleet.group.where[2].pid
    fleet.leave(2, "no longer needed", 60.0)
    fleet.leave(2, "said twice", 60.0)
    assert fleet.serving == [0, 1] and fleet.left == [2]
    assert gather([busy], 60) == [None], "its calls finish"
    reached(fleet, 2, State.GONE)
    assert not reaper.members(pid)
    fleet.retire(2, "found dead by a router that did not know")
    assert fleet.restarts == fleet.joined_restarts == 3
    assert [(event.kind, event.facts["rank"]) for event in events] == [("engine_joined", 2), ("engine_left", 2)]
    fleet.leave(0, "an actor of the start may leave too", 60.0)
    with pytest.raises(UserError, match="no other engine runs"):
        fleet.leave(1, "the last one", 60.0)
    assert fleet.add(joining(3, tmp_path)) == 3, "a rank is never used again"
    reached(fleet, 3, State.UP)
    for rank in (1, 3):
        fleet.leave(rank, "its node left the cluster", 0.0)
    with pytest.raises(ActorFailed, match="its node left the cluster"):
        fleet.ensure_running()


def test_several_actors_leave_only_if_another_one_stays() -> None:
    fleet = Fleet.__new__(Fleet)
    fleet._lock = threading.RLock()
    fleet.states = [State.UP, State.STARTING, State.JOINING, State.GONE]
    fleet.check_leave([0, 2, 3])
    fleet.check_leave([3])
    with pytest.raises(UserError, match=r"engine = 9: allowed is one of \[0, 1, 2\]"):
        fleet.check_leave([0, 9])
    with pytest.raises(UserError, match="no other engine runs"):
        fleet.check_leave([0, 1])


def test_a_joined_actor_that_fails_never_ends_the_run(fleet: Fleet, tmp_path: Path) -> None:
    events: list[Event] = []
    fleet.say = events.append  # type: ignore[assignment]
    fleet.serve([0, 1])
    (tmp_path / "2").touch()
    fleet.add(joining(2, tmp_path))
    reached(fleet, 2, State.GONE)
    fleet.add(joining(3, tmp_path))
    reached(fleet, 3, State.UP)
    fleet.retire(3, "failed in its first sync")
    reached(fleet, 3, State.GONE)
    fleet.joined_restarts = 1
    fleet.add(joining(4, tmp_path))
    reached(fleet, 4, State.UP)
    fleet.serve([0, 1, 4])
    for expected in (State.UP, State.GONE):
        fleet.retire(4, "killed")
        reached(fleet, 4, expected)
    assert fleet.restarts == 3 and fleet.ensure_running() == [0, 1] == fleet.serving
    kinds = ["engine_not_joined", "engine_joined", "engine_left", "engine_joined", "actor_lost", "actor_back"]
    assert [event.kind for event in events] == [*kinds, "engine_left"]
    assert "no memory for 2" in events[0]


def test_unfinished_calls_of_a_leaving_actor_fail_after_the_grace(fleet: Fleet, tmp_path: Path) -> None:
    fleet.serve([0, 1])
    busy = fleet.group.submit(1, "pause", 600.0)
    fleet.leave(1, "its node ends soon", 0.5)
    with pytest.raises(ActorFailed, match="its process died"):
        gather([busy], 60)
    reached(fleet, 1, State.GONE)
    assert fleet.restarts == 3
