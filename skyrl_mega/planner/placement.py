"""Ranks and engine workers placed on each node."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_mega.cluster.run_placement import plan_placement
from skyrl_mega.config.derived import engine_ranks
from skyrl_mega.config.schema import Config


@dataclass
class PlannedNode:
    """Ranks and engine workers of a node."""

    policy: list[int] = field(default_factory=list)
    """Policy ranks."""
    reference: list[int] = field(default_factory=list)
    """Ranks of a separate reference."""
    critic: list[int] = field(default_factory=list)
    """Critic ranks."""
    engines: dict[int, list[int]] = field(default_factory=dict)
    """Numbers of the engine workers, by engine."""

    @property
    def workers(self) -> int:
        """Number of engine workers on the node, over all engines."""
        return sum(map(len, self.engines.values()))


def nodes(config: Config) -> list[PlannedNode]:
    """Returns the ranks and engine workers of every node used by the run, in the order of nodes; see
    `cluster.run_placement`. If the settings do not fit, there are more than `cluster.nodes` nodes, without an error."""
    placement = plan_placement(config)
    size = engine_ranks(config.rollout)
    planned = [PlannedNode() for _ in range(placement.nodes)]
    for rank, device in enumerate(placement.policy):
        planned[placement.node(device)].policy.append(rank)
    for rank, device in enumerate(placement.reference):
        planned[placement.node(device)].reference.append(rank)
    for rank, device in enumerate(placement.critic):
        planned[placement.node(device)].critic.append(rank)
    for worker, device in enumerate(placement.engines):
        planned[placement.node(device)].engines.setdefault(worker // size, []).append(worker % size)
    return planned
