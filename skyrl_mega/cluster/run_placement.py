"""Node and device of every process: a single order, shared by the dry run, Ray and the weight-sync plan.

Policy ranks come first, then the ranks of a separate reference, then critic ranks, then engines. `plan_placement`
computes the placement from the settings alone. `actual_placement` describes running processes, with the same numbers as
far as the placement is as planned.

A device is an integer, node · per_node + GPU. On CPUs every process counts as a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappush, heapreplace
from itertools import accumulate, chain, count
from typing import NamedTuple

from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.placement import spread
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import critic_layout, critic_ranks, engine_ranks, policy_ranks, reference_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.pools import PoolConfig, PoolsConfig

SHOWN = 4
"""Number of misplaced processes named in the message."""


@dataclass(frozen=True)
class RunPlacement:
    """The device of every process of a run."""

    policy: tuple[int, ...]
    """Device of each policy rank."""
    reference: tuple[int, ...]
    """Device of each rank of a reference with a layout of its own."""
    engines: tuple[int, ...]
    """Device of each engine worker: the workers of engine 0, of engine 1, …"""
    per_node: int
    """Devices per node."""
    critic: tuple[int, ...] = ()
    """Device of each critic rank."""

    def node(self, device: int) -> int:
        """Returns the number of the node that holds a device: device // per_node."""
        return device // self.per_node

    @property
    def nodes(self) -> int:
        """Number of nodes up to the last used node: the highest node number plus 1."""
        return self.node(max((*self.policy, *self.reference, *self.critic, *self.engines))) + 1


def plan_placement(config: Config) -> RunPlacement:
    """Returns the placement of every process according to the settings.

    On GPUs consecutive ranks fill whole nodes, and the remaining ranks go to the node with the most free GPUs; an
    engine spans two nodes only if it is larger than a node. If `cluster.nodes` do not suffice, higher node numbers
    follow, without an error (`check_nodes`). On CPUs processes are spread over `cluster.nodes`; tensor parallel groups
    and engines stay whole. Nodes of `cluster.pools.engines` follow those of `cluster.nodes`.
    """
    nodes, pool = config.cluster.nodes, config.cluster.pools.engines
    if config.cluster.device == "cpu":
        return _on_cpus(config, nodes_on_cpus(config, nodes, pool.nodes if pool else 0))
    per_node = max(config.cluster.gpus_per_node, pool.gpus_per_node if pool else 0)
    free = _Free(config.cluster.gpus_per_node, nodes, devices=per_node)
    policy, reference = free.ranks(policy_ranks(config)), free.ranks(reference_ranks(config))
    critic = free.ranks(critic_ranks(config))
    size = engine_ranks(config.rollout)
    if config.cluster.shared:
        engines = tuple(range(config.rollout.engines * size))
    else:
        room = _Free(pool.gpus_per_node, pool.nodes, devices=per_node, first=nodes) if pool else free
        engines = room.groups(config.rollout.engines, size)
    return RunPlacement(policy, reference, engines, per_node, critic)


