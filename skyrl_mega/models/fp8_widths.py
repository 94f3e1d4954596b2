"""Widths of linear layers with which an FP8 recipe can be computed, and is the same in every layout."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.precision import check_layers, needs
from skyrl_mega.config.schema import PrecisionConfig
from skyrl_mega.models.blocks.base import Cut, Spec
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims


def check(
    d: Decoder, parallel: ParallelDims, precision: PrecisionConfig, spec: Spec, key: str = "policy.layout"
) -> None:
    """Refuses a model, or a cut of it, that has other widths than the recipe needs.

    Transformer Engine multiplies FP8 by certain multiples only. And numbers that share a scale must not be cut apart:
    each part would have a scale of its own, and another layout's results would be others.

    Args:
        d: The model.
        parallel: The layout.
        precision: `policy.precision`.
        spec: Whose layers.
        key: The layout's setting, for errors.

    Raises:
        UserError: naming the setting, its value, the width and what is allowed.
    """
    found = needs(precision)
    if found is None:
        return
    check_layers(precision, d.layers, parallel.pipeline)
    recipe = f"policy.precision.recipe = {precision.recipe}"
    if spec == "te" and d.hidden % found.width:
        raise UserError(
            f"{recipe}: Transformer Engine multiplies FP8 by multiples of {found.width}, and the model's hidden size "
            f"is {d.hidden}; give policy.precision.recipe=model, or another model"
        )
    width = found.width if spec == "te" else 1
    for cut in dict.fromkeys(cut for block in d.blocks for cut in block.megatron_widths()):
        size = getattr(parallel, cut.dimension)
        if not _fits(cut, size, width, found.block):
            fit = [str(n) for n in range(1, cut.total + 1) if _fits(cut, n, width, found.block)]
            fix = f"{key}.{cut.dimension} of {', '.join(fit)}, or " if fit else ""
            raise UserError(
                f"{recipe}: {key}.{cut.dimension} = {size} leaves {cut.total // size} of the model's {cut.total} "
                f"{cut.what} to a rank; it needs multiples of {max(width, found.block if size > 1 else 1)}, as "
                f"{'the cut would part numbers that share a scale' if size > 1 else 'Transformer Engine does'}; "
                f"allowed is {fix}policy.precision.recipe=model"
            )


def _fits(cut: Cut, size: int, width: int, block: int) -> bool:
    """Whether so many ranks have whole widths, and whole blocks where there are several."""
    return cut.total % size == 0 and cut.total // size % (max(width, block) if size > 1 else width) == 0
