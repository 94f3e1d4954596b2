"""The largest magnitudes of past passes, from which `fp8_delayed` has its scales (arXiv:2209.05433, section 3.3).

They are those of the whole pass over all ranks, so that a tensor is scaled the same however the pass is cut. One that
has none yet takes its own. Checkpoints do not hold them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

INPUT, WEIGHT, GRADIENT = range(3)
"""What of a linear layer has a magnitude."""


class Magnitudes:
    """Of all linear layers of a model, on each of its ranks.

    Args:
        layers: How many there are.
        history: Passes that are kept.
        device: Where they lie.
    """

    def __init__(self, layers: int, history: int, device: torch.device) -> None:
        self._past = torch.zeros(history, layers, 3, device=device)
        self._largest = torch.zeros(layers, 3, device=device)
        self._present = torch.zeros(layers, 3, device=device)

    def before(self, layer: int, what: int, amax: Tensor) -> Tensor:
        """The magnitude that scales a tensor; its own, `amax` (float32 []), is kept for the passes to come."""
        torch.maximum(self._present[layer, what], amax, out=self._present[layer, what])
        known = self._largest[layer, what]
        return torch.where(known > 0, known, amax)

    def end(self, agree: Callable[[Tensor], None]) -> None:
        """Ends a pass that trained: its magnitudes are the newest, and the oldest are forgotten.

        Args:
            agree: Replaces a tensor by its maximum over all ranks, in place.
        """
        agree(self._present)
        self._past = torch.cat([self._present[None], self._past[:-1]])
        self._largest = self._past.amax(0)
        self.forget()

    def forget(self) -> None:
        """Ends a pass that did not train: nothing of it is kept."""
        self._present = torch.zeros_like(self._present)
