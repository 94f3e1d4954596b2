"""Reserves the resources planned by `run_placement` from Ray: all places in a fixed order, before the first actor
starts.

Policy ranks on the same node come first, then the reference and the critic, then the engines. An engine placed earlier
could occupy part of a node needed whole by the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from skyrl_mega.cluster.nodes import responding_nodes
from skyrl_mega.cluster.placement import Placement, on_nodes, reserve
from skyrl_mega.cluster.run_placement import RunPlacement, nodes_of_cpus, plan_placement
from skyrl_mega.config.derived import engine_ranks
from skyrl_mega.config.schema import Config


@dataclass(frozen=True)
class Reservations:
    """Ray reservations for the run's actor groups; None leaves the placement to Ray."""

    policy: Placement | None = None
    reference: Placement | None = None
    critic: Placement | None = None
    engines: Placement | None = None
    """Also None without engines, and if the engines share the policy's GPUs, known only after the ranks started."""


def reserve_run(config: Config, device: str) -> Reservations:
    """Reserves places for all actors. On GPUs: whole nodes of consecutive policy ranks, and each engine within a node.
    On CPUs: spread over the nodes; with a single node nothing is reserved (None).

    Raises:
        ClusterError: The cluster lacks these resources, or does not reserve them in time (`placement.reserve`). Places
            already reserved end with the Ray session.
    """
    if device == "cuda":
        planned, engines = plan_placement(config), config.rollout.engines
        return Reservations(
            _reserve_ranks(planned, planned.policy),
            _reserve_ranks(planned, planned.reference) if planned.reference else None,
            _reserve_ranks(planned, planned.critic) if planned.critic else None,
            None if config.cluster.shared or not engines else reserve(engines, gpus=engine_ranks(config.rollout)),
        )
    nodes = responding_nodes(without=config.rollout.elastic.resource)
    if len(nodes) == 1:
        return Reservations()
    groups = ([nodes[number] for number in numbers] for numbers in nodes_of_cpus(config, len(nodes)))
    return Reservations(*(on_nodes(group) if group else None for group in groups))


def _reserve_ranks(planned: RunPlacement, devices: Sequence[int]) -> Placement:
    """Reserves a GPU per rank; ranks planned for the same node are placed together."""
    together = [len([*ranks]) for _, ranks in groupby(map(planned.node, devices))]
    return reserve(len(devices), gpus=1, together=together)
