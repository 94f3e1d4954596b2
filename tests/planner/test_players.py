"""Rollout workers in the plan of a node's memory."""

from __future__ import annotations

from skyrl_mega.config.schema import ClusterConfig, Config, EnvironmentConfig, RetrieverConfig
from skyrl_mega.planner.host_memory import _rollout_workers


def test_they_are_spread_over_the_nodes_or_beside_the_driver() -> None:
    cluster = ClusterConfig(nodes=2)
    config = Config(cluster=cluster, environment=EnvironmentConfig(processes=5))
    assert [_rollout_workers(config, first) for first in (True, False)] == [3, 3]
    config.environment.retriever = RetrieverConfig(index="index")
    assert [_rollout_workers(config, first) for first in (True, False)] == [5, 0]
    assert _rollout_workers(Config(cluster=cluster), True) == 0
