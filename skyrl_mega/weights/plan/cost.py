"""What a plan costs: bytes over every link, the seconds that follow, those that no plan can beat, and the host's."""

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
"""Host, for each part in a first sync: finding it, and the table. Measured with benchmarks/sync_overhead.py: 18 µs."""
BUCKET_S = 3e-4
"""Host, for each bucket in every sync: 50 to 290 µs, measured with it; one host is three times as fast as another."""
CHECKSUM_S = 5e-5
"""… and more for each bucket with checksums: 25 to 35 µs, measured with it."""
LAUNCH_S = 5e-5
"""Starting one kernel of Triton's or one message of NCCL's. Assumed: both are known for 10 to 50 µs."""
COMPILE_S = 2.0
"""Triton compiles two or three kernels where its cache lacks them: 0.7 s each, measured without a GPU."""


@dataclass(frozen=True)
class Cost:
    """Bytes of one execution of a plan. A first receiver hands on to each of the others itself."""

    topology: Topology
    nic_out: Ints
    """[NICs of all nodes] sent to other nodes."""
    nic_in: Ints
    """[NICs of all nodes] received from other nodes."""
    fabric_out: Ints
    """[devices] handed to other devices of the node."""
    fabric_in: Ints
    """[devices] taken from other devices of the node."""
    local: Ints
    """[devices] copied within the device."""
    rank_out: Ints
    """[source ranks] handed out, over whatever link."""
    rank_in: Ints
    """[target ranks] got, over whatever link."""
    bound: float
    """Seconds; see `lower_bound`."""

    @property
    def node_out(self) -> Ints:
        """[nodes] sent to other nodes."""
        return self.nic_out.reshape(self.topology.nodes, -1).sum(1)

    @property
    def node_in(self) -> Ints:
        """[nodes] received from other nodes."""
        return self.nic_in.reshape(self.topology.nodes, -1).sum(1)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By kind of link, how long its busiest one takes."""
        links = self.topology.links
        kinds = {
            "nic_out": (self.nic_out, links.nic_gb_s),
            "nic_in": (self.nic_in, links.nic_gb_s),
            "fabric_out": (self.fabric_out, links.fabric_gb_s),
            "fabric_in": (self.fabric_in, links.fabric_gb_s),
            "device": (self.local, links.device_gb_s),
        }
        return {kind: float(carried.max(initial=0)) / (speed * GB) for kind, (carried, speed) in kinds.items()}

    @property
    def predicted(self) -> float:
        """Seconds when all links work at once at their full speed: those of the busiest link."""
        return max(self.seconds.values())


@dataclass(frozen=True)
class HostTime:
    """Seconds of one core in the busiest process of one sync, in which GPUs and links may have to wait for it."""

    first: float
    """Every part is found, and kernels are compiled."""
    later: float
    checksums: float
    """A later one that proves every part."""


def host_time(plan: Plan, bucket_bytes: int) -> HostTime:
    """What Python does in a sync on GPUs. An estimate.

    Args:
        bucket_bytes: size of a message at most.
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
    """Counts a plan's bytes."""
    t = plan.topology
    source_device, target_device = np.array(t.sources), np.array(t.targets)
    size = plan.route_bytes
    source = np.array([route.source for route in plan.routes], np.int64)
    first = np.array([route.receivers[0] for route in plan.routes], np.int64)
    more = np.array([len(route.receivers) - 1 for route in plan.routes], np.int64)
    rest = np.array([rank for route in plan.routes for rank in route.receivers[1:]], np.int64)
    # Every hop is one move between two devices.
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
    """The busiest link over the mean of those links that carry anything; 1 when none does."""
    used = carried[carried > 0]
    return float(used.max() / used.mean()) if len(used) else 1.0


def lower_bound(demand: TransferClasses, topology: Topology) -> float:
    """Seconds that no plan can beat with these links, all of them working at once.

    - A node must be sent, once, what its ranks want and none of them holds, over the NICs of those that want it; what
      only some NICs may receive must fit through those.
    - The same of senders: what only some NICs can send, to every node that lacks it.
    - A device must get what it wants and does not hold, over the fabric and its NIC.
    """
    links = topology.links
    weight = np.bincount(demand.kind, demand.parts.nbytes, len(demand.holders))  # exact below 2⁵³
    source_device, target_device = np.array(topology.sources), np.array(topology.targets)
    held = _spread(demand.holders, topology.node(source_device), topology.nodes)
    wanted = _spread(demand.takers, topology.node(target_device), topology.nodes)
    lacking = wanted & ~held
    sending = _spread(demand.holders, topology.nic(source_device), topology.nics)
    receiving = _spread(demand.takers, topology.nic(target_device), topology.nics)
    bounds = [_narrowest(sending, weight * lacking.sum(1)) / (links.nic_gb_s * GB)]
    for node in range(topology.nodes):
        nics = slice(node * links.nics_per_node, (node + 1) * links.nics_per_node)
        bounds.append(_narrowest(receiving[:, nics], weight * lacking[:, node]) / (links.nic_gb_s * GB))
    here = _spread(demand.holders, source_device, topology.devices)
    there = _spread(demand.takers, target_device, topology.devices)
    bounds.append(float((weight @ (there & ~here)).max(initial=0)) / ((links.fabric_gb_s + links.nic_gb_s) * GB))
    return max(bounds)


def _spread(ranks: NDArray[np.bool_], place: Ints, places: int) -> NDArray[np.bool_]:
    """[classes, places]: whether one of the class's ranks [classes, ranks] is at the place."""
    there = np.zeros((len(place), places), np.float32)
    there[np.arange(len(place)), place] = 1
    return ranks.astype(np.float32) @ there > 0


def _narrowest(allowed: NDArray[np.bool_], weight: NDArray[np.number]) -> float:
    """Bytes that the busiest link carries at least, when class k may only use the links `allowed[k]`."""
    needed = weight > 0
    if not needed.any():
        return 0.0
    sets, which = unique_rows(allowed[needed])
    total = np.bincount(which, weight[needed], len(sets))
    sets = np.concatenate([sets, np.any(sets, axis=0, keepdims=True)])
    outside = sets[:-1].astype(np.float32) @ (~sets).T.astype(np.float32)  # [set, larger set]: links not in the larger
    return float(((outside == 0).T @ total / sets.sum(1)).max())


def _total(place: Ints, moved: Ints, places: int) -> Ints:
    """Bytes at each place."""
    total = np.zeros(places, np.int64)
    np.add.at(total, place, moved)
    return total
