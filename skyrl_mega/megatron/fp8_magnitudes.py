"""The largest magnitudes of past passes, the source of the scales of `fp8_delayed` (arXiv:2209.05433, section 3.3).

Magnitudes cover the whole pass over all ranks, so a tensor's scale does not depend on the cut of the pass. A tensor
without a past magnitude uses the present one. Checkpoints do not hold magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

INPUT, WEIGHT, GRADIENT = range(3)
"""Indices of the three tensors of a linear layer with a magnitude."""


class Magnitudes:
    """Magnitudes of all linear layers of a model, kept on each rank.

    Args:
        layers: Number of layers.
        history: Number of passes to keep.
        device: Device of the magnitudes.
    """

    def __init__(self, layers: int, history: int, device: torch.device) -> None:
        self._past = torch.zeros(history, layers, 3, device=device)
        self._past_max = torch.zeros(layers, 3, device=device)
        self._current = torch.zeros(layers, 3, device=device)

    def amax_for_scaling(self, layer: int, kind: int, amax: Tensor) -> Tensor:
        """Returns the magnitude for scaling a tensor: the largest of past passes if any, else `amax`.

        Records `amax` for later passes.

        Args:
            layer: Index of the layer.
            kind: INPUT, WEIGHT or GRADIENT.
            amax: float32 []: largest magnitude of the tensor.
        """
        torch.maximum(self._current[layer, kind], amax, out=self._current[layer, kind])
        past = self._past_max[layer, kind]
        return torch.where(past > 0, past, amax)

    def end(self, max_over_ranks: Callable[[Tensor], None]) -> None:
        """Ends a training pass: the recorded magnitudes join the history, and the oldest are dropped.

        Args:
            max_over_ranks: Replaces a tensor in place by the maximum over all ranks.
        """
        max_over_ranks(self._current)
        self._past = torch.cat([self._current[None], self._past[:-1]])
        self._past_max = self._past.amax(0)
        self.forget()

    def forget(self) -> None:
        """Ends a pass without training and discards the recorded magnitudes."""
        self._current = torch.zeros_like(self._current)
