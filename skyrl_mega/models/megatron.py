"""The megatron-core 0.16 side of a model: GPTModel settings, and positions of each parameter in the Hugging Face
tensors.

Each block declares both (`megatron_args`, `megatron_pieces`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.models import huggingface
from skyrl_mega.models.blocks.base import Cut, LayerModules, MegatronPlace, MegatronSettings, indivisible
from skyrl_mega.models.blocks.base import Spec as Spec
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims

TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-torch")
"""Transformer Engine's two packages: the Python package, and the compiled module for torch. Package names are used
because the compiled module lies in the Python package's folder and is found only after importing the Python package."""


def layer_spec(setting: str, device: str) -> Spec:
    """Returns the spec meant by `policy.spec` (`auto`, `te` or `local`) on a device (`cpu` or `cuda`): `auto` is `te`
    on `cuda`, else `local`.

    The result depends on the settings alone, so that driver, ranks and plans agree, independent of installed packages.
    """
    if setting == "auto":
        return "te" if device == "cuda" else "local"
    return "te" if setting == "te" else "local"


def require_transformer_engine() -> None:
    """Imports Transformer Engine, and so refuses the `te` spec if the package or its compiled extension cannot be
    imported.

    Call before importing megatron-core. On an ImportError megatron-core continues without Transformer Engine; on any
    other error (a missing library, another cuDNN) megatron-core's own import fails.

    Raises:
        UserError: Names the failed import and the reason.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"Transformer Engine cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}",
            key="policy.spec",
            value="te (which auto means on CUDA)",
            fix="install it with `make cuda`, or give policy.spec=local, which trains without it, slower",
        ) from error


def settings(decoder: Decoder) -> MegatronSettings:
    """Returns the keyword arguments for megatron-core to compute this model.

    Raises:
        UserError: Two layers need different values of an argument that megatron-core sets for all layers.
    """
    transformer: dict[str, Any] = {
        "num_layers": decoder.layers,
        "hidden_size": decoder.hidden,
        "normalization": "RMSNorm",
        "layernorm_epsilon": decoder.norm_eps,
    }
    if decoder.zero_centered_norms:
        transformer["layernorm_zero_centered_gamma"] = True
    gpt: dict[str, Any] = {"max_sequence_length": decoder.max_length}
    for block in decoder.parts:
        args = block.megatron_args([block in decoder.layer(index) for index in range(decoder.layers)])
        for merged, added in ((transformer, args.transformer), (gpt, args.gpt)):
            for key, value in added.items():
                if merged.setdefault(key, value) != value:
                    raise UserError(
                        f"layers differ in what megatron-core calls {key}: {merged[key]} and "
                        f"{value}; it takes one value for all layers; choose another model",
                        key="config.json",
                    )
    transformer.setdefault("add_bias_linear", False)
    return MegatronSettings(transformer, gpt)


def layer_modules(decoder: Decoder, layers: Sequence[int]) -> list[LayerModules]:
    """Returns, for each of these layers (global indices, from 0), the modules declared by the layer's attention block,
    in the same order. Raises StopIteration for a layer without attention, and IndexError for an index without a
    layer."""
    return [next(m for block in decoder.layer(index) if (m := block.layer_modules())) for index in layers]


def check(decoder: Decoder, parallel: ParallelDims, key: str = "policy.layout") -> None:
    """Raises an error unless a layout divides this model and trains correctly; stops at the first problem.

    Args:
        decoder: The model.
        parallel: The layout.
        key: The layout's setting, for errors.

    Raises:
        UserError: Names the setting under `key`, the value and the allowed values, or config.json.
    """

    for cut in (cut for block in (*decoder.blocks, decoder.embedding, decoder.head) for cut in block.megatron_cuts()):
        size = getattr(parallel, cut.dimension)
        if cut.total % size:
            raise indivisible(f"{size} does not divide", cut.total, cut.what, f"{key}.{cut.dimension}")
        if cut.of_heads and parallel.by_heads:
            _check_heads(cut, parallel, key)
    _check_stages(decoder, parallel, key)
    for block in decoder.parts:
        block.check_megatron(parallel, key)
    if parallel.expert > 1 and not any(
        cut.dimension == "expert" for block in decoder.blocks for cut in block.megatron_cuts()
    ):
        raise UserError(f"{parallel.expert} needs a model with experts; give 1", key=f"{key}.expert")


def _check_heads(cut: Cut, parallel: ParallelDims, key: str) -> None:
    """Checks that the context ranks can split the heads of a tensor rank, for an all-to-all in attention layers."""
    heads, unit = cut.total // parallel.tensor, math.lcm(2, parallel.context)
    if heads % unit == 0:
        return
    why = f"it gives every context rank an equal part of {heads} {cut.what}, those of a tensor rank"
    if heads % parallel.context == 0:
        why = f"Transformer Engine needs an even number of {cut.what} on a tensor rank; there are {heads}"
    sizes = [n for n in range(2, heads + 1) if heads % math.lcm(2, n) == 0]
    allowed = f"{key}.context of {' or '.join(map(str, sizes))}, " if sizes else ""
    raise UserError(
        f"{why}, and {key}.context is {parallel.context}",
        key=f"{key}.context_exchange",
        value="all_to_all",
        fix=f"give {allowed}a smaller {key}.tensor, or context_exchange=ring",
    )


def _check_stages(decoder: Decoder, parallel: ParallelDims, key: str) -> None:
    """Checks the pipeline stages: no empty stage, middle stages of equal size, whole chunks."""
    uneven = [
        f"{name} {layers}"
        for name in ("first_stage_layers", "last_stage_layers")
        if (layers := getattr(parallel, name)) is not None
    ]
    try:
        parallel.stage_sizes(decoder.layers)
    except ValueError as error:
        if uneven:
            raise UserError(
                f"{' and '.join(uneven)} do not fit the model's {decoder.layers} layers on "
                f"pipeline {parallel.pipeline} × virtual_pipeline {parallel.virtual_pipeline}: "
                f"{error}"
                "; choose other sizes, or null for equal stages",
                key=f"{key}.{uneven[0].split()[0]}",
            ) from None
        if decoder.layers % parallel.pipeline:
            others = decoder.layers // parallel.pipeline
            first = decoder.layers - (parallel.pipeline - 1) * others
            example = f" (such as {first})" if others and parallel.virtual_pipeline == 1 else ""
            raise UserError(
                f"{parallel.pipeline} does not divide the model's {decoder.layers} layers; choose a divisor of "
                f"{decoder.layers}, or give {key}.first_stage_layers{example} or last_stage_layers",
                key=f"{key}.pipeline",
                settings=(f"{key}.first_stage_layers",),
            ) from None
        slices = parallel.pipeline * parallel.virtual_pipeline
        raise UserError(
            f"{parallel.virtual_pipeline} × pipeline {parallel.pipeline} = {slices} does not "
            f"divide the model's {decoder.layers} layers"
            f"; choose sizes whose product divides {decoder.layers}",
            key=f"{key}.virtual_pipeline",
        ) from None


def shard(
    decoder: Decoder, parallel: ParallelDims, rank: int, spec: Spec, tensors: dict[str, tuple[int, ...]] | None = None
) -> Shard:
    """Returns the parameters of policy rank `rank`, and the pieces to fill them. `check` must have accepted the layout,
    which is not checked again.

    Parameters are named `"<chunk>.<name in GPTModel.named_parameters()>"`, in that order.

    Ranks with different dp, cp or edp only hold the same parameters.

    Args:
        decoder: The model.
        parallel: The layout.
        rank: Number of the rank.
        spec: Implementation of the layers.
        tensors: Result of `huggingface.tensors(decoder)`, for callers with the result at hand; None computes it.

    Raises:
        ValueError: `rank` is not a rank of the layout.
    """
    builder = ShardBuilder(tensors or huggingface.tensors(decoder), decoder.on_disk)
    coords = parallel.coordinates(rank)
    for chunk in range(parallel.virtual_pipeline):
        place = MegatronPlace(parallel, coords, chunk, spec)
        if place.first:
            decoder.embedding.megatron_pieces(builder, place, str(chunk), "model")
        for local, index in enumerate(parallel.stage_layers(decoder.layers, coords.pp, chunk)):
            for block in decoder.layer(index):
                block.megatron_pieces(builder, place, f"{chunk}.decoder.layers.{local}", f"model.layers.{index}")
        if place.last:
            decoder.head.megatron_pieces(builder, place, str(chunk), "model")
    return builder.shard()
