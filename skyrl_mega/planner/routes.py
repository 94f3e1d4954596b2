"""Memory of router replay (`policy.moe.replay`)."""

from __future__ import annotations

from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.parallel.dims import ParallelDims

PLACE_BYTES = 16
"""A token's index and position beside its routes on a rank."""


def route_bytes(config: Config, d: Decoder) -> int:
    """Bytes of one token's routes; 0 where nothing is replayed."""
    shape = RouteShape.of(d)
    return shape.token_bytes if shape and config.policy.moe.replay != "off" else 0


def rank_bytes(config: Config, d: Decoder, parallel: ParallelDims) -> float:
    """Bytes on a policy rank of one token of a packed micro-batch: what is replayed, and what has to come of it."""
    each = route_bytes(config, d)
    return (2 * each + PLACE_BYTES) / parallel.tensor if each else 0.0


def driver_bytes(config: Config, d: Decoder) -> int:
    """Bytes beside the driver of one token of a step: trajectories, batch, and what the ranks are sent."""
    return 3 * route_bytes(config, d) if config.policy.moe.replay == "rollout" else 0
