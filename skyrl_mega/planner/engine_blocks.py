"""Engines that quantise what a sync brings (`rollout.options.quantization`): are their blocks of FP8 the policy's?"""

from __future__ import annotations

from skyrl_mega.config.derived import engine_data, expert_parallel, fp8_parameters, fp8_weights
from skyrl_mega.config.schema import Config, RolloutConfig
from skyrl_mega.models import engine
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder


def cut(rollout: RolloutConfig) -> EngineCut:
    """How engines cut the model."""
    return EngineCut(rollout.tensor, expert_parallel(rollout), engine_data(rollout))


def other(config: Config, d: Decoder) -> str | None:
    """What of a worker's part is no multiple of a block, where engines that quantise what arrives then have other
    blocks than the policy, or than the wire."""
    rollout = config.rollout
    same = config.weights.wire == "fp8" or config.policy.precision.recipe == "fp8_blockwise"
    if not same or not fp8_weights(rollout) or fp8_parameters(rollout):
        return None
    return engine.cut_blocks(d, cut(rollout), online=True)
