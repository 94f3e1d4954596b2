"""The cost of a plan: bytes over every link, predicted seconds, a lower bound, and host time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from skyrl_mega.weights.plan.intersect import Ints, TransferClasses, unique_rows
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.plan.topology import Topology

GB = 1e9

PART_S = 2e-5
"""Host seconds for each part in a first sync: locating the part, and the table. Measured with
benchmarks/sync_overhead.py: 18 µs.
"""
BUCKET_S = 3e-4
"""Host seconds for each bucket in every sync. Measured with benchmarks/sync_overhead.py: 50 to 290 µs; one host is
three times as fast as another.
"""
CHECKSUM_S = 5e-5
"""Additional host seconds for each bucket with checksums. Measured with benchmarks/sync_overhead.py: 25 to 35 µs."""
LAUNCH_S = 5e-5
"""Seconds to launch a Triton kernel or an NCCL message. Assumed: both are known to take 10 to 50 µs."""
COMPILE_S = 2.0
"""Seconds for Triton to compile two or three kernels missing from the cache: 0.7 s each, measured without a GPU."""


@dataclass(frozen=True)
class Cost:
    """The bytes that an execution of a plan moves, by link and by rank, and the predicted seconds.

    A value for several devices of a node crosses the network to the first of these devices, which forwards the value to
    the others.
    """

    topology: Topology
    nic_out: Ints
    """Bytes sent to other nodes, [NICs of all nodes]."""
    nic_in: Ints
    """Bytes received from other nodes, [NICs of all nodes]."""
    fabric_out: Ints
    """Bytes sent to other devices of the node, [devices]."""
    fabric_in: Ints
    """Bytes received from other devices of the node, [devices]."""
    local: Ints
    """Bytes copied within the device, [devices]."""
    rank_out: Ints
    """Bytes sent over any link, [source ranks]."""
    rank_in: Ints
    """Bytes received over any link, [target ranks]."""
    bound: float
    """Lower bound in seconds; see `lower_bound`."""

    @property
    def node_out(self) -> Ints:
        """Bytes that each node sends to other nodes, [nodes]."""
        return self.nic_out.reshape(self.topology.nodes, -1).sum(1)

    @property
    def node_in(self) -> Ints:
        """Bytes that each node receives from other nodes, [nodes]."""
        return self.nic_in.reshape(self.topology.nodes, -1).sum(1)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Kind of link (`nic_out`, `nic_in`, `fabric_out`, `fabric_in`, `device`) → seconds of the busiest link of that
        kind: its bytes over its speed."""
        kinds = {
            "nic_out": (self.nic_out, "nic_gb_s"),
            "nic_in": (self.nic_in, "nic_gb_s"),
            "fabric_out": (self.fabric_out, "fabric_gb_s"),
            "fabric_in": (self.fabric_in, "fabric_gb_s"),
            "device": (self.local, "device_gb_s"),
        }
        nodes = self.topology.nodes
        return {
            kind: float((carried.reshape(nodes, -1).max(1) / (self.topology.field_by_node(speed) * GB)).max())
            for kind, (carried, speed) in kinds.items()
        }

    @property
    def predicted(self) -> float:
        """Predicted seconds of the transfer: the largest entry of `seconds`, as if all links worked at once at full
        speed."""
        return max(self.seconds.values())


@dataclass(frozen=True)
class HostTime:
    """Core seconds of the busiest process of a sync. GPUs and links may wait for this process."""

    first: float
    """Seconds of a first sync, including locating every part and compiling kernels."""
    later: float
    """Seconds of a later sync without checksums."""
    checksums: float
    """Seconds of a later sync with checksums."""


