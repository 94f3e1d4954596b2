"""Transfers between GPUs and host memory in a step, and their duration.

Every offloaded part (not in `residency.keep`) moves to the device once and back once. Gradients, engine weights and KV
cache are dropped and created again, without a copy. A streamed optimizer moves within the optimizer steps instead
(`times._update`), in both directions at once.

Assumptions: all GPUs of a node copy at once, each over its own link (`cluster.rates.host_gb_s`), and share the memory
bandwidth of the node (`host_node_gb_s`). Pinned memory lies at the GPU's socket. A copy to the device overlaps neither
with a copy from it nor with compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.derived import has_critic
from skyrl_mega.config.residency import CRITIC, ENGINE, POLICY
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.memory import critic_dims, critic_memory, policy_state
from skyrl_mega.planner.processes import offloaded_bytes
from skyrl_mega.planner.shared import stage_ranks


def host_rate(config: Config) -> float:
    """Returns the bytes per second between host memory and a GPU while all GPUs of the node copy."""
    rates = config.cluster.rates
    return min(rates.host_gb_s, rates.host_node_gb_s / config.cluster.gpus_per_node) * 1e9


def streaming_rate(config: Config) -> float:
    """Returns the bytes per second and direction between host memory and a GPU while all GPUs copy in both
    directions."""
    rates = config.cluster.rates
    return min(rates.host_gb_s, rates.host_node_gb_s / config.cluster.gpus_per_node / 2) * 1e9


def moved_bytes(config: Config, decoder: Decoder, parallel: ParallelDims) -> int:
    """Returns the bytes copied between GPU and host memory in a step, the sum of both directions: by the busiest policy
    rank, plus by the busiest critic rank, because the critic moves afterwards. Without the copies of a streamed
    optimizer. 0 if `residency.keep` is null. `parallel` is the policy's grid. Raises UserError if a critic's layout
    does not fit its ranks."""
    if config.residency.keep is None:
        return 0
    ranks = stage_ranks(parallel).values()
    streamed, keep = config.policy.optimizer.streamed, config.residency.keep
    policy = max(
        offloaded_bytes(policy_state(config, decoder, parallel, rank), "policy", keep, streamed) for rank in ranks
    )
    return 2 * (policy + _critic_moving(config, decoder))


def _critic_moving(config: Config, decoder: Decoder) -> int:
    critic = critic_dims(config)
    ranks = stage_ranks(critic).values() if critic else ()
    return max((critic_memory(config, decoder, critic, rank).offloaded for rank in ranks if critic), default=0)


def residency_time(config: Config, decoder: Decoder, parallel: ParallelDims) -> float:
    """Estimates the seconds per step spent on copies of parts between GPU and host memory: `moved_bytes` / `host_rate`.
    `parallel` is the policy's grid. Raises UserError if a critic's layout does not fit its ranks."""
    return moved_bytes(config, decoder, parallel) / host_rate(config)


@dataclass(frozen=True)
class NeedlessOffload:
    """An offload without use: no other process needs the memory of these GPUs."""

    owners: tuple[str, ...]
    """Owners of the offloaded parts: policy, engines, critic."""
    seconds: float
    """Seconds per step; 0 if the parts are dropped and created again."""
    keep: str
    """Value of `residency.keep`, as written on the command line, without the offload."""


def needless_offloads(config: Config, decoder: Decoder, parallel: ParallelDims) -> list[NeedlessOffload]:
    """Returns the offloads from GPUs that no other process uses: [] or one entry. [] also if `residency.keep` is null.
    `parallel` is the policy's grid.

    If policy and engines share no GPU: one entry for all owners with offloaded parts, critic included. Otherwise one
    for the critic, whose GPUs are always its own. Raises UserError if a critic's layout does not fit its ranks.
    """
    keep = config.residency.keep
    if keep is None:
        return []
    owners = {"policy": POLICY, "engines": ENGINE, "critic": CRITIC[: has_critic(config)]}
    leaving = tuple(who for who, parts in owners.items() if {*parts} - {*keep})
    if not config.cluster.shared and leaving:
        return [NeedlessOffload(leaving, residency_time(config, decoder, parallel), "null")]
    if config.cluster.shared and "critic" in leaving:
        seconds = 2 * _critic_moving(config, decoder) / host_rate(config)
        return [NeedlessOffload(("critic",), seconds, f"[{','.join([*keep, *CRITIC])}]")]
    return []
