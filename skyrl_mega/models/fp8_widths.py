"""Checks of linear-layer widths for FP8 recipes: computable, and with the same result in every layout."""

from __future__ import annotations

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.precision import check_layers, needs
from skyrl_mega.config.schema import PrecisionConfig
from skyrl_mega.models.blocks.base import Cut, Spec
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims


def check(
    decoder: Decoder, parallel: ParallelDims, precision: PrecisionConfig, spec: Spec, key: str = "policy.layout"
) -> None:
    """Raises an error unless an FP8 recipe supports the widths of the model and of each rank's part. Accepts any model
    without FP8.

    Transformer Engine multiplies FP8 only in certain multiples. And numbers with the same scale must not be split: each
    part would get a different scale, and results would depend on the layout.

    Args:
        decoder: The model.
        parallel: The layout.
        precision: `policy.precision`.
        spec: The kind of layers.
        key: The layout's setting, for errors.

    Raises:
        UserError: A width is not supported; names the setting, the value, the width and the allowed values. Or too many
            layers are excluded from FP8 (`config.precision.check_layers`).
    """
    need = needs(precision)
    if need is None:
        return
    check_layers(precision, decoder.layers, parallel.pipeline)
    recipe = f"policy.precision.recipe = {precision.recipe}"
    if spec == "te" and decoder.hidden % need.width:
        raise UserError(
            f"Transformer Engine multiplies FP8 by multiples of {need.width}, and the model's "
            f"hidden size is {decoder.hidden}",
            key=recipe,
            fix="give policy.precision.recipe=model, or another model",
        )
    width = need.width if spec == "te" else 1
    for cut in dict.fromkeys(cut for block in decoder.blocks for cut in block.megatron_widths()):
        size = getattr(parallel, cut.dimension)
        if not _fits(cut, size, width, need.block):
            allowed_sizes = [str(n) for n in range(1, cut.total + 1) if _fits(cut, n, width, need.block)]
            fix = f"{key}.{cut.dimension} of {', '.join(allowed_sizes)}, or " if allowed_sizes else ""
            raise UserError(
                f"{key}.{cut.dimension} = {size} leaves {cut.total // size} of the model's "
                f"{cut.total} {cut.what} to a rank; it needs multiples of "
                f"{max(width, need.block if size > 1 else 1)}, as "
                f"{('the cut would part numbers that share a scale' if size > 1 else 'Transformer Engine does')}"
                f"; allowed is {fix}policy.precision.recipe=model",
                key=recipe,
                settings=(f"{key}.{cut.dimension}",),
            )


def _fits(cut: Cut, size: int, width: int, block: int) -> bool:
    """Returns True if each of `size` ranks gets a multiple of `width` columns, and of `block` for several ranks."""
    return cut.total % size == 0 and cut.total // size % (max(width, block) if size > 1 else width) == 0
