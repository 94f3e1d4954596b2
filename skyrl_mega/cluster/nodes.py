"""The nodes of a Ray cluster: which can hold actors, and which of them answer."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ANSWER_S = 5.0
"""How long a node may take to accept a connection."""
LOOK_S = 20.0
"""How long it may take to see which nodes are gone."""
AT_ONCE = 512
"""Nodes that are asked at the same time."""


@dataclass(frozen=True)
class Node:
    """A node that may hold actors."""

    id: str
    """Ray's."""
    address: str
    gpus: int = 0
    """That Ray has to give there."""
    port: int = 0
    """Where Ray's own process of the node listens; 0 where nobody asks for it."""


def worker_nodes() -> list[Node]:
    """Nodes of the cluster that are alive, as far as Ray knows, and have a CPU to give, by address: a head that only
    manages has none."""
    import ray

    return _workers(ray.nodes())


def _workers(listed: Sequence[Mapping[str, Any]]) -> list[Node]:
    nodes = [
        Node(n["NodeID"], n["NodeManagerAddress"], int(n["Resources"].get("GPU", 0)), n["NodeManagerPort"])
        for n in listed
        if n["Alive"] and n["Resources"].get("CPU")
    ]
    return sorted(nodes, key=lambda n: by_address(n.address, n.id))


def answering() -> list[Node]:
    """The worker nodes that something can be placed on: one that has died is listed until Ray has noticed."""
    return look()[0]


def nodes_without_gpus() -> list[Node]:
    """The answering nodes without GPUs; all of them where each has some."""
    nodes = answering()
    return [node for node in nodes if not node.gpus] or nodes


def driver_node() -> Node:
    """The node of this process."""
    import ray

    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def by_address(address: str, node: str) -> tuple[list[int], str, str]:
    """What nodes are sorted by: 10.0.0.9 comes before 10.0.0.10; nodes of one address have an order too."""
    return [int(part) for part in address.split(".") if part.isdigit()], address, node


def silent(nodes: Sequence[Node]) -> list[Node]:
    """Those of which Ray's own process accepts no connection: Ray itself notices a death only after a while."""
    if not nodes:
        return []
    with ThreadPoolExecutor(min(len(nodes), AT_ONCE)) as threads:
        return [node for node, answers in zip(nodes, threads.map(_answers, nodes), strict=True) if not answers]


@dataclass(frozen=True)
class Gone:
    """Nodes that are not there."""

    silent: list[Node]
    """Ray lists them, and they accept no connection."""
    given_up: list[Node]
    """Ray has found them dead, or they have left, since the cluster began."""
    managers: frozenset[str] = frozenset()
    """Ids of nodes without a CPU to give, whose end concerns no actor; a node that is dead no longer says so."""

    def since(self, before: Gone) -> Gone:
        """Those that have fallen silent, or have been given up, since then; nodes that came in between too."""
        dead = [node for node in self.given_up if node.id not in before.managers]
        return Gone(_without(self.silent, before.silent), _without(dead, before.given_up), self.managers)

    def text(self) -> str:
        """One line for people; empty where all are there."""
        parts = (("no answer any more from", self.silent), ("Ray has given up", self.given_up))
        return "; ".join(f"{words} {', '.join(node.address for node in nodes)}" for words, nodes in parts if nodes)


def _without(nodes: Sequence[Node], others: Sequence[Node]) -> list[Node]:
    known = {node.id for node in others}
    return [node for node in nodes if node.id not in known]


def look() -> tuple[list[Node], Gone]:
    """The worker nodes that answer, and those that are not there, as Ray lists them at one time."""
    import ray

    listed = ray.nodes()
    workers = _workers(listed)
    mute = silent(workers)
    dead = [Node(n["NodeID"], n["NodeManagerAddress"]) for n in listed if not n["Alive"]]
    managers = frozenset(n["NodeID"] for n in listed if n["Alive"]) - {node.id for node in workers}
    return _without(workers, mute), Gone(mute, dead, managers)


def looked() -> tuple[list[Node], Gone] | None:
    """As `look`; None where Ray itself fails, or does not answer within `LOOK_S`."""
    import ray

    found: list[tuple[list[Node], Gone]] = []

    def ask() -> None:
        with suppress(RuntimeError, OSError, ray.exceptions.RayError):
            found.append(look())

    with suppress(RuntimeError):  # no thread can be started
        looking = threading.Thread(target=ask, daemon=True)
        looking.start()
        looking.join(LOOK_S)
    return found[0] if found else None


def gone_since(before: Gone) -> Gone | None:
    """As `Gone.since`, now; None where nobody can say: the fault that is looked into is what is told then."""
    now = looked()
    return None if now is None else now[1].since(before)


def _answers(node: Node) -> bool:
    """Whether it accepts a connection. What is wrong on this machine, as too many open files, says nothing of it."""
    try:
        socket.create_connection((node.address, node.port), timeout=ANSWER_S).close()
    except (ConnectionError, TimeoutError):
        return False
    except OSError as error:
        return error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return True