def host_time(plan: Plan, bucket_bytes: int) -> HostTime:
    """Returns an estimate of the host's core seconds for a sync on GPUs, in the busiest process: Python, launches and,
    in the first sync, compilation.

    Args:
        plan: The plan.
        bucket_bytes: Maximum size of a message.
    """
    parts, nbytes = np.zeros((2, plan.sources + plan.targets), np.int64)
    for route, size in zip(plan.routes, plan.route_bytes.tolist(), strict=True):
        for process in (route.source, *(plan.sources + receiver for receiver in route.receivers)):
            parts[process] += len(route.parts)
            nbytes[process] += size
    buckets = -(-int(nbytes.max(initial=0)) // bucket_bytes)
    later = buckets * (BUCKET_S + 2 * LAUNCH_S)
    first = int(parts.max(initial=0)) * PART_S + later + COMPILE_S
    return HostTime(first, later, later + buckets * (CHECKSUM_S + LAUNCH_S))


def cost(plan: Plan) -> Cost:
    """Returns the bytes that an execution of a plan moves, by link and by rank, and the lower bound of its time."""
    t = plan.topology
    source_device, target_device = np.array(t.sources), np.array(t.targets)
    size = plan.route_bytes
    source = np.array([route.source for route in plan.routes], np.int64)
    first = np.array([route.receivers[0] for route in plan.routes], np.int64)
    more = np.array([len(route.receivers) - 1 for route in plan.routes], np.int64)
    rest = np.array([rank for route in plan.routes for rank in route.receivers[1:]], np.int64)
    # Every hop moves bytes between two devices.
    start = np.concatenate([source_device[source], np.repeat(target_device[first], more)])
    end = np.concatenate([target_device[first], target_device[rest]])
    moved = np.concatenate([size, np.repeat(size, more)])
    near = start == end
    far = t.node(start) != t.node(end)
    within = ~near & ~far
    return Cost(
        topology=t,
        nic_out=_total(t.nic(start[far]), moved[far], t.nics),
        nic_in=_total(t.nic(end[far]), moved[far], t.nics),
        fabric_out=_total(start[within], moved[within], t.devices),
        fabric_in=_total(end[within], moved[within], t.devices),
        local=_total(start[near], moved[near], t.devices),
        rank_out=np.array(plan.bytes_out, np.int64),
        rank_in=np.array(plan.bytes_in, np.int64),
        bound=lower_bound(plan.demand, t),
    )


def imbalance(carried: Ints) -> float:
    """Returns the load of the busiest link over the mean of all links with any load; 1 if no link has any.

    Args:
        carried: Bytes carried by each link.
    """
    used = carried[carried > 0]
    return float(used.max() / used.mean()) if len(used) else 1.0


def lower_bound(demand: TransferClasses, topology: Topology) -> float:
    """Returns a lower bound, in seconds, of the transfer time of any plan for this demand over these links, all working
    at once; host time is not included. Copies within a device count as free.

    - A node must receive once everything wanted but not held by the node's ranks, over the wanting ranks' NICs; data
      for only some NICs must fit through these.
    - The same holds for senders: data on only some NICs must leave through these, to every node lacking the data.
    - A device must receive everything wanted but not held there, over the fabric and the NIC.
    """
    nic, fabric, stride = (
        topology.field_by_node("nic_gb_s"),
        topology.field_by_node("fabric_gb_s"),
        topology.nics_per_node,
    )
    senders = topology.node(np.array(topology.sources))
    weight = np.bincount(demand.kind, demand.parts.nbytes, len(demand.holders))  # exact below 2⁵³
    source_device, target_device = np.array(topology.sources), np.array(topology.targets)
    held = _spread(demand.holders, topology.node(source_device), topology.nodes)
    wanted = _spread(demand.takers, topology.node(target_device), topology.nodes)
    lacking = wanted & ~held
    sending = _spread(demand.holders, topology.nic(source_device), topology.nics)
    receiving = _spread(demand.takers, topology.nic(target_device), topology.nics)
    bounds = [_narrowest(sending, weight * lacking.sum(1)) / (nic[senders].max() * GB)]
    for node in range(topology.nodes):
        nics = slice(node * stride, (node + 1) * stride)
        bounds.append(_narrowest(receiving[:, nics], weight * lacking[:, node]) / (nic[node] * GB))
    held_on = _spread(demand.holders, source_device, topology.devices)
    wanted_on = _spread(demand.takers, target_device, topology.devices)
    inflow = (weight @ (wanted_on & ~held_on)).reshape(topology.nodes, -1).max(1)
    return max(*bounds, float((inflow / ((fabric + nic) * GB)).max()))


def _spread(ranks: NDArray[np.bool_], place: Ints, places: int) -> NDArray[np.bool_]:
    """Returns a mask [classes, places], True if any of the class's ranks [classes, ranks] is at the place."""
    membership = np.zeros((len(place), places), np.float32)
    membership[np.arange(len(place)), place] = 1
    return ranks.astype(np.float32) @ membership > 0


def _narrowest(allowed: NDArray[np.bool_], weight: NDArray[np.number]) -> float:
    """Returns the least possible bytes on the busiest link if class k may only use the links `allowed[k]`."""
    needed = weight > 0
    if not needed.any():
        return 0.0
    sets, which = unique_rows(allowed[needed])
    total = np.bincount(which, weight[needed], len(sets))
    sets = np.concatenate([sets, np.any(sets, axis=0, keepdims=True)])
    outside = sets[:-1].astype(np.float32) @ (~sets).T.astype(np.float32)  # [set, larger set]: links not in the larger
    return float(((outside == 0).T @ total / sets.sum(1)).max())


def _total(place: Ints, moved: Ints, places: int) -> Ints:
    """Returns the sum of bytes at each place."""
    total = np.zeros(places, np.int64)
    np.add.at(total, place, moved)
    return total
