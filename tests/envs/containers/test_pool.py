"""The limit of containers at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.containers import pool as pools
from skyrl_mega.envs.containers import removal
from skyrl_mega.envs.containers.pool import ContainerPool, TurnQueue
from skyrl_mega.envs.containers.registry import make_pool
from skyrl_mega.envs.event_loop import Pending
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.waiting import Clock


class Box:
    """A container that counts its removals."""

    removed = 0

    def run(self, *arguments: Any, **options: Any) -> Any:
        return arguments, options

    def end_processes(self, timeout_s: float) -> None:
        return None

    def remove(self, timeout_s: float) -> None:
        self.removed += 1
        if timeout_s < 0:
            raise InfrastructureFault("no")


class Boxes:
    """A runtime of `Box`; the image `bad` does not start."""

    def pull(self, image: str, timeout_s: float) -> None:
        return None

    def start(self, image: str, timeout_s: float) -> Box:
        if image == "bad":
            raise InfrastructureFault("bad")
        return Box()


def pool_of(limit: int, name: str) -> ContainerPool:
    return ContainerPool(Boxes(), name, limit, 60, 60)  # type: ignore[arg-type]


def waiters(slots: TurnQueue, number: int) -> None:
    """Waits until this many threads wait for a place."""
    while len(slots._queue) < number:
        time.sleep(0.01)


def test_threads_get_places_in_the_order_of_their_requests() -> None:
    slots, order = TurnQueue(1), []
    slots.take(60)

    def work(number: int) -> None:
        slots.take(60)
        order.append(number)
        slots.give_back()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for number, thread in enumerate(threads):
        thread.start()
        waiters(slots, number + 1)
    slots.give_back()
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4]


def test_no_more_than_the_limit_run_at_once_and_none_waits_for_ever() -> None:
    pool, lock, now, most = pool_of(3, "limit"), threading.Lock(), [0], [0]

    def work() -> None:
        for images in (["good", "good", "good"], ["bad", "good"], ["good", "bad"]):
            place = pool.place()
            for image in images:
                try:
                    box = place.start(image, 1)
                except InfrastructureFault:
                    continue
                with lock:
                    now[0] += 1
                    most[0] = max(most[0], now[0])
                time.sleep(0.002)
                with lock:
                    now[0] -= 1
                place.remove(box)
            place.close()
            place.close()  # a second close frees no second place

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and most[0] == 3


def test_a_trajectory_keeps_its_place_between_its_containers() -> None:
    pool = pool_of(1, "kept")
    place = pool.place()
    place.remove(place.start("good", 1))
    other = threading.Thread(target=pool.slots.take, args=(60,))
    other.start()
    waiters(pool.slots, 1)
    place.remove(place.start("good", 1))  # although another trajectory waits
    assert other.is_alive()
    place.close()
    other.join(30)
    assert not other.is_alive()
    pool.slots.give_back()


class StubbornBox(Box):
    """A container whose first removals fail, until `free` is set."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def remove(self, timeout_s: float) -> None:
        self.removed += 1
        if not self.free.is_set():
            raise InfrastructureFault("too many files")


def test_a_slow_removal_is_no_fault_and_keeps_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "REMOVAL_S", 0.05)
    monkeypatch.setattr(removal, "PAUSE_S", 0.01)
    pool, box = pool_of(1, "stubborn"), StubbornBox()
    place = pool.place()
    place.start("good", 1)
    place.remove(box)
    place.close()
    with pytest.raises(InfrastructureFault, match="no container has ended"):
        pool.slots.take(0.2)
    box.free.set()
    pool.slots.take(30)  # the place is free once the container is gone
    assert box.removed > 1


def test_a_removal_that_never_succeeds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "LONGEST_S", 0.0)
    monkeypatch.setattr(removal, "PAUSE_S", 0.01)
    thread = removal.start_removal(StubbornBox())
    thread.join(30)
    assert not thread.is_alive()


def test_pools_of_a_name_share_the_limit() -> None:
    place = pool_of(1, "shared").place()
    place.start("good", 1)
    with pytest.raises(InfrastructureFault, match="no container has ended"):
        pool_of(1, "shared").slots.take(0.2)
    place.close()


def test_waiting_does_not_count_as_time_of_the_step() -> None:
    slots, clock = TurnQueue(1), Clock()
    slots.take(60)

    def work() -> None:
        clock.run_here()
        slots.take(60)

    thread = threading.Thread(target=work)
    thread.start()
    waiters(slots, 1)
    time.sleep(0.3)
    slots.give_back()
    thread.join(30)
    assert 0.3 <= clock.waited() < 30


def test_a_wait_ends_when_the_run_gives_up() -> None:
    slots, pending, errors = TurnQueue(1), Pending(), []
    slots.take(60)

    def work() -> None:
        pending.run_here()
        try:
            slots.take(600)
        except InfrastructureFault as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    waiters(slots, 1)
    pending.cancel()
    thread.join(30)
    assert errors == ["the run gave up waiting for a container"]
    slots.give_back()
    slots.take(1)  # the place was not lost


@pytest.mark.parametrize("runtime", ["podman", "docker", "kubectl"])
def test_a_limit_of_memory_too_small_for_any_program_is_refused(runtime: str) -> None:
    make_pool(runtime, {"memory_mib": 0}, "box")
    make_pool(runtime, {"memory_mib": 16}, "box")
    with pytest.raises(UserError, match=r"box.memory_mib = 15: .* at least 16"):
        make_pool(runtime, {"memory_mib": 15}, "box")
