"""Compares the blocks of FP8 parameters (`policy.precision.parameters`) with the blocks on the wire of a weight
sync."""

from __future__ import annotations

from functools import lru_cache
from math import lcm

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.models import huggingface, megatron
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.box import Layout
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.fp8.format import quantised
from skyrl_mega.weights.fp8.scales import without_own_blocks


def check(config: Config, decoder: Decoder, parallel: ParallelDims) -> None:
    """Checks the 128 × 128 blocks of FP8 parameters on a rank: they must be blocks of the model's own tensors.
    `parallel` is the policy's grid.

    Does nothing unless `policy.precision.parameters` is fp8. Layouts cutting through blocks are refused earlier
    (`models.fp8_widths`). Here the cause is the model itself, for example heads of width 64.

    Raises:
        UserError: The blocks of a tensor differ; names the tensor.
    """
    if config.policy.precision.parameters != "fp8":
        return
    if tensor := differing_tensor(decoder, parallel.tensor, parallel.expert_tensor):
        raise UserError(
            f"blocks of {BLOCK} × {BLOCK} of {tensor} on a rank differ from the blocks sent to engines: widths of "
            f"heads and of a rank's columns must be multiples of {BLOCK}",
            key="policy.precision.parameters",
            value="fp8",
            fix="give policy.precision.parameters=model",
        )


@lru_cache(maxsize=256)
def differing_tensor(decoder: Decoder, tensor: int, expert_tensor: int) -> str | None:
    """Returns the Hugging Face name of the first FP8 tensor whose blocks on the ranks differ from the blocks sent to
    the engines; None if all agree.

    Depends only on tensor and expert tensor parallelism: stages, expert parallelism and contexts cut no tensor.
    """
    ranks = lcm(tensor, expert_tensor)
    parallel = ParallelDims(ranks, tensor=tensor, expert_tensor=expert_tensor)
    tensors = huggingface.tensors(decoder)
    layout = Layout(tensors, tuple(megatron.shard(decoder, parallel, rank, "te", tensors) for rank in range(ranks)))
    names = quantised(tensors)
    linear = {p.tensor: p.param for shard in layout.shards for p in shard.pieces if len(p.box.shape) == 2}
    unsent = (name for name, param in linear.items() if ".linear_" in param and name not in names)
    return next(unsent, None) or without_own_blocks(layout, names)
