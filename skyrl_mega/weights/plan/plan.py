"""The transfer plan: the boxes of every tensor to move, from rank to rank. Pure; needs no process.

`plan(source, target)` serves the weight sync (through `sync_plan`, the only caller in a run) and the export at the end
of a run (`hf_checkpoint.load.save`, from policy ranks to the ranks writing files). Loading does not use the plan: each
rank reads the boxes of its own shard from the files. Checkpoints and `skyrl_mega.export` read and write boxes of files
and share only boxes and layouts with this module.

`topology` places the ranks, `intersect` determines the parts, `assign` chooses senders and receivers; `cost` derives
bytes and seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod

import numpy as np

from skyrl_mega.parallel.box import Layout
from skyrl_mega.weights.plan.assign import Route, choose
from skyrl_mega.weights.plan.intersect import Ints, TransferClasses, TransferTable, cut
from skyrl_mega.weights.plan.topology import Topology

SLAB_BYTES = 32 << 20
"""Maximum bytes of a part (at least one row), small enough to be distributed and to fit into a bucket."""
SLABS_PER_RANK = 64
"""Minimum number of maximum-size parts in a rank's mean load. Parts are indivisible, so the size limits how evenly
links are loaded.
"""


@dataclass(frozen=True)
class Plan:
    """All transfers between two layouts, in an order shared by every rank."""

    demand: TransferClasses
    """Parts to move, holders and receivers."""
    routes: tuple[Route, ...]
    """Senders and receivers of all parts, sorted by source and receivers."""
    topology: Topology
    """Devices of the ranks."""

    @property
    def parts(self) -> TransferTable:
        """Table of the parts to move: tensor, box and bytes of each."""
        return self.demand.parts

    @property
    def sources(self) -> int:
        """Number of ranks in the source layout."""
        return len(self.topology.sources)

    @property
    def targets(self) -> int:
        """Number of ranks in the target layout."""
        return len(self.topology.targets)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of tensors, parts, routes and devices. Plans of the same digest move the same
        bytes between the same ranks.
        """
        parts, t = self.parts, self.topology
        tensors = [[name, list(shape)] for name, shape in parts.tensors.items()]
        ends = [[route.source, list(route.receivers)] for route in self.routes]
        text = json.dumps([tensors, ends, list(t.sources), list(t.targets), asdict(t.links)])
        text += json.dumps(asdict(t.pool)) if t.pool else ""
        hasher = hashlib.sha256(text.encode())
        for column in (parts.tensor, parts.start, parts.shape, parts.nbytes, *(route.parts for route in self.routes)):
            hasher.update(json.dumps(column.shape).encode() + np.ascontiguousarray(column, np.int64).tobytes())
        return hasher.hexdigest()[:16]

    @cached_property
    def route_bytes(self) -> Ints:
        """Bytes of each route's parts, counted once whatever the number of receivers, [routes]."""
        return np.array([self.parts.nbytes[route.parts].sum() for route in self.routes], np.int64)

    @cached_property
    def bytes_out(self) -> list[int]:
        """Bytes sent by each source rank to first receivers, including receivers on the same device."""
        total = [0] * self.sources
        for route, size in zip(self.routes, self.route_bytes.tolist(), strict=True):
            total[route.source] += size
        return total

    @cached_property
    def bytes_in(self) -> list[int]:
        """Bytes received by each target rank over any link; each stored byte arrives once."""
        total = [0] * self.targets
        for route, size in zip(self.routes, self.route_bytes.tolist(), strict=True):
            for rank in route.receivers:
                total[rank] += size
        return total


def plan(
    source: Layout,
    target: Layout,
    topology: Topology | None = None,
    itemsize: int | Callable[[str], int] = 2,
    slab_bytes: int | None = None,
) -> Plan:
    """Returns a plan that delivers every element of every target piece, once, from a source rank holding the element.

    Args:
        source: Layout of the holders.
        target: Layout of the receivers.
        topology: Devices of the ranks; None puts each rank on a separate device, all in one node.
        itemsize: Bytes of an element on the wire, for all tensors or by name.
        slab_bytes: Maximum bytes of a part (at least one row); None: `SLAB_BYTES`, or less for a small model.

    Raises:
        ValueError: The source does not cover a target box, the layouts disagree about a shape (names the tensor), or
            the topology is for another number of ranks.
    """
    topology = topology or Topology.one_node(len(source.shards), len(target.shards))
    if (len(topology.sources), len(topology.targets)) != (len(source.shards), len(target.shards)):
        raise ValueError(
            f"the topology has {len(topology.sources)} + {len(topology.targets)} ranks, the layouts "
            f"{len(source.shards)} + {len(target.shards)}"
        )
    sizes = [itemsize if isinstance(itemsize, int) else itemsize(name) for name in target.tensors]
    whole = sum(prod(shape) * size for shape, size in zip(target.tensors.values(), sizes, strict=True))
    ranks = max(len(source.shards), len(target.shards), 1)
    slab_bytes = slab_bytes or min(SLAB_BYTES, whole // (SLABS_PER_RANK * ranks))
    demand = cut(source, target, sizes, slab_bytes)
    return Plan(demand, choose(demand, topology), topology)
