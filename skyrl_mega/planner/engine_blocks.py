"""Compares the FP8 blocks of engines with online quantisation (`rollout.options.quantization`) with the policy's
blocks."""

from __future__ import annotations

from skyrl_mega.config.derived import fp8_parameters, fp8_weights
from skyrl_mega.config.schema import Config
from skyrl_mega.models import engine
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder


def partial_block(config: Config, decoder: Decoder) -> str | None:
    """Returns a description of a part of an engine worker's weights with a width other than a multiple of an FP8 block.

    After quantising such a part, an engine would use other blocks than the policy or the weight sync.

    Returns:
        Text such as `96 query columns`; None if all parts are multiples, if neither policy nor wire uses block FP8, or
            if engines do not quantise weights themselves.
    """
    rollout = config.rollout
    compared = config.weights.wire == "fp8" or config.policy.precision.recipe == "fp8_blockwise"
    if not compared or not fp8_weights(rollout) or fp8_parameters(rollout):
        return None
    return engine.cut_blocks(decoder, EngineCut.of(rollout), online=True)
