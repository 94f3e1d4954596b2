"""The nodes of a Ray cluster: available, silent and lost nodes."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

ANSWER_S = 5.0
"""Time limit in seconds for a connection to a node."""
PROBE_S = 20.0
"""Seconds until the check for lost nodes must be complete."""
AT_ONCE = 512
"""Number of nodes probed at the same time."""


@dataclass(frozen=True)
class Node:
    """A node that may hold actors."""

    id: str
    """Ray's id of the node."""
    address: str
    gpus: int = 0
    """Number of the node's GPUs managed by Ray."""
    port: int = 0
    """Port of Ray's own process on the node; 0 if not needed."""
    resources: frozenset[str] = frozenset()
    """Names of the node's Ray resources."""
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The node's labels in Ray."""


def worker_nodes() -> list[Node]:
    """Returns the nodes listed by Ray as alive and with CPUs, sorted by address.

    A head node without CPUs only manages the cluster and is left out.
    """
    import ray

    return _workers(ray.nodes())


def _workers(listed: Sequence[Mapping[str, Any]]) -> list[Node]:
    nodes = [
        Node(
            n["NodeID"],
            n["NodeManagerAddress"],
            int(n["Resources"].get("GPU", 0)),
            n["NodeManagerPort"],
            frozenset(n["Resources"]),
            n.get("Labels", {}),
        )
        for n in listed
        if n["Alive"] and n["Resources"].get("CPU")
    ]
    return sorted(nodes, key=lambda n: by_address(n.address, n.id))


def missing_kind(labels: Sequence[Mapping[str, str]], count: int, pool: tuple[str, str, int] | None) -> str:
    """Returns a phrase with the kind of nodes that is missing among nodes with these labels; "" if none is missing.

    Args:
        labels: The labels of each node.
        count: Number of nodes needed, of both kinds together.
        pool: Key and value of a label, and the number of nodes needed with the label; the other nodes needed are
            without. None if all nodes are of one kind.
    """
    if pool is None:
        return ""
    key, value, wanted = pool
    inside = sum(own.get(key) == value for own in labels)
    kinds = (("with", inside, wanted), ("without", len(labels) - inside, count - wanted))
    missing = [f"{there} of {needed} {word} the label {key}={value}" for word, there, needed in kinds if there < needed]
    return " and ".join(missing)


def responding_nodes(without: str | None = None) -> list[Node]:
    """Returns the nodes with CPUs whose Ray process accepts a connection, sorted by address; Ray's own list may still
    contain dead nodes. Nodes with the Ray resource `without` are left out. Ray's errors pass, as in `probe`."""
    return [node for node in probe()[0] if without not in node.resources]


def nodes_without_gpus(without: str | None = None) -> list[Node]:
    """Returns the responding nodes without GPUs, or all responding nodes if every node offers GPUs; [] if none
    responds. Nodes with the Ray resource `without` are left out. Ray's errors pass, as in `probe`."""
    nodes = responding_nodes(without)
    return [node for node in nodes if not node.gpus] or nodes


def driver_node() -> Node:
    """Returns the Ray node of this process with id and address only: `gpus` and `port` are 0."""
    import ray

    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def by_address(address: str, node: str) -> tuple[list[int], str, str]:
    """Returns the sort key of a node: 10.0.0.9 comes before 10.0.0.10, and the id orders nodes with equal addresses."""
    return [int(part) for part in address.split(".") if part.isdigit()], address, node


def silent_nodes(nodes: Sequence[Node]) -> list[Node]:
    """Returns those of the nodes on which Ray's own process accepts no connection within `ANSWER_S` seconds; Ray
    notices a death only after a while."""
    if not nodes:
        return []
    with ThreadPoolExecutor(min(len(nodes), AT_ONCE)) as threads:
        return [node for node, answers in zip(nodes, threads.map(_answers, nodes), strict=True) if not answers]


@dataclass(frozen=True)
class UnavailableNodes:
    """The nodes of a Ray cluster that do not respond or are dead, from one listing."""

    silent: list[Node]
    """Nodes listed as alive by Ray, but without a response."""
    dead: list[Node]
    """Dead or departed nodes since the cluster began, according to Ray."""
    managers: frozenset[str] = frozenset()
    """Ids of live nodes without CPUs, on which no actor depends; Ray does not list a dead node's CPUs."""

    def lost_since(self, before: UnavailableNodes) -> UnavailableNodes:
        """Returns the nodes lost after `before` was taken, including nodes that joined in between."""
        dead = [node for node in self.dead if node.id not in before.managers]
        return UnavailableNodes(_without(self.silent, before.silent), _without(dead, before.dead), self.managers)

    def text(self) -> str:
        """Returns a phrase for the user with the addresses of the silent and the dead nodes; "" without any."""
        parts = (("no longer answering:", self.silent), ("dead according to Ray:", self.dead))
        return "; ".join(f"{words} {', '.join(node.address for node in nodes)}" for words, nodes in parts if nodes)


def _without(nodes: Sequence[Node], excluded: Sequence[Node]) -> list[Node]:
    excluded_ids = {node.id for node in excluded}
    return [node for node in nodes if node.id not in excluded_ids]


def probe() -> tuple[list[Node], UnavailableNodes]:
    """Returns the responding nodes with CPUs, sorted by address, and the unavailable nodes, from a single listing by
    Ray. A node responds if Ray's own process there accepts a connection within `ANSWER_S` seconds. Raises Ray's errors;
    `try_probe` does not, and limits the time."""
    import ray

    listed = ray.nodes()
    workers = _workers(listed)
    mute = silent_nodes(workers)
    dead = [Node(n["NodeID"], n["NodeManagerAddress"]) for n in listed if not n["Alive"]]
    managers = frozenset(n["NodeID"] for n in listed if n["Alive"]) - {node.id for node in workers}
    return _without(workers, mute), UnavailableNodes(mute, dead, managers)


def try_probe() -> tuple[list[Node], UnavailableNodes] | None:
    """Returns the result of `probe`, or None if Ray fails or does not answer within `PROBE_S`."""
    import ray

    results: list[tuple[list[Node], UnavailableNodes]] = []

    def ask() -> None:
        with suppress(RuntimeError, OSError, ray.exceptions.RayError):
            results.append(probe())

    with suppress(RuntimeError):  # no thread could be started
        looking = threading.Thread(target=ask, daemon=True)
        looking.start()
        looking.join(PROBE_S)
    return results[0] if results else None


def lost_since(before: UnavailableNodes) -> UnavailableNodes | None:
    """Probes the cluster and returns the nodes lost since `before` was taken; None if Ray does not answer."""
    now = try_probe()
    return None if now is None else now[1].lost_since(before)


def _answers(node: Node) -> bool:
    """Returns True unless the node refuses or ignores a connection. Local errors, such as too many open files, count as
    True."""
    try:
        socket.create_connection((node.address, node.port), timeout=ANSWER_S).close()
    except (ConnectionError, TimeoutError):
        return False
    except OSError as error:
        return error.errno not in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    return True
