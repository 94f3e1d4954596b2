"""vLLM 0.32: where each parameter of a worker, as it is at load time, lies in the Hugging Face tensors.

Load-time parameters are the canonical local shard, before a kernel's own re-packing: the update path restores them,
fills them and processes the layer again. What a block has of them, the block says (`engine_pieces`).
"""

from __future__ import annotations

from dataclasses import replace

from skyrl_mega.config.errors import UserError
from skyrl_mega.models import huggingface
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.box import Shard

BLOCK = 128
"""Rows and columns of what has one scale in an FP8 checkpoint (`kernels.block_fp8`)."""


def check(d: Decoder, tensor: int, expert_parallel: bool = False, key: str = "rollout.tensor", data: int = 1) -> None:
    """Refuses sizes that vLLM cannot cut this model into: tensor parallel, and data parallel for its experts.

    Raises:
        UserError: naming `key`, its value and what is allowed.
    """
    cut = EngineCut(tensor, expert_parallel, data)
    for block in d.parts:
        block.check_engine(cut, key)
    for what, total in (each for block in (*d.blocks, d.embedding) for each in block.engine_cuts(cut)):
        if total % tensor:
            raise UserError(f"{key}: {tensor} does not divide the model's {total} {what}; choose a divisor of {total}")


def check_blocks(d: Decoder, tensor: int, expert_parallel: bool, key: str = "rollout.tensor", data: int = 1) -> None:
    """Refuses a cut of an FP8 checkpoint's parameters through their blocks, of which each has one scale.

    vLLM then stops in a dense layer, and makes smaller blocks of experts, for which no wire brings scales.

    Raises:
        UserError: naming `key`, its value and what is allowed.
    """
    lacking = cut_blocks(d, EngineCut(tensor, expert_parallel, data))
    if lacking is None:
        return
    allowed = whole_sizes(d, EngineCut(tensor, expert_parallel, data))
    allows = f"{key} {', '.join(map(str, allowed))}" if allowed else f"no {key} with this model"
    raise UserError(
        f"{key}: {tensor} leaves {lacking} to a worker, and engines with the parameters of an FP8 checkpoint "
        f"(rollout.options.hf_overrides.quantization_config) need multiples of {BLOCK}; allowed is {allows}, or "
        "rollout.options.quantization=fp8_per_block without hf_overrides"
    )


def whole_sizes(d: Decoder, cut: EngineCut, online: bool = False) -> list[int]:
    """The tensor-parallel sizes that vLLM can cut the model into without a cut through blocks; else as `cut`."""
    found = []
    for size in range(1, d.hidden + 1):
        try:
            check(d, size, cut.expert_parallel, data=cut.data)
        except UserError:
            continue
        if cut_blocks(d, replace(cut, tensor=size), online) is None:
            found.append(size)
    return found


def cut_blocks(d: Decoder, cut: EngineCut, online: bool = False) -> str | None:
    """What of a worker's part is no multiple of a block; None where all is.

    `online`: of what vLLM quantises itself, where an expert that a worker has whole begins a block of its own.
    """
    blocks = [block for block in d.parts if not (online and cut.whole_experts and isinstance(block, Experts))]
    parts = (part for block in blocks for part in block.engine_columns(cut).items())
    return next((f"{size} {name}" for name, size in parts if size % BLOCK), None)


def shard(
    d: Decoder,
    tensor: int,
    rank: int,
    expert_parallel: bool = False,
    data: int = 1,
    tensors: dict[str, tuple[int, ...]] | None = None,
) -> Shard:
    """The parameters of worker `rank` of an engine (`EngineCut`).

    `tensors` is `huggingface.tensors(d)`, for who has it at hand.
    """
    b = ShardBuilder(tensors or huggingface.tensors(d))
    cut = EngineCut(tensor, expert_parallel, data)
    d.embedding.engine_pieces(b, cut, rank, "model")
    for index in range(d.layers):
        for block in d.layer(index):
            block.engine_pieces(b, cut, rank, f"model.layers.{index}")
    d.head.engine_pieces(b, cut, rank, "model")
    return b.shard()
