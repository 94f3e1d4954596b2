"""Memory of router replay (`policy.moe.replay`)."""

from __future__ import annotations

from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.parallel.dims import ParallelDims

PLACE_BYTES = 16
"""Bytes of a token's index and position, stored with the routes on a rank."""


def route_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the bytes of a token's routes over all MoE layers; 0 without router replay, or without experts."""
    shape = RouteShape.of(decoder)
    return shape.token_bytes if shape and config.policy.moe.replay != "off" else 0


def rank_bytes(config: Config, decoder: Decoder, parallel: ParallelDims) -> float:
    """Returns the bytes of routes per token of a packed micro-batch on a policy rank: the routes to replay, and a
    second copy for checking; 0 without router replay. `parallel` is the policy's grid."""
    token_bytes = route_bytes(config, decoder)
    return (2 * token_bytes + PLACE_BYTES) / parallel.tensor if token_bytes else 0.0


def driver_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the bytes of routes per token of a step on the driver: in trajectories, in the batch, and in messages to
    ranks. 0 unless `policy.moe.replay` is rollout."""
    return 3 * route_bytes(config, decoder) if config.policy.moe.replay == "rollout" else 0
