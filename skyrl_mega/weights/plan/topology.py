"""Where the ranks of two layouts sit: devices, nodes and NICs, and how fast the links between them are.

A device is one integer, node · gpus_per_node + GPU. A node's GPUs are dealt to its NICs in contiguous runs; with as
many NICs as GPUs, each GPU has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from skyrl_mega.cluster.place import RunPlacement
from skyrl_mega.config.schema import ClusterConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Links:
    """A node's inside: how many GPUs and NICs it has (at most as many), and speeds in GB/s (10⁹ bytes) each way."""

    gpus_per_node: int = 8
    nics_per_node: int = 8
    nic_gb_s: float = 50.0
    """One NIC."""
    fabric_gb_s: float = 450.0
    """One GPU to the others of its node (NVLink)."""
    device_gb_s: float = 1500.0
    """A copy within one device's memory."""

    def __post_init__(self) -> None:
        if not 1 <= self.nics_per_node <= self.gpus_per_node:
            raise ValueError(f"{self.nics_per_node} NICs for the {self.gpus_per_node} GPUs of a node")

    @classmethod
    def from_config(cls, cluster: ClusterConfig) -> Links:
        """What `cluster` says of its nodes."""
        given = cluster.topology
        return cls(
            gpus_per_node=cluster.gpus_per_node,
            nics_per_node=given.nics_per_node or cluster.gpus_per_node,
            nic_gb_s=given.nic_gb_s,
            fabric_gb_s=given.fabric_gb_s,
            device_gb_s=given.device_gb_s,
        )


@dataclass(frozen=True)
class Topology:
    """On which device each source rank and each target rank sits."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    links: Links = field(default_factory=Links)

    @classmethod
    def from_placement(cls, placement: RunPlacement, links: Links) -> Topology:
        """The devices of a run's policy ranks and engine workers."""
        return cls(placement.policy, placement.engines, replace(links, gpus_per_node=placement.per_node))

    @classmethod
    def apart(cls, sources: int, targets: int, links: Links = Links(), *, engine: int = 1) -> Topology:
        """Devices of their own: source ranks first, target ranks after them, for layouts that no run's settings gave.

        Target ranks come in engines of `engine` ranks, and one that fits into a node never straddles two.
        """
        return cls(tuple(range(sources)), tuple(_packed(sources, targets, engine, links.gpus_per_node)), links)

    @classmethod
    def shared(cls, sources: int, targets: int, links: Links = Links()) -> Topology:
        """The same devices: source rank r and target rank r sit on device r."""
        return cls(tuple(range(sources)), tuple(range(targets)), links)

    @classmethod
    def one_node(cls, sources: int, targets: int) -> Topology:
        """Every rank has a device of its own, all in one node: source ranks first."""
        return cls.apart(sources, targets, Links(gpus_per_node=sources + targets, nics_per_node=1))

    @property
    def nodes(self) -> int:
        """Nodes up to the last device that is used."""
        return max((*self.sources, *self.targets)) // self.links.gpus_per_node + 1

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.links.gpus_per_node

    @property
    def nics(self) -> int:
        """NICs of all nodes."""
        return self.nodes * self.links.nics_per_node

    def node(self, devices: Ints) -> Ints:
        """The node of each device."""
        return devices // self.links.gpus_per_node

    def nic(self, devices: Ints) -> Ints:
        """The NIC of each device, counted over all nodes."""
        node, gpu = np.divmod(devices, self.links.gpus_per_node)
        return node * self.links.nics_per_node + gpu * self.links.nics_per_node // self.links.gpus_per_node


def _packed(first: int, count: int, engine: int, node: int) -> Iterator[int]:
    """Devices for `count` ranks from device `first` on, engine by engine."""
    at = first
    for rank in range(count):
        if rank % engine == 0 and engine <= node < at % node + engine:
            at += node - at % node
        yield at
        at += 1
