"""Reserves from Ray what `cluster.place` says: all places are found before the first actor starts, in one order.

Policy ranks that share a node come first, then the reference's and the critic's, then engines: an engine that was
placed earlier could be on a node that the policy needs whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from skyrl_mega.cluster.nodes import answering
from skyrl_mega.cluster.place import RunPlacement, nodes_of_cpus, place
from skyrl_mega.cluster.placement import Placement, on_nodes, reserve
from skyrl_mega.config.schema import Config


@dataclass(frozen=True)
class Reservations:
    """What Ray has reserved for the run's groups of actors; None leaves them to Ray."""

    policy: Placement | None = None
    reference: Placement | None = None
    critic: Placement | None = None
    engines: Placement | None = None
    """Also None where they have the policy's GPUs: those are known only once its ranks are up."""


def reserve_run(config: Config, device: str) -> Reservations:
    """On GPUs: whole nodes of consecutive policy ranks, each engine within a node. On CPUs: spread over the nodes.

    Raises:
        ClusterError: The cluster does not have them.
    """
    if device == "cuda":
        planned, engines = place(config), config.rollout.engines
        return Reservations(
            _reserve_ranks(planned, planned.policy),
            _reserve_ranks(planned, planned.reference) if planned.reference else None,
            _reserve_ranks(planned, planned.critic) if planned.critic else None,
            None if config.cluster.shared else reserve(engines, gpus=config.rollout.tensor),
        )
    nodes = answering()
    if len(nodes) == 1:
        return Reservations()
    groups = ([nodes[number] for number in numbers] for numbers in nodes_of_cpus(config, len(nodes)))
    return Reservations(*(on_nodes(group) if group else None for group in groups))


def _reserve_ranks(planned: RunPlacement, devices: Sequence[int]) -> Placement:
    """One GPU for each rank; those that are planned for one node share one."""
    together = [len([*ranks]) for _, ranks in groupby(map(planned.node, devices))]
    return reserve(len(devices), gpus=1, together=together)
