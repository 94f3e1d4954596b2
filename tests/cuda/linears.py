"""What linear layers get and give, forward and backward, and what that is by plain loops over a recipe's blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Linear:
    """One layer's pass; float32, but for what is not there yet."""

    given: Tensor = field(default_factory=lambda: torch.empty(0))
    """[R, in]."""
    made: Tensor = field(default_factory=lambda: torch.empty(0))
    """[R, out]; its part of the rows where the layer scatters them."""
    splits: list[int] = field(default_factory=list)
    """Rows of each expert; empty of a layer that is not grouped."""
    of_made: Tensor = field(default_factory=lambda: torch.empty(0))
    """Gradient of `made`."""
    of_given: Tensor = field(default_factory=lambda: torch.empty(0))
    """Gradient of `given`."""
    weights: list[Tensor] = field(default_factory=list)
    """[out, in] of each expert."""
    of_weights: list[Tensor] = field(default_factory=list)
    scales: list[Scales] = field(default_factory=list)
    """With delayed scaling, of each expert: what the pass multiplied its numbers by."""


class Scales(NamedTuple):
    """Of what is given, of the weight, and of the gradient of what is made."""

    given: float
    weight: float
    gradient: float


@contextmanager
def watched(modules: dict[str, Any]) -> Iterator[dict[str, Linear]]:
    """Notes one pass through modules of Transformer Engine's, by name."""
    found = {name: Linear() for name in modules}
    hooks = [module.register_forward_hook(_note(found[name])) for name, module in modules.items()]
    states: dict[str, dict[str, Tensor]] = {name: {} for name in modules}
    for name, module in modules.items():
        # Before the pass ends, and its own magnitudes are among those that make scales.
        hooks.append(module.register_forward_hook(_keep_scales(states[name], "scaling_fwd")))
    yield found
    for hook in hooks:
        hook.remove()
    for name, state in states.items():
        if state:
            forward, back = (state[key].tolist() for key in ("scaling_fwd", "scaling_bwd"))
            found[name].scales = [
                Scales(*pair, gradient)
                for *pair, gradient in zip(forward[0::3], forward[1::3], back[0::2], strict=True)
            ]
    for name, module in modules.items():
        for p in (p for n, p in module.named_parameters() if n.startswith("weight")):
            found[name].weights.append(_plain(p))
            found[name].of_weights.append(_plain(p.grad))


def _note(into: Linear) -> Any:
    def forward(_: Any, given: tuple[Any, ...], made: Any) -> None:
        made = made[0] if isinstance(made, tuple) else made
        into.given, into.made = _plain(given[0]), _plain(made)
        if len(given) > 1:
            into.splits = [int(n) for n in given[1]]
        if made.requires_grad:  # not in a pass that is only run again
            made.register_hook(lambda g: setattr(into, "of_made", _plain(g)))
            given[0].register_hook(lambda g: setattr(into, "of_given", _plain(g)))

    return forward


def _keep_scales(into: dict[str, Tensor], key: str) -> Any:
    def forward(module: Any, _: Any, made: Any) -> None:
        if not hasattr(module.fp8_meta.get(key), "amax_history"):
            return
        into[key] = _plain(module.fp8_meta[key].scale[None])[0]
        made = made[0] if isinstance(made, tuple) else made
        if made.requires_grad:
            made.register_hook(lambda _: into.update(scaling_bwd=_plain(module.fp8_meta["scaling_bwd"].scale[None])[0]))

    return forward


def _plain(t: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return t.detach().float().reshape(-1, t.shape[-1]).clone()


# ---- recipes -----------------------------------------------------------------------------------------------------


def rounded(values: Tensor, scale: Tensor | float, kind: torch.dtype) -> Tensor:
    """values → the nearest number / scale."""
    most = torch.finfo(kind).max
    return (values * scale).clamp(-most, most).to(kind).float() / scale


def in_rows(x: Tensor, kind: torch.dtype = E4M3) -> Tensor:
    """Blocks of 1 × 128."""
    out = torch.zeros_like(x)
    for start in range(0, x.shape[1], 128):
        for row in range(len(x)):
            block = x[row, start : start + 128]
            most = block.abs().max()
            if most > 0:
                out[row, start : start + 128] = rounded(block, torch.finfo(kind).max / most, kind)
    return out


def in_squares(w: Tensor, kind: torch.dtype = E4M3) -> Tensor:
    """Blocks of 128 × 128."""
    out = torch.zeros_like(w)
    for i in range(0, w.shape[0], 128):
        for j in range(0, w.shape[1], 128):
            block = w[i : i + 128, j : j + 128]
            out[i : i + 128, j : j + 128] = rounded(block, torch.finfo(kind).max / block.abs().max(), kind)
    return out


def whole(x: Tensor, kind: torch.dtype) -> Tensor:
    """One power of two for all: the largest that keeps the largest number within the format."""
    if not x.numel() or not x.abs().max() > 0:
        return x
    scale, most = 2.0**40, float(x.abs().max())
    while scale * most > torch.finfo(kind).max:
        scale /= 2
    return rounded(x, scale, kind)


def micro(x: Tensor, kind: torch.dtype = E4M3) -> Tensor:
    """A power of two for 32 numbers of a row: the largest that clips none of them."""
    out = torch.zeros_like(x)
    for start in range(0, x.shape[1], 32):
        for row in range(len(x)):
            out[row, start : start + 32] = whole(x[row, start : start + 32], kind)
    return out


@dataclass(frozen=True)
class Products:
    """The three products of a layer in a recipe, float32. With delayed scaling, by what numbers are multiplied."""

    recipe: str
    scales: Scales | None = None

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """[R, in], [out, in] → [R, out]."""
        return self._given(x) @ self._weight(w).T

    def of_given(self, g: Tensor, w: Tensor) -> Tensor:
        """[R, out], [out, in] → [R, in]."""
        weight = micro(w.T).T if self.recipe == "mxfp8" else self._weight(w)
        return self._gradient(g) @ weight

    def of_weight(self, g: Tensor, x: Tensor) -> Tensor:
        """[R, out], [R, in] → [out, in]: blocks lie along the rows, over which it sums."""
        return self._gradient(g.T) @ self._given(x.T).T

    def _given(self, x: Tensor) -> Tensor:
        return rounded(x, self.scales.given, E4M3) if self.scales else ALONG[self.recipe](x, E4M3)

    def _weight(self, w: Tensor) -> Tensor:
        if self.scales:
            return rounded(w, self.scales.weight, E4M3)
        return in_squares(w) if self.recipe == "fp8_blockwise" else ALONG[self.recipe](w, E4M3)

    def _gradient(self, g: Tensor) -> Tensor:
        if self.scales:
            return rounded(g, self.scales.gradient, E5M2)
        return ALONG[self.recipe](g, E5M2 if self.recipe == "fp8_current" else E4M3)


ALONG = {"fp8_blockwise": in_rows, "mxfp8": micro, "fp8_current": whole}
"""How activations and gradients are rounded, whose rows a product sums along."""
