"""Where a run's actors go: all places are found before the first actor starts, in one order.

Policy ranks that share a node come first, then the reference's, then engines: an engine that were placed earlier could
stand on a node that the policy needs whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from skyrl_mega.cluster.placement import Placement, on_nodes, reserve, spread, worker_nodes
from skyrl_mega.config.derived import policy_ranks, reference_ranks
from skyrl_mega.config.schema import Config


@dataclass(frozen=True)
class Seats:
    """Places of the run's groups of actors; None leaves them to Ray."""

    policy: Placement | None = None
    reference: Placement | None = None
    engines: Placement | None = None
    """Also None where they have the policy's GPUs: those are known only once its ranks are up."""


def find_seats(config: Config, device: str) -> Seats:
    """On GPUs: whole nodes of consecutive policy ranks, each engine within a node. On CPUs: spread over the nodes.

    Raises:
        ClusterError: The cluster does not have them.
    """
    policy, reference, engines = policy_ranks(config), reference_ranks(config), config.rollout.engines
    if device == "cuda":
        node = config.cluster.gpus_per_node
        return Seats(
            reserve(policy, gpus=1, per_node=min(node, policy)),
            reserve(reference, gpus=1, per_node=min(node, reference)) if reference else None,
            None if config.cluster.shared else reserve(engines, gpus=config.rollout.tensor),
        )
    nodes = worker_nodes()
    if len(nodes) == 1:
        return Seats()
    units = [*_tensor_groups(policy, config.policy.layout.tensor)]
    if config.reference.layout:
        units += _tensor_groups(reference, config.reference.layout.tensor)
    where = spread(units + [1] * engines, nodes)
    first, second = accumulate((policy, reference))
    return Seats(
        on_nodes(where[:first]),
        on_nodes(where[first:second]) if reference else None,
        on_nodes(where[second:]),
    )


def _tensor_groups(ranks: int, tensor: int) -> list[int]:
    """Consecutive ranks that belong together."""
    return [tensor] * (ranks // tensor)