def check_nodes(config: Config, training: bool = True) -> None:
    """Raises an error unless every group of GPU processes fits on `cluster.nodes` nodes; `config.checks.devices` only
    counts GPUs.

    The free GPUs of several nodes together may suffice for an engine, although no single node can hold the engine.

    Args:
        config: The settings.
        training: True if policy, reference and critic use GPUs too; False counts only engines.

    Raises:
        UserError: The processes need more nodes.
    """
    if config.cluster.pools.engines is not None:
        _check_pool(config, config.cluster.pools.engines)
        rollout, cluster = replace(config.rollout, engines=0), replace(config.cluster, pools=PoolsConfig())
        return check_nodes(replace(config, rollout=rollout, cluster=cluster)) if training else None
    nodes, per_node, size = config.cluster.nodes, config.cluster.gpus_per_node, engine_ranks(config.rollout)
    engines = config.rollout.engines
    # Fix the number of ranks: unset ranks grow with the number of nodes, and then no number would suffice.
    policy = replace(config.policy, ranks=policy_ranks(config))
    reference = replace(config.reference, ranks=reference_ranks(config) or None)
    critic = replace(config.critic, ranks=critic_ranks(config) or None)

    def needed(nodes: int) -> int:
        """Returns the number of nodes used if `nodes` are available."""
        if not training:
            return -(-engines // (per_node // size))
        cluster = replace(config.cluster, nodes=nodes)
        return plan_placement(replace(config, policy=policy, reference=reference, critic=critic, cluster=cluster)).nodes

    if (used := needed(nodes)) <= nodes:
        return
    enough = next(n for n in count(used) if needed(n) <= n)  # with more nodes the packing is looser
    groups = [f"{engines} engines of {size} GPUs"] if engines else []
    if training:
        ranks = {"policy": policy.ranks, "reference": reference.ranks, "critic": critic.ranks}
        groups = [*(f"{name} {count}" for name, count in ranks.items() if count), *groups]
    raise UserError(
        f"{' + '.join(groups)} do not fit there: the GPUs left of a node of {per_node} "
        "(cluster.gpus_per_node) do not hold a whole engine",
        key="cluster.nodes",
        value=nodes,
        fix=f"give cluster.nodes={enough}, fewer rollout.engines or a smaller rollout.tensor",
    )


def pool_nodes_needed(config: Config, pool: PoolConfig) -> int:
    """Returns the number of nodes of the pool for all engines, each within a node unless it is larger."""
    engines, size = config.rollout.engines, engine_ranks(config.rollout)
    whole = pool.gpus_per_node // size
    return -(-engines // whole) if whole else -(-engines * size // pool.gpus_per_node)


def _check_pool(config: Config, pool: PoolConfig) -> None:
    """Raises UserError unless all engines fit on the nodes of the pool."""
    engines, size, needed = config.rollout.engines, engine_ranks(config.rollout), pool_nodes_needed(config, pool)
    if needed > pool.nodes:
        raise UserError(
            f"{engines} engines of {size} GPUs need {needed} nodes of {pool.gpus_per_node} GPUs "
            "(cluster.pools.engines.gpus_per_node)",
            key="cluster.pools.engines.nodes",
            value=pool.nodes,
            fix=f"give at least {needed}, fewer rollout.engines or a smaller rollout.tensor",
        )


class _Free:
    """Free GPUs of identical nodes; a node is added when no node offers enough room.

    Models Ray's packing of placement groups (seen with Ray 2.60 on nodes of 8 GPUs): each bundle of GPUs goes to the
    node with the most free GPUs.

    Args:
        per_node: GPUs of a node.
        nodes: Number of nodes.
        devices: Device numbers of a node, at least `per_node`.
        first: Number of the first node.
    """

    def __init__(self, per_node: int, nodes: int, *, devices: int, first: int = 0) -> None:
        self.per_node, self.devices, self.first = per_node, devices, first
        self.nodes = [(0, node) for node in range(nodes)]
        """Heap of (number of taken GPUs, node); a node's first GPUs are taken first."""

    def ranks(self, count: int) -> tuple[int, ...]:
        """Returns the devices of ranks: whole nodes first, then a node for the rest."""
        sizes = [min(self.per_node, count - first) for first in range(0, count, self.per_node)]
        return tuple(device for size in sizes for device in self._take(size, 1))

    def groups(self, count: int, size: int) -> tuple[int, ...]:
        """Returns the devices of `count` groups of `size`, each within a node, filling node after node.

        Numbered like running actors in `placement.by_gpu`: nodes with the most groups first.
        """
        if size > self.per_node:  # no real run has such groups
            return self._whole_nodes(count, size)
        places: list[range] = []
        while len(places) < count:
            block = self._take(size, count - len(places))
            places += [block[first : first + size] for first in range(0, len(block), size)]
        groups = Counter(place[0] // self.devices for place in places)
        places.sort(key=lambda place: (-groups[place[0] // self.devices], place[0]))
        return tuple(device for place in places for device in place)

    def _take(self, size: int, max_groups: int) -> range:
        """Takes up to `max_groups` groups of `size` from a single node and returns the devices.

        Chooses the first node with the most free GPUs, or a new node if no group fits.
        """
        if not self.nodes or self.nodes[0][0] + size > self.per_node:
            heappush(self.nodes, (0, len(self.nodes)))
        taken, node = self.nodes[0]
        gpus = min((self.per_node - taken) // size, max_groups) * size
        heapreplace(self.nodes, (taken + gpus, node))
        first = (self.first + node) * self.devices + taken
        return range(first, first + gpus)

    def _whole_nodes(self, count: int, size: int) -> tuple[int, ...]:
        """Returns the devices of groups too large for a node, placed consecutively after all used nodes."""
        node = self.first + max((node for taken, node in self.nodes if taken), default=-1) + 1
        places = (divmod(worker, self.per_node) for worker in range(count * size))
        return tuple((node + further) * self.devices + gpu for further, gpu in places)


class Nodes(NamedTuple):
    """The node of every process, by group."""

    policy: Sequence[int]
    """By rank, like `reference` and `critic`."""
    reference: Sequence[int]
    critic: Sequence[int]
    engines: Sequence[int]
    """By engine."""


def nodes_on_cpus(config: Config, nodes: int, pool: int = 0) -> Nodes:
    """Returns the number of the node of every process on CPUs.

    Every node gets, in order, the same number of units up to rounding; a unit is a tensor parallel group or an engine.
    With `cluster.shared` an engine runs on the node of the policy rank with the number of the engine's first worker.

    Args:
        config: The settings.
        nodes: Number of nodes.
        pool: Number of further nodes for the engines alone; 0 places engines on the same nodes as the rest.
    """
    policy, reference, critic = policy_ranks(config), reference_ranks(config), critic_ranks(config)
    engines, size = config.rollout.engines, engine_ranks(config.rollout)
    units = _tensor_groups(policy, config.policy.layout.tensor)
    if config.reference.layout:
        units += _tensor_groups(reference, config.reference.layout.tensor)
    units += _tensor_groups(critic, critic_layout(config).tensor)
    separate = not config.cluster.shared
    if pool:
        placed = spread(units, range(nodes)) + spread([1] * engines, range(nodes, nodes + pool))
    else:
        placed = spread(units + [1] * engines * separate, range(nodes))
    ends = [*accumulate((policy, reference, critic))]
    ranks = placed[:policy]
    shared = [ranks[min(engine * size, policy - 1)] for engine in range(engines)]
    return Nodes(ranks, placed[policy : ends[1]], placed[ends[1] : ends[2]], placed[ends[2] :] if separate else shared)


def _on_cpus(config: Config, nodes: Nodes) -> RunPlacement:
    """Returns a device per process for given nodes, in order.

    With `cluster.shared` an engine worker shares the device of the policy rank with the same number if both are on the
    same node.
    """
    workers = [node for node in nodes.engines for _ in range(engine_ranks(config.rollout))]
    shares = [config.cluster.shared and [*nodes.policy[w : w + 1]] == [node] for w, node in enumerate(workers)]
    unshared = [node for node, share in zip(workers, shares, strict=True) if not share]
    trained = (nodes.policy, nodes.reference, nodes.critic)
    per_node = max(config.cluster.gpus_per_node, *Counter([*chain(*trained), *unshared]).values())
    used: Counter[int] = Counter()

    def device(node: int) -> int:
        used[node] += 1
        return node * per_node + used[node] - 1

    policy, reference, critic = (tuple(map(device, group)) for group in trained)
    engine_devices = (
        policy[w] if share else device(node) for w, (node, share) in enumerate(zip(workers, shares, strict=True))
    )
    return RunPlacement(policy, reference, tuple(engine_devices), per_node, critic)


def _tensor_groups(ranks: int, tensor: int) -> list[int]:
    """Returns the sizes of groups of consecutive ranks that must stay together."""
    whole, rest = divmod(ranks, tensor)
    return [tensor] * whole + [rest] * bool(rest)


def actual_placement(config: Config, policy: Sequence[Location], engines: Sequence[Location]) -> RunPlacement:
    """Returns the real placement of policy and engines; reference and critic keep their planned places. There may be
    more engines than planned.

    Reference and critic take no part in the weight sync. Nodes are numbered as planned where the processes are on the
    planned nodes.

    Args:
        config: The settings.
        policy: Location of each policy rank.
        engines: Location of each engine's actor.
    """
    planned, size = plan_placement(config), engine_ranks(config.rollout)
    planned_nodes = [planned.node(device) for device in (*planned.policy, *planned.engines[::size])]
    planned_others = [*map(planned.node, planned.reference)], [*map(planned.node, planned.critic)]
    number = _numbers([at.node for at in (*policy, *engines)], planned_nodes, {*chain(*planned_others)})
    ranks, hosts = [number[at.node] for at in policy], [number[at.node] for at in engines]
    if not all(at.gpus for at in policy):
        return _on_cpus(config, Nodes(ranks, *planned_others, hosts))
    index = _indices([*policy, *engines], planned.per_node)
    per_node = max(planned.per_node, *(i + 1 for i in index.values()))

    def devices(places: Sequence[Location]) -> tuple[int, ...]:
        return tuple(number[at.node] * per_node + index[at.node, gpu] for at in places for gpu in at.gpus)

    policy_devices = devices(policy)
    workers = policy_devices[: len(planned.engines)] if config.cluster.shared else devices(engines)
    return RunPlacement(policy_devices, planned.reference, workers, per_node, planned.critic)


def differences(planned: RunPlacement, real: RunPlacement) -> str:
    """Returns a text for the user with the policy ranks and engine workers whose real device is not the planned device,
    at most `SHOWN` by name; "" if all are as planned."""
    lines = []
    for name, want, have in (("policy rank", planned.policy, real.policy), ("worker", planned.engines, real.engines)):
        for number, (a, b) in enumerate(zip(want, have, strict=False)):  # engines that joined have no planned place
            positions = [(p.node(device), device % p.per_node) for p, device in ((planned, a), (real, b))]
            if positions[0] != positions[1]:
                planned_at, found_at = (f"node {node} device {index}" for node, index in positions)
                lines.append(f"{name} {number} on {found_at}, not {planned_at}")
    return "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")


def _numbers(nodes: Sequence[str], planned: Sequence[int], reserved: set[int]) -> dict[str, int]:
    """Returns a number for each node: the number wanted by the first process there, or the first unused and unreserved
    number. Processes without an entry in `planned` want no number."""
    number: dict[str, int] = {}
    for node, want in zip(nodes, planned, strict=False):
        if node not in number and want not in number.values():
            number[node] = want
    spare = (n for n in count() if n not in {*number.values(), *reserved})
    for node in nodes:
        if node not in number:
            number[node] = next(spare)
    return number


def _indices(places: Sequence[Location], per_node: int) -> dict[tuple[str, str], int]:
    """Returns (node, GPU) -> index in the node: the GPU's number, or the position among used GPUs if GPUs are not
    numbered."""
    gpus: dict[str, list[str]] = {}
    for at in places:
        gpus.setdefault(at.node, []).extend(gpu for gpu in at.gpus if gpu not in gpus.get(at.node, ()))
    return {
        (node, gpu): int(gpu) if all(g.isdigit() and int(g) < per_node for g in node_gpus) else i
        for node, node_gpus in gpus.items()
        for i, gpu in enumerate(node_gpus)
    }
