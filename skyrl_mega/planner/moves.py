"""What moves between a GPU and host memory in a step, and how long that takes.

Every part that is not kept (`residency.keep`) goes to the device once and comes back once; gradients, the engines'
weights and their cache are dropped and made again, which copies nothing. An optimizer that is streamed moves within
its steps instead (`times._update`), in both directions at once. Assumed: all GPUs of a node move at once, each
over its own link (`cluster.rates.host_gb_s`), and share the memory of their node (`host_node_gb_s`); pinned memory lies
beside the GPU's own socket; a copy in does not overlap with one out, nor with work.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.derived import has_critic
from skyrl_mega.config.residency import CRITIC, ENGINE, POLICY
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.memory import critic_dims, critic_memory, policy_memory
from skyrl_mega.planner.shared import stages


def host_rate(config: Config) -> float:
    """Bytes a second between host memory and one GPU while all GPUs of its node copy."""
    rates = config.cluster.rates
    return min(rates.host_gb_s, rates.host_node_gb_s / config.cluster.gpus_per_node) * 1e9


def streaming_rate(config: Config) -> float:
    """The same of each direction where both are used at once."""
    rates = config.cluster.rates
    return min(rates.host_gb_s, rates.host_node_gb_s / config.cluster.gpus_per_node / 2) * 1e9


def moved(config: Config, d: Decoder, parallel: ParallelDims) -> int:
    """Bytes that the policy rank with most to move, and such a critic rank after it, move in a step."""
    if config.residency.keep is None:
        return 0
    policy = max(policy_memory(config, d, parallel, rank).moving for rank in stages(parallel).values())
    return 2 * (policy + _critic_moving(config, d))


def _critic_moving(config: Config, d: Decoder) -> int:
    critic = critic_dims(config)
    ranks = stages(critic).values() if critic else ()
    return max((critic_memory(config, d, critic, rank).moving for rank in ranks if critic), default=0)


def residency_time(config: Config, d: Decoder, parallel: ParallelDims) -> float:
    """Seconds of a step in which nothing but moving happens."""
    return moved(config, d, parallel) / host_rate(config)


@dataclass(frozen=True)
class IdleMove:
    """What leaves GPUs on which nothing takes its place."""

    who: tuple[str, ...]
    """Of policy, engines and critic."""
    seconds: float
    """Of a step; 0 where what leaves is dropped and made again."""
    better: str
    """`residency.keep` without it."""


def idle_moves(config: Config, d: Decoder, parallel: ParallelDims) -> list[IdleMove]:
    """Of the policy and engines where they share no GPU, of the critic always."""
    keep = config.residency.keep
    if keep is None:
        return []
    owners = {"policy": POLICY, "engines": ENGINE, "critic": CRITIC[: has_critic(config)]}
    leaving = tuple(who for who, parts in owners.items() if {*parts} - {*keep})
    if not config.cluster.shared and leaving:
        return [IdleMove(leaving, residency_time(config, d, parallel), "null")]
    if config.cluster.shared and "critic" in leaving:
        seconds = 2 * _critic_moving(config, d) / host_rate(config)
        return [IdleMove(("critic",), seconds, f"[{','.join([*keep, *CRITIC])}]")]
    return []
