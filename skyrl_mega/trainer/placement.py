"""Reserves the resources planned by `run_placement` from Ray: all places in a fixed order, before the first actor
starts.

Policy ranks on the same node come first, then the reference and the critic, then the engines. An engine placed earlier
could occupy part of a node needed whole by the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.nodes import responding_nodes
from skyrl_mega.cluster.placement import Placement, on_nodes, reserve
from skyrl_mega.cluster.run_placement import RunPlacement, nodes_on_cpus, plan_placement
from skyrl_mega.config.derived import engine_ranks
from skyrl_mega.config.pools import label_of
from skyrl_mega.config.schema import Config


@dataclass(frozen=True)
class Reservations:
    """Ray reservations for the run's actor groups; None leaves the placement to Ray."""

    policy: Placement | None = None
    reference: Placement | None = None
    critic: Placement | None = None
    engines: Placement | None = None
    """Places of the engines. None also without engines, and if the engines share the policy's GPUs: their places are
    known only after the ranks started."""


def reserve_run(config: Config, device: str) -> Reservations:
    """Reserves places for all actors, and returns the reservations. On GPUs: whole nodes of consecutive policy ranks,
    and each engine within a node. On CPUs: spread over the nodes; with a single node nothing is reserved (None).
    Engines in a pool are on the nodes with the pool's label, all other actors elsewhere.

    Raises:
        ClusterError: The cluster lacks these resources or a node with the pool's label, or does not reserve them in
            time (`placement.reserve`). Places already reserved end with the Ray session.
    """
    pool = config.cluster.pools.engines
    label = label_of(pool) if pool else None
    if device == "cuda":
        planned, engines = plan_placement(config), config.rollout.engines
        other = (label[0], f"!{label[1]}") if label else None
        ranks = partial(_reserve_ranks, planned, label=other)
        return Reservations(
            ranks(planned.policy),
            ranks(planned.reference) if planned.reference else None,
            ranks(planned.critic) if planned.critic else None,
            None
            if config.cluster.shared or not engines
            else reserve(engines, gpus=engine_ranks(config.rollout), label=label),
        )
    nodes = responding_nodes(without=config.rollout.elastic.resource)
    if len(nodes) == 1 and label is None:
        return Reservations()
    apart = [node for node in nodes if label and node.labels.get(label[0]) == label[1]]
    nodes = [node for node in nodes if node not in apart]
    if label and not (nodes and apart):
        raise ClusterError(
            f"{len(apart)} nodes of the Ray cluster have the label {label[0]}={label[1]} of cluster.pools.engines, "
            f"{len(nodes)} have not; both kinds are needed"
        )
    numbers_by_group = nodes_on_cpus(config, len(nodes), len(apart))
    groups = ([[*nodes, *apart][number] for number in numbers] for numbers in numbers_by_group)
    return Reservations(*(on_nodes(group) if group else None for group in groups))


def _reserve_ranks(planned: RunPlacement, devices: Sequence[int], label: tuple[str, str] | None) -> Placement:
    """Reserves a GPU per rank, and returns the places; ranks planned for the same node are placed together.

    Args:
        planned: The nodes of the devices.
        devices: The device of each rank, by rank.
        label: Key and value of a Ray label of the nodes; a value `!x` stands for all nodes without the value x. None
            allows every node.

    Raises:
        ClusterError: The cluster lacks the resources, or does not reserve them in time; nothing stays reserved.
    """
    together = [len([*ranks]) for _, ranks in groupby(map(planned.node, devices))]
    return reserve(len(devices), gpus=1, together=together, label=label)
