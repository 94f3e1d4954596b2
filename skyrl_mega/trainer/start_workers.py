"""Starts the rollout workers (`environment.processes`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from skyrl_mega.cluster.nodes import Node, driver_node, nodes_without_gpus
from skyrl_mega.cluster.placement import on_nodes, spread
from skyrl_mega.config.derived import on_driver_node, share_of
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.rollout.workers.group import Workers
from skyrl_mega.rollout.workers.worker import RolloutWorker
from skyrl_mega.trainer.start_actors import Setup, start_group


def start_workers(setup: Setup) -> Workers | None:
    """Starts the run's rollout workers, each with its share of `rollout.concurrency` and `environment.workers`. Returns
    None if `environment.processes` is 0: trajectories then run in threads of the driver. `setup.stack` ends the
    workers.

    Raises:
        UserError: The model has no usable tokenizer or chat template, or an environment or the generator cannot be
            imported.
        ActorFailed, ActorTimeout: A worker failed, or did not start within `setup.timeout_s`; none is left.
    """
    config = setup.config
    count = config.environment.processes
    if not count:
        return None
    nodes = nodes_of(config.environment, config.rollout.elastic.resource)
    per_node = Counter(node.id for node in nodes)
    token = config.environment.retriever.token_variable
    arguments = [
        dict(
            model=str(setup.model),
            rollout=replace(config.rollout, concurrency=share_of(config.rollout.concurrency, count, rank)),
            environments=replace(config.environment, workers=share_of(config.environment.workers, count, rank)),
            reward_weights=config.algorithm.reward_weights,
            secrets={token: os.environ[token]} if token in os.environ else {},
            workers_on_node=per_node[node.id],
        )
        for rank, node in enumerate(nodes)
    ]
    placement = on_nodes(nodes, elsewhere=not on_driver_node(config.environment))
    group = start_group(setup, "rollout", RolloutWorker, arguments, placement)
    workers = Workers(group, restarts=config.rollout.restarts, start_timeout_s=setup.timeout_s, say=setup.say)
    setup.stack.callback(workers.close)
    return workers


def nodes_of(environment: EnvironmentConfig, without: str | None = None) -> Sequence[Node]:
    """Returns the node of each rollout worker: spread evenly over the nodes without GPUs, or over all nodes if every
    node has GPUs. With a retrieval service on loopback all are on the driver's node.

    Args:
        environment: The settings.
        without: Ray resource of nodes that may leave (`rollout.elastic.resource`), and are left out.
    """
    count = environment.processes
    if on_driver_node(environment):
        return [driver_node()] * count
    return spread([1] * count, nodes_without_gpus(without))
