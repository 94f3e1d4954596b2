"""The vLLM 0.32 side of a model: positions of each load-time parameter of a worker in the Hugging Face tensors.

Load-time parameters are the canonical local shard, before a kernel's own re-packing. The update path restores these
parameters, fills them and processes the layer again. Each block declares the parameters (`engine_pieces`).
"""

from __future__ import annotations

from dataclasses import replace

from skyrl_mega.common.errors import UserError
from skyrl_mega.models import huggingface
from skyrl_mega.models.blocks.base import EngineCut, indivisible
from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.quantization import BLOCK
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.box import Shard


def check(decoder: Decoder, cut: EngineCut, key: str = "rollout.tensor") -> None:
    """Raises an error if vLLM cannot split this model over the workers of an engine; stops at the first problem.

    Args:
        decoder: The model.
        cut: The division of an engine.
        key: The setting of the tensor parallelism, for errors.

    Raises:
        UserError: vLLM cannot split the model so; names `key`, the value and the allowed values. Or vLLM does not
            support the model at all, such as its tied embedding; names config.json.
    """
    for block in decoder.parts:
        block.check_engine(cut, key)
    for name, total in (each for block in (*decoder.blocks, decoder.embedding) for each in block.engine_cuts(cut)):
        if total % cut.tensor:
            raise indivisible(f"{cut.tensor} does not divide", total, name, key)


def check_blocks(decoder: Decoder, cut: EngineCut, key: str = "rollout.tensor") -> None:
    """Raises an error if a division of an engine cuts through a scaled block of an FP8 checkpoint's parameters.

    Otherwise vLLM fails in a dense layer, and uses smaller blocks for experts, without matching scales on any wire.
    Call only for engines with parameters of such a checkpoint; the arguments are those of `check`.

    Raises:
        UserError: The division cuts through a block; names `key`, the value and the allowed values.
    """
    misaligned = cut_blocks(decoder, cut)
    if misaligned is None:
        return
    allowed = whole_sizes(decoder, cut)
    allows = f"{key} {', '.join(map(str, allowed))}" if allowed else f"no {key} with this model"
    raise UserError(
        f"{cut.tensor} leaves {misaligned} to a worker, and engines with the parameters of an FP8 "
        f"checkpoint (rollout.options.hf_overrides.quantization_config) need multiples of {BLOCK}"
        f"; allowed is {allows}, or rollout.options.quantization=fp8_per_block without "
        "hf_overrides",
        key=key,
    )


def whole_sizes(decoder: Decoder, cut: EngineCut, online: bool = False) -> list[int]:
    """Returns the tensor-parallel sizes, ascending, supported by vLLM for this model and not cutting through any
    FP8 block; [] if there is none.

    Args:
        decoder: The model.
        cut: The division of an engine; tensor parallelism is replaced.
        online: True if vLLM quantises the weights itself.
    """
    sizes = []
    for size in range(1, decoder.hidden + 1):
        sized = replace(cut, tensor=size)
        try:
            check(decoder, sized)
        except UserError:
            continue
        if cut_blocks(decoder, sized, online) is None:
            sizes.append(size)
    return sizes


def cut_blocks(decoder: Decoder, cut: EngineCut, online: bool = False) -> str | None:
    """Returns the first part of a worker with a number of columns other than a multiple of 128 (an FP8 block's), as
    text such as `96 query columns`; None if every part is a multiple.

    Args:
        decoder: The model.
        cut: The division of an engine.
        online: True if vLLM quantises the weights itself; then an expert held whole by a worker starts a new block.
    """
    blocks = [block for block in decoder.parts if not (online and cut.whole_experts and isinstance(block, Experts))]
    parts = (part for block in blocks for part in block.engine_columns(cut).items())
    return next((f"{size} {name}" for name, size in parts if size % BLOCK), None)


def shard(decoder: Decoder, cut: EngineCut, rank: int, tensors: dict[str, tuple[int, ...]] | None = None) -> Shard:
    """Returns the load-time parameters of worker `rank` of an engine by vLLM's names, and the pieces to fill them.
    `check` must have accepted the division, which is not checked again.

    Args:
        decoder: The model.
        cut: The division of the engine.
        rank: Number of the worker, from 0 to `cut.workers` - 1.
        tensors: Result of `huggingface.tensors(decoder)`, for callers with the result at hand; None computes it.

    Raises:
        ValueError: The decoder is a critic.
    """
    builder = ShardBuilder(tensors or huggingface.tensors(decoder), decoder.on_disk)
    decoder.embedding.engine_pieces(builder, cut, rank, "model")
    for source, block in decoder.layer_blocks:
        block.engine_pieces(builder, cut, rank, source)
    decoder.head.engine_pieces(builder, cut, rank, "model")
    return builder.shard()
