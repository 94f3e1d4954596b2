"""Which process sits on which node and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from skyrl_mega.config.derived import engine_ranks, policy_ranks, reference_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.sizing.memory import on_cpu
from skyrl_mega.weights.topology import Links, Topology


@dataclass
class Node:
    """What sits on one node."""

    policy: list[int] = field(default_factory=list)
    """Ranks."""
    reference: list[int] = field(default_factory=list)
    """Ranks of a reference of its own."""
    engines: dict[int, list[int]] = field(default_factory=dict)
    """Engine → its workers."""

    @property
    def workers(self) -> int:
        """Engine workers."""
        return sum(map(len, self.engines.values()))


def nodes(config: Config) -> list[Node]:
    """All nodes that hold something, in order. On a CPU there is one."""
    policy, reference = policy_ranks(config), reference_ranks(config)
    size = engine_ranks(config.rollout)
    workers = config.rollout.engines * size
    if on_cpu(config):
        engines = {e: list(range(size)) for e in range(config.rollout.engines)}
        return [Node(list(range(policy)), list(range(reference)), engines)]
    links, where = Links.from_config(config.cluster), config.cluster.shared
    both = Topology.shared(policy, workers, links) if where else Topology.apart(policy, workers, links, engine=size)
    after = max((*both.sources, *both.targets)) + 1
    found = [Node() for _ in range(-(-(after + reference) // links.gpus_per_node))]
    for rank, device in enumerate(both.sources):
        found[device // links.gpus_per_node].policy.append(rank)
    for worker, device in enumerate(both.targets):
        found[device // links.gpus_per_node].engines.setdefault(worker // size, []).append(worker % size)
    for rank in range(reference):
        found[(after + rank) // links.gpus_per_node].reference.append(rank)
    return found


def runs(numbers: Sequence[int]) -> str:
    """Numbers that follow each other as `0-7`: `0-3,8`; `·` for none."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "·"
