"""Which process sits on which node and device: one order for the dry run, for Ray and for the weight sync's plan.

Policy ranks come first, then those of a reference of its own, then those of a critic, then engines. `place` says it
from the settings alone; `actual` says it of processes that are up, in the same numbers where they sit as planned.

A device is one integer, node · per_node + GPU. On CPUs every process is a device of its own.
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
from skyrl_mega.config.derived import critic_layout, critic_ranks, engine_ranks, policy_ranks, reference_ranks
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config

SHOWN = 4
"""Processes named of those that are placed otherwise than planned."""


@dataclass(frozen=True)
class RunPlacement:
    """The device of every process of a run."""

    policy: tuple[int, ...]
    """By rank."""
    reference: tuple[int, ...]
    """By rank of a reference with a layout of its own."""
    engines: tuple[int, ...]
    """By worker: those of engine 0, of engine 1, …"""
    per_node: int
    """Devices of a node."""
    critic: tuple[int, ...] = ()
    """By rank."""

    def node(self, device: int) -> int:
        """The node of a device."""
        return device // self.per_node

    @property
    def nodes(self) -> int:
        """Nodes up to the last one that holds something."""
        return self.node(max((*self.policy, *self.reference, *self.critic, *self.engines))) + 1


def place(config: Config) -> RunPlacement:
    """Where the settings put every process.

    On GPUs a node takes as many consecutive ranks as it has GPUs, and what is left of them goes to the node with most
    free GPUs; an engine that fits into a node never straddles two. On CPUs processes are spread over `cluster.nodes`,
    tensor parallel groups and engines whole.
    """
    if config.cluster.device == "cpu":
        return _on_cpus(config, nodes_of_cpus(config, config.cluster.nodes))
    free = _Free(config.cluster.gpus_per_node, config.cluster.nodes)
    policy, reference = free.ranks(policy_ranks(config)), free.ranks(reference_ranks(config))
    critic = free.ranks(critic_ranks(config))
    size = engine_ranks(config.rollout)
    if config.cluster.shared:
        engines = tuple(range(config.rollout.engines * size))
    else:
        engines = free.groups(config.rollout.engines, size)
    return RunPlacement(policy, reference, engines, free.per_node, critic)


def check_nodes(config: Config, training: bool = True) -> None:
    """On GPUs: every group finds a place on `cluster.nodes`, where `config.checks.check_gpus` finds enough GPUs.

    What is left of several nodes may be GPUs enough for an engine, and none of the nodes has room for it.

    Args:
        training: Policy, reference and critic have GPUs too.

    Raises:
        UserError: They need more nodes.
    """
    nodes, per_node, size = config.cluster.nodes, config.cluster.gpus_per_node, engine_ranks(config.rollout)
    engines = config.rollout.engines
    # As many ranks as these nodes give them, also where there are more nodes: else there would never be enough.
    policy = replace(config.policy, ranks=policy_ranks(config))
    reference = replace(config.reference, ranks=reference_ranks(config) or None)
    critic = replace(config.critic, ranks=critic_ranks(config) or None)

    def needed(nodes: int) -> int:
        """Nodes that are used where there are so many."""
        if not training:
            return -(-engines // (per_node // size))
        cluster = replace(config.cluster, nodes=nodes)
        return place(replace(config, policy=policy, reference=reference, critic=critic, cluster=cluster)).nodes

    if (used := needed(nodes)) <= nodes:
        return
    enough = next(n for n in count(used) if needed(n) <= n)  # where there are more, less is packed together
    groups = [f"{engines} engines of {size} GPUs"]
    if training:
        ranks = {"policy": policy.ranks, "reference": reference.ranks, "critic": critic.ranks}
        groups = [*(f"{name} {count}" for name, count in ranks.items() if count), *groups]
    raise UserError(
        f"cluster.nodes = {nodes}: {' + '.join(groups)} have no place there: what is left of a node of {per_node} GPUs "
        f"(cluster.gpus_per_node) does not hold a whole engine; give cluster.nodes={enough}, fewer "
        "rollout.engines or a smaller rollout.tensor"
    )


class _Free:
    """GPUs that are still free, of nodes that are all alike; more nodes are added where these have no room.

    As Ray packs placement groups (seen with Ray 2.60 on nodes of 8 GPUs): what has to be together goes to the node with
    most free GPUs.
    """

    def __init__(self, per_node: int, nodes: int) -> None:
        self.per_node = per_node
        self.nodes = [(0, node) for node in range(nodes)]
        """A heap: how many of a node's GPUs are taken (the first ones), and its number."""

    def ranks(self, count: int) -> tuple[int, ...]:
        """Devices of ranks that fill whole nodes, and then one that has room for the rest."""
        sizes = [min(self.per_node, count - first) for first in range(0, count, self.per_node)]
        return tuple(device for size in sizes for device in self._take(size, 1))

    def groups(self, count: int, size: int) -> tuple[int, ...]:
        """Devices of `count` groups of `size`, each within a node: as many as fit into one node, then the next.

        Numbered as `placement.by_gpu` numbers those that are up: nodes with most groups first.
        """
        if size > self.per_node:  # no run has it
            return self._whole_nodes(count, size)
        places: list[range] = []
        while len(places) < count:
            taken = self._take(size, count - len(places))
            places += [taken[first : first + size] for first in range(0, len(taken), size)]
        groups = Counter(place[0] // self.per_node for place in places)
        places.sort(key=lambda place: (-groups[place[0] // self.per_node], place[0]))
        return tuple(device for place in places for device in place)

    def _take(self, size: int, most: int) -> range:
        """Devices of as many groups of `size` as have room on one node, of `most`: the first of the nodes with most
        free GPUs, a new one if that has not enough for one."""
        if not self.nodes or self.nodes[0][0] + size > self.per_node:
            heappush(self.nodes, (0, len(self.nodes)))
        taken, node = self.nodes[0]
        gpus = min((self.per_node - taken) // size, most) * size
        heapreplace(self.nodes, (taken + gpus, node))
        first = node * self.per_node + taken
        return range(first, first + gpus)

    def _whole_nodes(self, count: int, size: int) -> tuple[int, ...]:
        """Groups that no node can hold, one after the other behind all that is taken."""
        first = (max((node for taken, node in self.nodes if taken), default=-1) + 1) * self.per_node
        return tuple(range(first, first + count * size))


class Nodes(NamedTuple):
    """The node of every process, by group."""

    policy: Sequence[int]
    """By rank, as the next two."""
    reference: Sequence[int]
    critic: Sequence[int]
    engines: Sequence[int]
    """By engine."""


def nodes_of_cpus(config: Config, nodes: int) -> Nodes:
    """On CPUs: an equal share of the processes for each node, in order. A tensor parallel group stays on one node; with
    `cluster.shared` an engine is where its policy ranks are."""
    policy, reference, critic = policy_ranks(config), reference_ranks(config), critic_ranks(config)
    engines, size = config.rollout.engines, engine_ranks(config.rollout)
    units = _tensor_groups(policy, config.policy.layout.tensor)
    if config.reference.layout:
        units += _tensor_groups(reference, config.reference.layout.tensor)
    units += _tensor_groups(critic, critic_layout(config).tensor)
    apart = not config.cluster.shared
    where = spread(units + [1] * engines * apart, range(nodes))
    ends = [*accumulate((policy, reference, critic))]
    ranks = where[:policy]
    beside = [ranks[min(engine * size, policy - 1)] for engine in range(engines)]
    return Nodes(ranks, where[policy : ends[1]], where[ends[1] : ends[2]], where[ends[2] :] if apart else beside)


def _on_cpus(config: Config, nodes: Nodes) -> RunPlacement:
    """Devices from nodes: one for each process, in order; a worker shares that of the policy rank of its number where
    `cluster.shared` says so and both are on one node."""
    workers = [node for node in nodes.engines for _ in range(engine_ranks(config.rollout))]
    shares = [config.cluster.shared and [*nodes.policy[w : w + 1]] == [node] for w, node in enumerate(workers)]
    own = [node for node, share in zip(workers, shares, strict=True) if not share]
    trained = (nodes.policy, nodes.reference, nodes.critic)
    per_node = max(config.cluster.gpus_per_node, *Counter([*chain(*trained), *own]).values())
    used: Counter[int] = Counter()

    def device(node: int) -> int:
        used[node] += 1
        return node * per_node + used[node] - 1

    policy, reference, critic = (tuple(map(device, group)) for group in trained)
    found = (policy[w] if share else device(node) for w, (node, share) in enumerate(zip(workers, shares, strict=True)))
    return RunPlacement(policy, reference, tuple(found), per_node, critic)


def _tensor_groups(ranks: int, tensor: int) -> list[int]:
    """Consecutive ranks that belong together."""
    whole, rest = divmod(ranks, tensor)
    return [tensor] * whole + [rest] * bool(rest)


def actual(config: Config, policy: Sequence[Location], engines: Sequence[Location]) -> RunPlacement:
    """Where policy and engines really are; reference and critic, which no plan has, are left where they are planned.

    Nodes have the numbers of the plan where processes are on nodes as planned.

    Args:
        policy: By rank.
        engines: By engine.
    """
    planned, size = place(config), engine_ranks(config.rollout)
    wanted = [planned.node(device) for device in (*planned.policy, *planned.engines[::size])]
    others = [*map(planned.node, planned.reference)], [*map(planned.node, planned.critic)]
    number = _numbers([at.node for at in (*policy, *engines)], wanted, {*chain(*others)})
    ranks, hosts = [number[at.node] for at in policy], [number[at.node] for at in engines]
    if not all(at.gpus for at in policy):
        return _on_cpus(config, Nodes(ranks, *others, hosts))
    index = _indices([*policy, *engines], planned.per_node)
    per_node = max(planned.per_node, *(i + 1 for i in index.values()))

    def devices(places: Sequence[Location]) -> tuple[int, ...]:
        return tuple(number[at.node] * per_node + index[at.node, gpu] for at in places for gpu in at.gpus)

    own = devices(policy)
    workers = own[: len(planned.engines)] if config.cluster.shared else devices(engines)
    return RunPlacement(own, planned.reference, workers, per_node, planned.critic)


def differences(planned: RunPlacement, found: RunPlacement) -> str:
    """For people: processes that are not on the node and device that were planned, the first few of them."""
    lines = []
    for name, want, have in (("policy rank", planned.policy, found.policy), ("worker", planned.engines, found.engines)):
        for number, (a, b) in enumerate(zip(want, have, strict=True)):
            at = [(p.node(device), device % p.per_node) for p, device in ((planned, a), (found, b))]
            if at[0] != at[1]:
                planned_at, found_at = (f"node {node} device {index}" for node, index in at)
                lines.append(f"{name} {number} on {found_at}, not {planned_at}")
    return "; ".join(lines[:SHOWN]) + (f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")


def _numbers(nodes: Sequence[str], wanted: Sequence[int], reserved: set[int]) -> dict[str, int]:
    """A number for each node: the one that its first process wants, or else the first that no other process wants."""
    number: dict[str, int] = {}
    for node, want in zip(nodes, wanted, strict=True):
        if node not in number and want not in number.values():
            number[node] = want
    spare = (n for n in count() if n not in {*number.values(), *reserved})
    for node in nodes:
        if node not in number:
            number[node] = next(spare)
    return number


def _indices(places: Sequence[Location], per_node: int) -> dict[tuple[str, str], int]:
    """(node, GPU) → its index in the node: its own number, or its place among those in use where one has none."""
    gpus: dict[str, list[str]] = {}
    for at in places:
        gpus.setdefault(at.node, []).extend(gpu for gpu in at.gpus if gpu not in gpus.get(at.node, ()))
    return {
        (node, gpu): int(gpu) if all(g.isdigit() and int(g) < per_node for g in found) else i
        for node, found in gpus.items()
        for i, gpu in enumerate(found)
    }
