"""The hardware of the engines' nodes: the pool `cluster.pools.engines`, or the nodes of the policy."""

from __future__ import annotations

from dataclasses import replace

from skyrl_mega.config.gpus import GPUS
from skyrl_mega.config.schema import ClusterConfig, Config
from skyrl_mega.config.schema.pools import PoolConfig, PoolsConfig

ACCELERATOR = "ray.io/accelerator-type"
"""Ray's own label for the type of a node's GPUs."""


def engine_cluster(config: Config) -> ClusterConfig:
    """Returns the settings of the engines' nodes: `cluster` with the values of the pool, or `cluster` itself without a
    pool."""
    pool, cluster = config.cluster.pools.engines, config.cluster
    return cluster if pool is None else _of_pool(cluster, pool)


def engine_view(config: Config) -> Config:
    """Returns the settings with the engines' nodes as the only nodes: for formulas of engines, which read `cluster`.
    Without a pool the settings are unchanged."""
    if config.cluster.pools.engines is None:
        return config
    return replace(config, cluster=engine_cluster(config))


def total_nodes(config: Config) -> int:
    """Returns the number of nodes of the run, pools included."""
    pool = config.cluster.pools.engines
    return config.cluster.nodes + (0 if pool is None else pool.nodes)


def labelled_nodes(config: Config) -> tuple[str, str, int] | None:
    """Returns the key and the value of the label of the nodes in the engines' pool, and the number of these nodes; None
    without a pool. All other nodes of `total_nodes` have another label or none."""
    pool = config.cluster.pools.engines
    return None if pool is None else (*label_of(pool), pool.nodes)


def gpus_by_kind(config: Config) -> dict[str, int]:
    """Returns name → number of GPUs of each kind of nodes: `policy`, and `engines` with a pool."""
    cluster, pool = config.cluster, config.cluster.pools.engines
    kinds = {"policy": cluster.nodes * cluster.gpus_per_node}
    return kinds if pool is None else {**kinds, "engines": pool.nodes * pool.gpus_per_node}


def label_of(pool: PoolConfig) -> tuple[str, str]:
    """Returns key and value of the Ray label of a pool's nodes: `label`, or if null the accelerator that Ray names for
    the pool's `gpu`."""
    if pool.label is None:
        return ACCELERATOR, GPUS[pool.gpu].ray
    key, _, value = pool.label.partition("=")
    return key.strip(), value.strip()


def _of_pool(cluster: ClusterConfig, pool: PoolConfig) -> ClusterConfig:
    gpu = GPUS[pool.gpu]
    topology = replace(
        cluster.topology,
        nics_per_node=pool.nics_per_node,
        nic_gb_s=pool.nic_gb_s or cluster.topology.nic_gb_s,
        fabric_gb_s=pool.fabric_gb_s or gpu.fabric_gb_s,
        device_gb_s=gpu.device_gb_s,
    )
    rates = replace(cluster.rates, tflops=pool.tflops or gpu.tflops, memory_gb_s=pool.memory_gb_s or gpu.memory_gb_s)
    return replace(
        cluster,
        nodes=pool.nodes,
        gpus_per_node=pool.gpus_per_node,
        gpu_memory_gib=pool.gpu_memory_gib or gpu.memory_gib,
        topology=topology,
        rates=rates,
        pools=PoolsConfig(),
    )
