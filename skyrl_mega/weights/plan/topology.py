"""Devices, nodes and NICs of the ranks of two layouts, and link speeds.

A device is an integer, node · gpus_per_node + GPU. A node's GPUs are assigned to the NICs in contiguous runs; with as
many NICs as GPUs, NICs are not shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_mega.cluster.run_placement import RunPlacement
from skyrl_mega.config.schema import ClusterConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Links:
    """A node's hardware: numbers of GPUs and NICs (at most as many NICs), and speeds in GB/s (10⁹ bytes) each way."""

    gpus_per_node: int = 8
    nics_per_node: int = 8
    nic_gb_s: float = 50.0
    """Speed of a NIC."""
    fabric_gb_s: float = 450.0
    """Speed between a GPU and the rest of the node (NVLink)."""
    device_gb_s: float = 1500.0
    """Speed of a copy within a device's memory."""

    def __post_init__(self) -> None:
        if not 1 <= self.nics_per_node <= self.gpus_per_node:
            raise ValueError(f"{self.nics_per_node} NICs for the {self.gpus_per_node} GPUs of a node")

    @classmethod
    def from_config(cls, cluster: ClusterConfig) -> Links:
        """Returns the hardware of a node by the settings `cluster.gpus_per_node` and `cluster.topology`; as many NICs
        as GPUs unless set."""
        settings = cluster.topology
        return cls(
            gpus_per_node=cluster.gpus_per_node,
            nics_per_node=settings.nics_per_node or cluster.gpus_per_node,
            nic_gb_s=settings.nic_gb_s,
            fabric_gb_s=settings.fabric_gb_s,
            device_gb_s=settings.device_gb_s,
        )


@dataclass(frozen=True)
class PoolLinks:
    """The hardware of the nodes from number `first_node` on, if they are of another kind."""

    first_node: int
    links: Links


@dataclass(frozen=True)
class Topology:
    """The devices of all source ranks and target ranks."""

    sources: tuple[int, ...]
    """Device of each source rank."""
    targets: tuple[int, ...]
    """Device of each target rank."""
    links: Links = field(default_factory=Links)
    """Hardware of the nodes."""
    pool: PoolLinks | None = None
    """Nodes of another kind; None if all are alike."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Topology:
        """Returns the topology with these fields, as from `asdict`; lists count as tuples."""
        pool = fields["pool"]
        pool = pool and PoolLinks(pool["first_node"], Links(**pool["links"]))
        return cls(tuple(fields["sources"]), tuple(fields["targets"]), Links(**fields["links"]), pool)

    @classmethod
    def from_placement(cls, placement: RunPlacement, links: Links, pool: PoolLinks | None = None) -> Topology:
        """Returns the topology with a run's policy ranks as sources and engine workers as targets. The placement gives
        the number of devices per node.

        Args:
            placement: Device of every process.
            links: Hardware of the policy's nodes.
            pool: Hardware of the engines' nodes; None if all nodes are alike.
        """
        whole = replace(links, gpus_per_node=placement.per_node)
        if pool is None or placement.per_node > max(links.gpus_per_node, pool.links.gpus_per_node):  # CPUs
            pool = pool and replace(pool, links=replace(pool.links, gpus_per_node=placement.per_node))
            return cls(placement.policy, placement.engines, whole, pool)
        return cls(placement.policy, placement.engines, links, pool)

    @classmethod
    def separate(cls, sources: int, targets: int, links: Links = Links()) -> Topology:
        """Returns a topology with a device of its own for each rank, source ranks first, for layouts without a run's
        settings. A node has `links.gpus_per_node` devices, and may hold source and target ranks."""
        return cls(tuple(range(sources)), tuple(range(sources, sources + targets)), links)

    @classmethod
    def shared(cls, sources: int, targets: int, links: Links = Links()) -> Topology:
        """Returns a topology with source rank r and target rank r on device r."""
        return cls(tuple(range(sources)), tuple(range(targets)), links)

    @classmethod
    def one_node(cls, sources: int, targets: int) -> Topology:
        """Returns a topology with a device of its own for each rank, all in one node, source ranks first."""
        return cls.separate(sources, targets, Links(gpus_per_node=sources + targets, nics_per_node=1))

    @property
    def nodes(self) -> int:
        """Number of nodes up to the node of the highest device used."""
        return max((*self.sources, *self.targets)) // self.per_node + 1

    @property
    def kinds(self) -> tuple[Links, ...]:
        """Hardware of each kind of nodes: of the policy's nodes, then of the engines' nodes if they are of another kind
        (`pool`)."""
        return (self.links,) if self.pool is None else (self.links, self.pool.links)

    @property
    def per_node(self) -> int:
        """Device numbers of a node: the GPUs of the kind with most."""
        return max(kind.gpus_per_node for kind in self.kinds)

    @property
    def nics_per_node(self) -> int:
        """NIC numbers of a node: the NICs of the kind with most."""
        return max(kind.nics_per_node for kind in self.kinds)

    @property
    def devices(self) -> int:
        """Number of devices of all nodes, used or not: nodes · per_node."""
        return self.nodes * self.per_node

    @property
    def nics(self) -> int:
        """Number of NICs of all nodes: nodes · nics_per_node."""
        return self.nodes * self.nics_per_node

    def field_by_node(self, name: str) -> NDArray[np.float64]:
        """Returns the value of the field `name` of `Links` for each node, float64 [nodes]. Raises AttributeError for an
        unknown field."""
        values = np.full(self.nodes, getattr(self.links, name), np.float64)
        if self.pool is not None:
            values[self.pool.first_node :] = getattr(self.pool.links, name)
        return values

    def node(self, devices: Ints) -> Ints:
        """Returns the number of the node of each device: device // per_node."""
        return devices // self.per_node

    def nic(self, devices: Ints) -> Ints:
        """Returns the number of the NIC that serves each device, counted over all nodes: NIC i of node n is n ·
        nics_per_node + i."""
        node, gpu = np.divmod(devices, self.per_node)
        nics, gpus = (self.field_by_node(name).astype(np.int64)[node] for name in ("nics_per_node", "gpus_per_node"))
        return node * self.nics_per_node + np.minimum(gpu, gpus - 1) * nics // gpus
