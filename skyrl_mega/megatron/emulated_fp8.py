"""Emulation of `policy.precision` without FP8 products: linear layers round as Transformer Engine does and multiply in
`model.dtype`.

The forward pass rounds activations and weights. The backward pass rounds the output's gradient, used for both the
input's and the weight's gradient. The weight's gradient uses the same rounded activations and gradients as the other
two products. Transformer Engine instead rounds both again along the tokens; such blocks of tokens would depend on the
cut of the batch.

Weights are rounded once per pass, before the first micro-batch. The 128 × 128 blocks follow the Hugging Face tensors,
and the scales come from the same code as for the wire (`weights.fp8`). So engines with `weights.wire: fp8` receive
exactly the numbers used by the policy. Exactly the layers with weights sent in FP8 are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from skyrl_mega.config.schema import PrecisionConfig
from skyrl_mega.kernels.block_fp8 import dequantise, quantise
from skyrl_mega.megatron import fp8_rounding
from skyrl_mega.megatron.fp8_rounding import E4M3, E5M2
from skyrl_mega.parallel.box import Layout
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.fp8.format import SUFFIX, quantised, with_scales
from skyrl_mega.weights.fp8.scales import Scales, largest_of_all


class EmulatedFp8:
    """The linear layers of a rank computed in an FP8 recipe: replaces the products of the chunks' layers.

    Args:
        chunks: The rank's model chunks, not wrapped.
        precision: `policy.precision`, with a recipe other than `model`.
        params: The rank's parameters by local name.
        layout: The shards of all ranks of the model.
        rank: This rank.
    """

    def __init__(
        self, chunks: Sequence[Any], precision: PrecisionConfig, params: Mapping[str, Tensor], layout: Layout, rank: int
    ) -> None:
        names = quantised(layout.tensors)
        weights = {piece.param for piece in layout.shards[rank].pieces if piece.tensor in names}
        self._params = params
        self.linears: dict[str, Linear] = {}
        """Layers by the local name of their weight."""
        for param, module in _fp8_linears(chunks, precision):
            if param in weights:
                self.linears[param] = Linear(precision.recipe)
                module._forward_impl = self.linears[param]
        self._scales: Scales | None = None
        if precision.recipe == "fp8_blockwise":
            device = next(iter(params.values())).device
            scales = {name + SUFFIX for name in names}
            self._scales = Scales(with_scales(layout, names), rank, names, names | scales, largest_of_all, device)

    def begin(self) -> None:
        """Computes the rounded weights of all layers for the next pass. Call before every pass, with the parameters on
        the device and complete. A collective of all ranks."""
        with torch.no_grad():
            if self._scales is not None:
                self._scales.compute(self._params)
                for param, linear in self.linears.items():
                    linear.weight = linear.transposed = torch.empty_like(self._params[param])
                for piece, scales in self._scales.pieces:
                    if piece.param in self.linears:
                        row, column = piece.box.start
                        weight = local_view(self._params[piece.param], piece.offset, piece.box)
                        numbers = quantise(weight, scales, row, column)
                        rounded = local_view(self.linears[piece.param].weight, piece.offset, piece.box)
                        rounded.copy_(dequantise(numbers, scales, row, column, weight.dtype))
                return
            for param, linear in self.linears.items():
                linear.round_weight(self._params[param].detach())

    def end(self) -> None:
        """Ends a pass and frees the rounded weights. Call once after each `begin`."""
        for linear in self.linears.values():
            del linear.weight, linear.transposed


class Linear:
    """The matrix products of a linear layer with emulated FP8, in place of megatron-core's `_forward_impl`.

    Args:
        recipe: `policy.precision.recipe`; not `model`, which has no FP8.
    """

    weight: Tensor
    """[out, in], rounded for the product with activations."""
    transposed: Tensor
    """[out, in], rounded for the product with gradients."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def __call__(
        self,
        *,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **_: Any,
    ) -> Tensor:
        """Returns the product [..., out] of `input` [..., in], rounded to FP8, and the rounded weight, plus the bias if
        given; in the dtype of the product, differentiable, with megatron-core's communication. `weight` only receives
        the gradient: its values are not read."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        out: Tensor = _Product.apply(input, weight, self)
        return out if bias is None else out + bias

    def round_weight(self, weight: Tensor) -> None:
        """Sets `weight` and `transposed` from an unrounded weight [out, in], for recipes other than `fp8_blockwise`."""
        if self.recipe == "mxfp8":
            self.weight = fp8_rounding.microscaled(weight)
            self.transposed = fp8_rounding.microscaled(weight.t()).t()
        else:
            self.weight = self.transposed = fp8_rounding.tensor(weight, E4M3)

    def round(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """Returns activations or gradients rounded to FP8 values, in their own dtype.

        Recipes with a scale per tensor round to the format `kind` (E4M3 or E5M2), other recipes to E4M3.
        """
        match self.recipe:
            case "fp8_blockwise":
                return fp8_rounding.blocks(x)
            case "mxfp8":
                return fp8_rounding.microscaled(x)
        return fp8_rounding.tensor(x, kind)


class _Product(torch.autograd.Function):
    """The product of x [..., in] and weight [out, in]: [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: Linear) -> Tensor:
        rounded = linear.round(x, E4M3)
        ctx.save_for_backward(rounded, linear.transposed)
        ctx.linear = linear
        return rounded @ linear.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, transposed = ctx.saved_tensors
        rounded = ctx.linear.round(gradient, E5M2)
        grad_x = rounded @ transposed if ctx.needs_input_grad[0] else None
        grad_weight = rounded.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _fp8_linears(chunks: Sequence[Any], precision: PrecisionConfig) -> Iterator[tuple[str, Any]]:
    """Yields the linear layers of the decoder layers computed in FP8: local name of the weight, module."""
    for i, chunk in enumerate(chunks):
        fp8 = range(precision.first_layers, chunk.config.num_layers - precision.last_layers)
        for local, layer in enumerate(chunk.decoder.layers):
            if layer.layer_number - 1 in fp8:
                for name, module in layer.named_modules():
                    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                        yield f"{i}.decoder.layers.{local}.{name}.weight", module
