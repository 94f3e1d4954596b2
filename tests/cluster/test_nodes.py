"""Which nodes of a Ray cluster can hold actors, which answer, and what a fault is called where one is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_mega.cluster import nodes, ray_session
from skyrl_mega.cluster.errors import ActorFailed, ClusterError, NodeLost, NodesMissing
from skyrl_mega.cluster.nodes import Node, lost, nodes_without_gpus, silent, worker_nodes

RANK = ActorFailed("policy-1", 1, "train", "its process died")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Somebody who answers at 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as there:
        yield there


def told(name: str, gpus: int = 0, *, address: str = "", port: int = 1, alive: bool = True) -> dict[str, Any]:
    """As Ray tells of a node."""
    resources = {"CPU": 8.0, "GPU": float(gpus)} if name != "head" else {}
    where = {"NodeManagerAddress": address or f"10.0.0.{name}", "NodeManagerPort": port}
    return {"NodeID": name, "Alive": alive, "Resources": resources, **where}


def nodes_of(*gpus: int) -> list[dict[str, Any]]:
    """With so many GPUs each; the last one only manages."""
    return [*(told(str(i), n) for i, n in enumerate(gpus)), told("head")]


def unused() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_environments_are_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: nodes_of(8, 8, 0, 0))
    assert [node.address for node in nodes_without_gpus()] == ["10.0.0.2", "10.0.0.3"]
    assert [node.gpus for node in worker_nodes()] == [8, 8, 0, 0]
    monkeypatch.setattr("ray.nodes", lambda: nodes_of(8, 8))
    assert [node.address for node in nodes_without_gpus()] == ["10.0.0.0", "10.0.0.1"]


def test_nodes_without_gpus_are_not_waited_for_in_the_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.nodes", lambda: nodes_of(8, 0, 0))
    monkeypatch.setattr(ray_session, "silent", lambda nodes: [])
    said: list[str] = []
    with pytest.raises(
        NodesMissing, match=r"1 of 2 nodes with GPUs .*: 10\.0\.0\.0; without GPUs: 10\.0\.0\.1, 10\.0\.0\.2; the"
    ):
        ray_session._wait_for_nodes(2, 0.0, said.append, gpus=True)
    assert len(ray_session._wait_for_nodes(3, 0.0, said.append, gpus=False)) == 3
    assert len(ray_session._wait_for_nodes(1, 0.0, said.append, gpus=True)) == 3


def test_only_nodes_that_accept_a_connection_answer(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Node("a", "127.0.0.1", port=listener.getsockname()[1])
    dead = Node("b", "127.0.0.1", port=unused())
    assert silent([there, dead]) == [dead]
    assert silent([]) == []
    monkeypatch.setattr(nodes, "worker_nodes", lambda: [there, dead])
    assert lost([there, dead]) == [dead]
    assert lost([there]) == []
    monkeypatch.setattr(nodes, "worker_nodes", lambda: [])
    assert lost([there]) == [there]  # its port is open, and Ray has given it up


def test_a_node_that_ray_still_lists_is_not_there(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = listener.getsockname()[1]
    listed = [told("a", address="127.0.0.1", port=port), told("b", address="127.0.0.1", port=unused())]
    monkeypatch.setattr("ray.nodes", lambda: listed)
    said: list[str] = []
    with pytest.raises(NodesMissing, match=r"^1 of 2 nodes .*: 127\.0\.0\.1; no answer from: 127\.0\.0\.1; the others"):
        ray_session._wait_for_nodes(2, 0.0, said.append, gpus=False)
    with pytest.raises(NodesMissing, match="no answer from"):  # Ray may place an actor there
        ray_session._wait_for_nodes(1, 0.0, said.append, gpus=False)

    def noticed(seconds: float) -> None:
        listed[1] = told("b", alive=False) if len(listed) == 3 else listed[1]
        listed[2:] = [told("c", address="127.0.0.1", port=port)]

    monkeypatch.setattr(ray_session.time, "sleep", noticed)
    came = ray_session._wait_for_nodes(2, 60.0, said.append, gpus=False)
    assert [node.id for node in came] == ["a", "c"]
    assert [line.partition(":")[0] for line in said] == [f"{n} of 2 nodes of the Ray cluster are there" for n in (1, 2)]


@pytest.mark.parametrize("fault", [RANK, ClusterError("what was played on a node is gone with it")])
def test_a_fault_is_the_nodes_where_one_is_gone(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Node("a", "10.0.0.1"), Node("b", "10.0.0.2")]
    gone: list[Node] = []
    monkeypatch.setattr(ray_session, "lost", lambda nodes: gone)
    with pytest.raises(type(fault)) as caught, ray_session._node_by_node(two):
        raise fault
    assert caught.value is fault
    gone.append(two[1])
    with pytest.raises(NodeLost) as named, ray_session._node_by_node(two):
        raise fault
    assert str(named.value).startswith("no answer any more from 10.0.0.2, of") and str(named.value).endswith(str(fault))
    with pytest.raises(ValueError, match="a defect"), ray_session._node_by_node(two):
        raise ValueError("a defect")
