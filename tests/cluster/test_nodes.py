"""Nodes of a Ray cluster: nodes for actors, answering nodes, and the error message after the loss of a node."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from skyrl_mega.cluster import nodes, ray_session
from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeLost, NodesMissing
from skyrl_mega.cluster.nodes import Node, UnavailableNodes, nodes_without_gpus, silent_nodes, worker_nodes
from skyrl_mega.common.errors import UserError

RANK = ActorFailed("policy", 1, "train", "its process died")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yields a socket for up to a thousand connections at 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        yield server


def told(name: str, gpus: int = 0, *, address: str = "", port: int = 1, alive: bool = True) -> dict[str, Any]:
    """Returns a node in Ray's format."""
    resources = {"CPU": 8.0, "GPU": float(gpus)} if name != "head" else {}
    where = {"NodeManagerAddress": address or f"10.0.0.{name}", "NodeManagerPort": port}
    return {"NodeID": name, "Alive": alive, "Resources": resources, **where}


def nodes_of(*gpus: int) -> list[dict[str, Any]]:
    """Returns nodes with these numbers of GPUs, plus a management node."""
    return [*(told(str(i), n) for i, n in enumerate(gpus)), told("head")]


def unused() -> int:
    """Returns a port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_environments_are_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: nodes_of(8, 8, 0, 0))
    monkeypatch.setattr(nodes, "silent_nodes", lambda _: [])
    assert [node.address for node in nodes_without_gpus()] == ["10.0.0.2", "10.0.0.3"]
    assert [node.gpus for node in worker_nodes()] == [8, 8, 0, 0]
    monkeypatch.setattr("ray.nodes", lambda: nodes_of(8, 8))
    assert [node.address for node in nodes_without_gpus()] == ["10.0.0.0", "10.0.0.1"]
    monkeypatch.setattr(nodes, "silent_nodes", lambda workers: workers[:1])
    assert [node.address for node in nodes_without_gpus()] == ["10.0.0.1"], "nothing is placed where nobody answers"


def test_nodes_without_gpus_are_not_waited_for_in_the_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: nodes_of(8, 0, 0))
    monkeypatch.setattr(nodes, "silent_nodes", lambda nodes: [])
    messages: list[str] = []
    with pytest.raises(
        NodesMissing, match=r"1 of 2 nodes with GPUs .*: 10\.0\.0\.0; without GPUs: 10\.0\.0\.1, 10\.0\.0\.2; the"
    ):
        ray_session._wait_for_nodes(2, 0.0, messages.append, gpus=True)
    ray_session._wait_for_nodes(3, 0.0, messages.append, gpus=False)
    ray_session._wait_for_nodes(1, 0.0, messages.append, gpus=True)


def test_nodes_of_both_kinds_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists three nodes of the policy's kind: a run of two and a node of the pool must wait for the pool's node."""
    listed = nodes_of(8, 8, 8)
    monkeypatch.setattr("ray.nodes", lambda: listed)
    monkeypatch.setattr(nodes, "silent_nodes", lambda nodes: [])
    messages: list[str] = []
    pool = ("pool", "engines", 1)
    with pytest.raises(NodesMissing, match="; 0 of 1 with the label pool=engines; the others did not join within 0 s"):
        ray_session._wait_for_nodes(3, 0.0, messages.append, gpus=True, pool=pool)
    listed[0]["Labels"] = {"pool": "engines"}
    ray_session._wait_for_nodes(3, 0.0, messages.append, gpus=True, pool=pool)
    listed[1]["Labels"] = {"pool": "engines"}
    with pytest.raises(NodesMissing, match="; 1 of 2 without the label pool=engines; the others"):
        ray_session._wait_for_nodes(3, 0.0, messages.append, gpus=True, pool=pool)


