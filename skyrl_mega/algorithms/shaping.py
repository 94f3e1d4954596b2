"""Length shaping of DAPO (arXiv:2503.14476, section 3.4) for responses near or above the limit."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_overlong(lengths_N: Tensor, limit: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Returns the soft overlong punishment added to a reward (DAPO, arXiv:2503.14476, equation 13), times `penalty`.

        R(y) =  0                                   |y| ≤ limit - buffer
                ((limit - buffer) - |y|) / buffer   limit - buffer < |y| ≤ limit
               -1                                   limit < |y|

    Args:
        lengths_N: Response tokens, integers [N].
        limit: L_max, the longest allowed response.
        buffer: L_cache, the number of tokens before the limit over which the punishment grows; 0 turns it off.
        penalty: The punishment at and above the limit, at least 0.

    Returns:
        float32 [N] in [-penalty, 0].
    """
    if buffer <= 0:
        return torch.zeros(lengths_N.shape)
    return penalty * ((limit - buffer - lengths_N).float() / buffer).clamp(-1.0, 0.0)
