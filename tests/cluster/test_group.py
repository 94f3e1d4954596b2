"""Groups of dying, raising or hanging actors, and the remains."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.calls import gather
from skyrl_mega.cluster.errors import ActorFailed, ActorTimeout, ClusterError
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.placement import on_gpus_of, reserve
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.common.errors import UserError
from tests.cluster.workers import Quick, Worker, mapped


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=8, gpus=4):  # Ray assigns numbers without real devices
        yield


def spawn(n: int, **kwargs: object) -> ActorGroup:
    return ActorGroup.spawn("worker", Worker, [{"number": r} for r in range(n)], timeout=120, **kwargs)  # type: ignore[arg-type]


def gone(group: int, seconds: float = 60.0) -> bool:
    """Returns True if all processes of the group end within these seconds."""
    deadline = time.monotonic() + seconds
    while reaper.members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not reaper.members(group)


def test_answers_come_by_rank_and_output_goes_to_log_files(ray: None, tmp_path: Path) -> None:
    group = spawn(2, env={"OMP_NUM_THREADS": "3"}, logs=tmp_path)
    try:
        assert group.call_all("answer", 5, timeout=120) == [5, 6]
        assert group.call_all("answer", per_rank=[(10,), (20,)], timeout=120) == [10, 21]
        assert group.call_one(1, "answer", timeout=120) == 1
        assert group.call_all("variable", "OMP_NUM_THREADS", timeout=120) == ["3", "3"]
        group.call_one(1, "say", "hello", timeout=120)
        assert (tmp_path / "worker-1.log").read_text().splitlines() == ["hello", "child hello"]
        assert len({w.pid for w in group.where}) == 2
        assert {w.address for w in group.where} == {"127.0.0.1"}
    finally:
        group.shutdown()


def test_the_first_cause_is_the_death_and_not_the_complaints_about_it(ray: None) -> None:
    group = spawn(3)
    with pytest.raises(ActorFailed) as caught:
        group.call_all("fail", 2, timeout=120)
    assert (caught.value.actor, caught.value.rank, caught.value.method) == ("worker-2", 2, "fail")
    assert "died" in caught.value.cause
    assert "2 more failed after it" in str(caught.value)
    assert all(gone(w.pid) for w in group.where)


def test_a_silent_actor_is_named_within_the_timeout(ray: None) -> None:
    group = spawn(2)
    start = time.monotonic()
    with pytest.raises(ActorTimeout) as caught:
        group.call_all("sleep", per_rank=[(0.0,), (300.0,)], timeout=3.0)
    assert time.monotonic() - start < 60
    assert caught.value.silent == [("worker", 1)]
    assert "no answer within 3 s from worker-1" in str(caught.value)
    assert all(gone(w.pid) for w in group.where)


def test_a_user_error_of_a_constructor_arrives_as_it_is(ray: None) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        ActorGroup.spawn("worker", Worker, [{}, {"fault": "user"}], timeout=120)


def test_another_error_of_a_constructor_names_actor_and_first_line(ray: None) -> None:
    with pytest.raises(ActorFailed, match=r"worker-0 \(rank 0\) failed in construct: ValueError: two"):
        ActorGroup.spawn("worker", Worker, [{"fault": "other"}], timeout=120)


def test_shutdown_ends_its_own_actors_with_their_children_and_no_others(ray: None) -> None:
    mine, other = spawn(1), spawn(1)
    try:
        group, child = mine.call_one(0, "children", timeout=120)
        assert child in reaper.members(group)
        mine.shutdown()
        assert not reaper.members(group)
        assert other.call_all("answer", timeout=120) == [0]
    finally:
        other.shutdown()


def test_children_of_a_killed_actor_do_not_outlive_it(ray: None) -> None:
    group = spawn(1)
    try:
        pgid, _ = group.call_one(0, "children", timeout=120)
        os.kill(group.where[0].pid, signal.SIGKILL)
        assert gone(pgid)
    finally:
        group.shutdown()


def test_a_death_is_known_though_a_fork_holds_on_to_what_was_open(ray: None) -> None:
    """Kills an actor with a living fork, like a policy rank that dies while Megatron's forked writers write a
    checkpoint.
    """
    group = spawn(1)
    try:
        group.call_one(0, "fork", timeout=120)
        call = group.submit(0, "sleep", 300.0)
        time.sleep(0.2)
        os.kill(group.where[0].pid, signal.SIGKILL)
        with pytest.raises(ActorFailed, match="its process died"):
            gather([call], timeout=120)
        assert gone(group.where[0].pid)
    finally:
        group.shutdown()


def test_shared_memory_that_nobody_has_any_more_goes_with_its_actor(ray: None) -> None:
    alone, ours = f"skyrl-alone-{os.getpid()}", f"skyrl-ours-{os.getpid()}"
    group = spawn(1)
    held = mapped(ours)
    try:
        group.call_one(0, "share", [alone, ours], timeout=120)
        time.sleep(reaper.LOOK_EVERY_S + 3)
        os.kill(group.where[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while Path(reaper.SHARED, alone).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert Path(reaper.SHARED, ours).exists()
    finally:
        group.shutdown()
        held.close()
        Path(reaper.SHARED, ours).unlink()


def test_async_actors_run_calls_at_the_same_time(ray: None) -> None:
    group = ActorGroup.spawn("quick", Quick, [{}], timeout=120)
    try:
        start = time.monotonic()
        gather([group.submit(0, "sleep", 2.0) for _ in range(8)], timeout=120)
        assert time.monotonic() - start < 12
    finally:
        group.shutdown()


def test_places_are_reserved_or_refused_with_what_there_is(ray: None) -> None:
    placement = reserve(2, together=[2], timeout_s=120)
    group = spawn(2, placement=placement)
    try:
        assert group.call_all("answer", timeout=120) == [0, 1]
    finally:
        group.shutdown()
    with pytest.raises(ClusterError, match=r"no free place for 2 processes of 1 CPU, 4 GPU each.* 8 CPU"):
        reserve(2, gpus=4, timeout_s=0.5)


DRIVER = """
    import time
    from skyrl_mega.cluster.ray_session import session
    from skyrl_mega.cluster.group import ActorGroup
    from tests.cluster.workers import Worker

    with session(actors=1):
        group = ActorGroup.spawn("worker", Worker, [{}], timeout=120)
        print(*group.call_one(0, "children", timeout=120), flush=True)
        time.sleep(300)
