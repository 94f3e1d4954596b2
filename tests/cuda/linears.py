"""Inputs and outputs of linear layers, forward and backward, and their values by plain loops over a recipe's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Linear:
    """Tensors of a layer's pass, float32; tensors not yet recorded are empty."""

    given: Tensor = field(default_factory=lambda: torch.empty(0))
    """Input [R, in]."""
    made: Tensor = field(default_factory=lambda: torch.empty(0))
    """Output [R, out]; with scattered rows, this rank's part."""
    splits: list[int] = field(default_factory=list)
    """Rows of each expert; empty for a layer that is not grouped."""
    of_made: Tensor = field(default_factory=lambda: torch.empty(0))
    """Gradient of `made`."""
    of_given: Tensor = field(default_factory=lambda: torch.empty(0))
    """Gradient of `given`."""
    weights: list[Tensor] = field(default_factory=list)
    """Weights [out, in] of each expert."""
    of_weights: list[Tensor] = field(default_factory=list)


@contextmanager
def watched(modules: dict[str, Any]) -> Iterator[dict[str, Linear]]:
    """Records a pass through Transformer Engine modules, by name."""
    passes = {name: Linear() for name in modules}
    hooks = [module.register_forward_hook(_note(passes[name])) for name, module in modules.items()]
    yield passes
    for hook in hooks:
        hook.remove()
    for name, module in modules.items():
        for p in (p for n, p in module.named_parameters() if n.startswith("weight")):
            passes[name].weights.append(_plain(p))
            passes[name].of_weights.append(_plain(p.grad))


def _note(into: Linear) -> Any:
    def forward(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        into.given, into.made = _plain(inputs[0]), _plain(output)
        if len(inputs) > 1:
            into.splits = [int(n) for n in inputs[1]]
        if output.requires_grad:  # false in a pass that is only recomputed
            output.register_hook(lambda g: setattr(into, "of_made", _plain(g)))
            inputs[0].register_hook(lambda g: setattr(into, "of_given", _plain(g)))

    return forward


def _plain(t: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return t.detach().float().reshape(-1, t.shape[-1]).clone()


# ---- recipes -----------------------------------------------------------------------------------------------------


def rounded(values: Tensor, scale: Tensor | float, kind: torch.dtype) -> Tensor:
    """Returns the values after scaling, rounding to the format, and scaling back."""
    most = torch.finfo(kind).max
    return (values * scale).clamp(-most, most).to(kind).float() / scale


def in_rows(x: Tensor, kind: torch.dtype = E4M3) -> Tensor:
    """Returns x rounded with a scale for each block of 1 × 128."""
    out = torch.zeros_like(x)
    for start in range(0, x.shape[1], 128):
        for row in range(len(x)):
            block = x[row, start : start + 128]
            most = block.abs().max()
            if most > 0:
                out[row, start : start + 128] = rounded(block, torch.finfo(kind).max / most, kind)
    return out


def in_squares(w: Tensor, kind: torch.dtype = E4M3) -> Tensor:
    """Returns w rounded with a scale for each block of 128 × 128."""
    out = torch.zeros_like(w)
    for i in range(0, w.shape[0], 128):
        for j in range(0, w.shape[1], 128):
            block = w[i : i + 128, j : j + 128]
            out[i : i + 128, j : j + 128] = rounded(block, torch.finfo(kind).max / block.abs().max(), kind)
    return out


def whole(x: Tensor, kind: torch.dtype) -> Tensor:
    """Returns x rounded with a single scale: the largest power of two that keeps all values within the format."""
    if not x.numel() or not x.abs().max() > 0:
        return x
    scale, most = 2.0**40, float(x.abs().max())
    while scale * most > torch.finfo(kind).max:
        scale /= 2
    return rounded(x, scale, kind)


def micro(x: Tensor, kind: torch.dtype = E4M3) -> Tensor:
    """Returns x rounded with a scale for 32 numbers of a row: the largest power of two without clipping."""
    out = torch.zeros_like(x)
    for start in range(0, x.shape[1], 32):
        for row in range(len(x)):
            out[row, start : start + 32] = whole(x[row, start : start + 32], kind)
    return out


@dataclass(frozen=True)
class Products:
    """The three products of a layer in a recipe, float32."""

    recipe: str

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns the output [R, out] of [R, in] and [out, in]."""
        return self._given(x) @ self._weight(w).T

    def of_given(self, g: Tensor, w: Tensor) -> Tensor:
        """Returns the input gradient [R, in] of [R, out] and [out, in]."""
        weight = micro(w.T).T if self.recipe == "mxfp8" else self._weight(w)
        return self._gradient(g) @ weight

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """Returns the weight gradient [out, in] of [R, out] and [R, in]; blocks lie along the summed rows."""
        return self._gradient(g.T) @ self._given(x.T).T

    def _given(self, x: Tensor) -> Tensor:
        return ALONG[self.recipe](x, E4M3)

    def _weight(self, w: Tensor) -> Tensor:
        return in_squares(w) if self.recipe == "fp8_blockwise" else ALONG[self.recipe](w, E4M3)

    def _gradient(self, g: Tensor) -> Tensor:
        return ALONG[self.recipe](g, E5M2 if self.recipe == "fp8_current" else E4M3)


ALONG = {"fp8_blockwise": in_rows, "mxfp8": micro, "fp8_current": whole}
"""Rounding of activations and gradients by recipe; a product sums along their rows."""
