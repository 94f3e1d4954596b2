"""Placement on a real Ray cluster of two kinds of nodes, told apart by a label."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.placement import Placement, Slot
from skyrl_mega.cluster.ray_session import ENVIRONMENT, session
from skyrl_mega.config.schema import ClusterConfig, Config, PolicyConfig, RolloutConfig
from skyrl_mega.config.schema.pools import PoolConfig, PoolsConfig
from skyrl_mega.trainer.placement import reserve_run

POOL = PoolConfig(nodes=1, gpus_per_node=4, label="pool=engines")
CONFIG = Config(
    cluster=ClusterConfig(device="cuda", nodes=1, gpus_per_node=2, pools=PoolsConfig(engines=POOL)),
    policy=PolicyConfig(ranks=2),
    rollout=RolloutConfig(engines=2, tensor=2),
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    """Starts a node of each kind; yields kind → Ray's id of the node."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            # The engines' node has most free GPUs, so that without the label the policy would get them.
            engines = cluster.add_node(num_cpus=8, num_gpus=4, labels={"pool": "engines"})
            policy = cluster.add_node(num_cpus=8, num_gpus=2)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield {"engines": engines.node_id, "policy": policy.node_id}
        finally:
            cluster.shutdown()


def nodes_of(placement: Placement | None) -> list[str]:
    """Returns Ray's id of the node of each place."""
    import ray

    @ray.remote
    def node() -> str:
        return str(ray.get_runtime_context().get_node_id())

    assert placement is not None
    return ray.get([node.options(**slot.options()).remote() for slot in placement.slots], timeout=120)


@pytest.mark.slow
@pytest.mark.nightly
def test_engines_and_policy_get_the_nodes_of_their_kind(nodes: dict[str, str]) -> None:
    assert os.environ["RAY_ADDRESS"]
    with session(actors=4, nodes=2):
        for device in ("cuda", "cpu"):
            config = replace(CONFIG, cluster=replace(CONFIG.cluster, device=device))
            places = reserve_run(config, device)
            assert nodes_of(places.policy) == [nodes["policy"]] * 2
            assert nodes_of(places.engines) == [nodes["engines"]] * 2
            for placement in (places.policy, places.engines):
                assert placement is not None
                placement.release()
        anywhere = Placement((Slot("DEFAULT", {}, labels={"pool": "engines"}),) * 4)
        assert nodes_of(anywhere) == [nodes["engines"]] * 4, "an engine that joins"
        other = PoolsConfig(engines=replace(POOL, label="pool=none"))
        config = replace(CONFIG, cluster=replace(CONFIG.cluster, device="cpu", pools=other))
        with pytest.raises(ClusterError, match="0 nodes of the Ray cluster have the label pool=none"):
            reserve_run(config, "cpu")