"""


def test_actors_beside_others_see_their_gpus(ray: None) -> None:
    owners = spawn(4, placement=reserve(4, gpus=1, together=[4], timeout_s=120))
    try:
        gpus = owners.call_all("variable", "CUDA_VISIBLE_DEVICES", timeout=120)
        assert sorted(gpus) == ["0", "1", "2", "3"]
        guests = spawn(2, placement=on_gpus_of(owners.where, 2, gpus=2), env={"OMP_NUM_THREADS": "3"})
        try:
            shared = guests.call_all("variable", "CUDA_VISIBLE_DEVICES", timeout=120)
            assert shared == [",".join(gpus[:2]), ",".join(gpus[2:])]
            assert guests.call_all("variable", "OMP_NUM_THREADS", timeout=120) == ["3", "3"]
            guests.replace(1, 60)
            assert guests.call_one(1, "variable", "CUDA_VISIBLE_DEVICES", timeout=120) == shared[1]
            with pytest.raises(
                ClusterError, match=r"ranks 0 to 1 have 0 GPUs in 1 nodes, .* all in one node; set cluster"
            ):
                on_gpus_of(guests.where, 1, gpus=2)
        finally:
            guests.shutdown()
    finally:
        owners.shutdown()


def test_nothing_outlives_a_killed_driver() -> None:
    root = Path(__file__).parents[2]
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)], stdout=subprocess.PIPE, text=True, cwd=root, process_group=0
    )
    assert driver.stdout is not None
    pgid = int(driver.stdout.readline().split()[0])
    assert reaper.members(pgid)
    # Ray's own processes share the driver's group, led by the driver here.
    assert len(reaper.members(driver.pid)) > 2
    driver.kill()
    driver.wait()
    assert gone(pgid)
    assert gone(driver.pid)


def test_an_address_where_nobody_answers_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:
        port = closing.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(UserError, match=f"RAY_ADDRESS = 127.0.0.1:{port}: no response"), session(actors=1):
        pass


def test_no_other_user_may_enter_rays_folder(ray: None) -> None:
    """Checks the parent of Ray's folder, which is closed to other users. Ray's own folder is open to everybody.

    The workers' temporary files are in the closed folder, too.
    """
    import ray as connected

    opened = Path(connected._private.worker._global_node.get_temp_dir_path())
    assert opened.parent.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        plant = subprocess.run(["touch", str(opened / "planted")], user=54321, capture_output=True, text=True)
        assert plant.returncode and "Permission denied" in plant.stderr
    group = spawn(1)
    try:
        temporary = group.call_one(0, "variable", "TMPDIR", timeout=120)
        assert Path(temporary).parent == opened.parent
    finally:
        group.shutdown()


def test_one_that_has_been_ended_is_not_ended_again(ray: None) -> None:
    """Ends an actor twice: the process id may belong to another program by then."""
    group = spawn(1)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        try:
            group.end(0)
            group.where[0] = replace(group.where[0], pid=other.pid)
            group.end(0)
            assert other.poll() is None
            group.replace(0, 120)
            assert group.call_one(0, "answer", 7, timeout=120) == 7 and group.where[0].pid != other.pid
            assert other.poll() is None
            group.end(0)
            assert not reaper.members(group.where[0].pid)
        finally:
            group.shutdown()
            assert other.poll() is None
            other.kill()


SIGNALLED = """
    import os, signal, sys
    from skyrl_mega.cluster.ray_session import session

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    with session(actors=1):
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_the_programs_own_signal_handlers_hold_while_ray_runs() -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SIGNALLED)], capture_output=True, text=True, cwd=root, timeout=240
    )
    assert ended.returncode == 75
    assert "SIGTERM" not in ended.stderr


OUTSIDE = """
    import skyrl_mega.cluster, ray

    ray.put(1)
"""


def test_ray_starts_nothing_for_who_has_no_session() -> None:
    """Calls Ray without a session: by default, Ray would start a cluster listening on all interfaces."""
    root = Path(__file__).parents[2]
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OUTSIDE)], capture_output=True, text=True, cwd=root, timeout=240
    )
    assert completed.returncode == 1
    assert "ray.init" in completed.stderr.splitlines()[-1]
