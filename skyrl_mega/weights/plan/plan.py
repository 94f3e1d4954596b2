"""The transfer plan: which box of which tensor goes from which rank to which ranks. Pure, and it needs no process.

`plan(source, target)` serves the weight sync (through `sync_plan`, its only caller for a run) and the export at the end
of a run (`hf_checkpoint.load.save`, from policy ranks to the ranks that write files). It does not serve loading, where
each rank reads the boxes of its own shard from the files, nor checkpoints and `skyrl_mega.export`, which read and write
boxes of files: those share boxes and layouts with it, not the plan.

It knows where ranks are (`topology`), what is moved (`intersect`), and who moves it (`assign`); `cost` reads bytes and
seconds off it.
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
"""A part is at most this large (one row at least), so that it can be dealt out and fits a bucket."""
SLABS_PER_RANK = 64
"""… and at most this share of a rank's mean: parts are whole, so they bound how evenly links are loaded."""


@dataclass(frozen=True)
class Plan:
    """All transfers between two layouts, in one order that every rank shares."""

    demand: TransferClasses
    """What is moved, who holds it and who wants it."""
    routes: tuple[Route, ...]
    """Who brings what to whom, sorted by source and receivers."""
    topology: Topology
    """Where the ranks sit."""

    @property
    def parts(self) -> TransferTable:
        """What is moved."""
        return self.demand.parts

    @property
    def sources(self) -> int:
        """Ranks of the source layout."""
        return len(self.topology.sources)

    @property
    def targets(self) -> int:
        """Ranks of the target layout."""
        return len(self.topology.targets)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of all that is moved: tensors, parts, routes and devices. Plans of the same
        digest move the same bytes between the same ranks."""
        parts, t = self.parts, self.topology
        tensors = [[name, list(shape)] for name, shape in parts.tensors.items()]
        ends = [[route.source, list(route.receivers)] for route in self.routes]
        text = json.dumps([tensors, ends, list(t.sources), list(t.targets), asdict(t.links)])
        found = hashlib.sha256(text.encode())
        for column in (parts.tensor, parts.start, parts.shape, parts.nbytes, *(route.parts for route in self.routes)):
            found.update(json.dumps(column.shape).encode() + np.ascontiguousarray(column, np.int64).tobytes())
        return found.hexdigest()[:16]

    @cached_property
    def route_bytes(self) -> Ints:
        """Bytes of each route's parts [routes]."""
        return np.array([self.parts.nbytes[route.parts].sum() for route in self.routes], np.int64)

    def from_source(self, rank: int) -> list[Route]:
        """The routes that source rank `rank` sends."""
        return [route for route in self.routes if route.source == rank]

    def to_target(self, rank: int) -> list[Route]:
        """The routes that bring something to target rank `rank`, first or handed on."""
        return [route for route in self.routes if rank in route.receivers]

    @cached_property
    def bytes_out(self) -> list[int]:
        """Bytes that each source rank hands to first receivers, those on its own device too."""
        total = [0] * self.sources
        for route, size in zip(self.routes, self.route_bytes.tolist(), strict=True):
            total[route.source] += size
        return total

    @cached_property
    def bytes_in(self) -> list[int]:
        """Bytes that each target rank gets, over whatever link: what it stores, once."""
        total = [0] * self.targets
        for route, size in zip(self.routes, self.route_bytes.tolist(), strict=True):
            for rank in route.receivers:
                total[rank] += size
        return total


def plan(
    source: Layout, target: Layout, topology: Topology | None = None, itemsize: int | Callable[[str], int] = 2
) -> Plan:
    """Every element of every target piece once, each from one source rank that holds it.

    Args:
        source: what is held.
        target: what is wanted.
        topology: where the ranks sit; None puts each on a device of its own, all in one node.
        itemsize: bytes of one element on the wire, of all tensors or by name.

    Raises:
        ValueError: a target box is not covered by the source, the layouts disagree about a shape (it names the
        tensor), or the topology has another number of ranks.
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
    demand = cut(source, target, sizes, min(SLAB_BYTES, whole // (SLABS_PER_RANK * ranks)))
    return Plan(demand, choose(demand, topology), topology)
