"""The nodes of a Ray cluster: which can hold actors, and which of them answer."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ANSWER_S = 5.0
"""How long a node may take to accept a connection."""
AT_ONCE = 64
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

    nodes = [
        Node(n["NodeID"], n["NodeManagerAddress"], int(n["Resources"].get("GPU", 0)), n["NodeManagerPort"])
        for n in ray.nodes()
        if n["Alive"] and n["Resources"].get("CPU")
    ]
    return sorted(nodes, key=lambda n: by_address(n.address, n.id))


def nodes_without_gpus() -> list[Node]:
    """The worker nodes without GPUs; all of them where each has some."""
    nodes = worker_nodes()
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


def lost(nodes: Sequence[Node]) -> list[Node]:
    """Those that were there and are not any more: they do not answer, or Ray has given them up."""
    if gone := silent(nodes):
        return gone
    alive = {node.id for node in worker_nodes()}
    return [node for node in nodes if node.id not in alive]


def _answers(node: Node) -> bool:
    try:
        socket.create_connection((node.address, node.port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True