def test_only_nodes_that_accept_a_connection_answer(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    listening_node = Node("a", "127.0.0.1", port=listener.getsockname()[1])
    dead = Node("b", "127.0.0.1", port=unused())
    assert silent_nodes([listening_node, dead]) == [dead]
    assert silent_nodes([]) == []
    for error, answers in (
        (OSError(errno.EMFILE, "of this machine"), True),
        (OSError(errno.EHOSTUNREACH, "of the way there"), False),
        (OSError(errno.EHOSTDOWN, "of the other one"), False),
        (OSError(errno.ENETUNREACH, "no way there"), False),
        (TimeoutError("it has no power"), False),
    ):

        def failed(*_: Any, error: OSError = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(nodes.socket, "create_connection", failed)
        assert (silent_nodes([listening_node]) == []) is answers


def test_a_node_that_ray_still_lists_is_not_there(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = listener.getsockname()[1]
    listed = [told("a", address="127.0.0.1", port=port), told("b", address="127.0.0.2", port=unused())]
    monkeypatch.setattr("ray.nodes", lambda: listed)
    messages: list[str] = []
    missing = r"^1 of 2 nodes .*: 127\.0\.0\.1; listed, but without an answer: 127\.0\.0\.2; the others"
    with pytest.raises(NodesMissing, match=missing):
        ray_session._wait_for_nodes(2, 0.0, messages.append, gpus=False)

    def noticed(seconds: float) -> None:
        listed[1] = told("b", alive=False) if len(listed) == 3 else listed[1]
        listed[2:] = [told("c", address="127.0.0.1", port=port)]

    monkeypatch.setattr(ray_session.time, "sleep", noticed)
    before = ray_session._wait_for_nodes(2, 60.0, messages.append, gpus=False, notice_s=60.0)
    assert before.silent == [] and [node.id for node in before.dead] == ["b"]
    assert [line.rpartition("; ")[2] for line in messages] == [
        "waiting for the others",
        "waiting for Ray to drop the silent nodes",
    ]


def test_each_silent_node_is_waited_for_and_no_longer_than_ray_may_take(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measures the wait from a node's first silence on: other nodes may take long to come."""
    port, clock = listener.getsockname()[1], [0.0]
    listed = [told("a", address="127.0.0.1", port=port), told("b", address="127.0.0.2", port=unused(), alive=False)]

    def later(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] == 100:
            listed[1]["Alive"] = True  # the node came and died at once
            listed.append(told("c", address="127.0.0.1", port=port))

    monkeypatch.setattr("ray.nodes", lambda: listed)
    monkeypatch.setattr(ray_session.time, "sleep", later)
    monkeypatch.setattr(ray_session.time, "monotonic", lambda: clock[0])
    messages: list[str] = []
    before = ray_session._wait_for_nodes(2, 600.0, messages.append, gpus=False, notice_s=60.0)
    assert 160 <= clock[0] <= 161 and [node.id for node in before.silent] == ["b"]
    assert "Ray still lists the silent nodes" in messages[-1]
    assert nodes.lost_since(before) == UnavailableNodes([], [], frozenset()), "it was silent before"
    listed[1]["Alive"] = False
    lost = nodes.lost_since(before)
    assert lost is not None and [node.id for node in lost.dead] == ["b"], "what was placed on it is lost"


def test_who_is_waited_for_is_said_beside_what_a_program_reads(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [told("a", address="127.0.0.1", port=unused())])
    with pytest.raises(
        NodesMissing, match=r"^0 of 1 nodes of the Ray cluster have joined: listed, but without an answer"
    ):
        ray_session._wait_for_nodes(1, 0.2, ray_session._to_stderr, gpus=False)
    told_to = capsys.readouterr()
    assert "waiting for the others" in told_to.err and not told_to.out


def test_what_is_gone_is_what_was_there_before(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the nodes before and after: nodes joined later count, nodes lost earlier do not."""
    port = listener.getsockname()[1]
    listed = [told("a", address="127.0.0.1", port=port), told("old", alive=False)]
    monkeypatch.setattr("ray.nodes", lambda: listed)
    _, before = nodes.probe()
    assert nodes.lost_since(before) == UnavailableNodes([], [])
    listed += [told("new", address="127.0.0.2", port=unused()), told("newer", address="10.0.0.3", alive=False)]
    lost = nodes.lost_since(before)
    assert lost is not None
    assert lost.text() == "no longer answering: 127.0.0.2; dead according to Ray: 10.0.0.3"


def test_a_node_that_only_manages_takes_no_actor_along(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [told("a", address="127.0.0.1", port=listener.getsockname()[1]), told("head")]
    monkeypatch.setattr("ray.nodes", lambda: listed)
    _, before = nodes.probe()
    listed[1]["Alive"] = False
    lost = nodes.lost_since(before)
    assert lost is not None and not lost.text()


def test_where_ray_does_not_answer_nobody_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def fails() -> None:
        raise RuntimeError("no GCS")

    def hangs() -> list[Any]:
        ended.wait()
        return []

    def system_error() -> None:
        raise ray.exceptions.RaySystemError("no GCS")

    def full() -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(nodes, "PROBE_S", 0.1)
    for asked in (fails, system_error, full, hangs):
        monkeypatch.setattr("ray.nodes", asked)
        assert nodes.lost_since(UnavailableNodes([], [])) is None
        with pytest.raises(ClusterError, match="did not list the nodes of its cluster within 0 s"):
            ray_session._wait_for_nodes(1, 0.0, print, gpus=False)
    with pytest.raises(ActorFailed) as caught, ray_session._naming_lost_nodes(UnavailableNodes([], [])):
        raise RANK
    assert caught.value is RANK
    assert all(thread.daemon for thread in threading.enumerate() if "ask" in thread.name), "the process may end"
    ended.set()

    def no_thread(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert nodes.lost_since(UnavailableNodes([], [])) is None


@pytest.mark.parametrize("fault", [RANK, ClusterError("what was played on a node is gone with it")])
def test_a_fault_is_the_nodes_where_one_is_gone(
    fault: Exception, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raises faults in the session of a joined cluster."""
    listed = [told("a", address="127.0.0.1", port=listener.getsockname()[1])]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    for name, stand_in in (("init", lambda **_: None), ("shutdown", lambda: None), ("nodes", lambda: listed)):
        monkeypatch.setattr(f"ray.{name}", stand_in)
    with pytest.raises(type(fault)) as caught, ray_session.session(actors=1):
        raise fault
    assert caught.value is fault

    def fails(error: Exception, node: str) -> None:
        with ray_session.session(actors=1):
            listed.append(told(node, alive=False))
            raise error

    with pytest.raises(NodeLost) as named:
        fails(fault, "2")
    assert str(named.value) == f"{fault}; lost nodes of the Ray cluster: dead according to Ray: 10.0.0.2"
    with pytest.raises(UserError):
        fails(UserError("a mistake"), "3")
