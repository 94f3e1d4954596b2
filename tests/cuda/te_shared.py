"""A rank's forward and backward pass over sequences with common first tokens, started by `programs.run`."""

from __future__ import annotations

from typing import Any

from tests.cuda import programs
from tests.cuda.programs import Case


def go(case: Case, waits: Any) -> list[tuple[Any, dict[str, Any], int]]:
    """Returns for each policy the hidden states before predicted tokens, numpy float32 [T, H] (0 for other tokens), the
    gradients by parameter name, and the tokens of the row."""
    programs.join(case)
    return [_once(case, policy, waits) for policy in case.policies]


def _once(case: Case, policy: Any, waits: Any) -> tuple[Any, dict[str, Any], int]:
    import torch

    from tests.cuda.syncs import AsCuda
    from tests.cuda.te_layers import ready
    from tests.megatron.test_shared_prefixes import groups_batch

    batch = groups_batch()
    layers = ready(case, policy, waits, batch, "float32")
    micro, tensor = layers.micro, case.parallel.tensor
    mine = slice(None) if tensor == 1 else _part(len(micro.source), tensor, case.parallel.coordinates(case.rank).tp)
    counted = (micro.columns["weights"] != 0)[mine]
    source = micro.source[mine]
    width = layers.chunk.config.hidden_size
    whole = torch.linspace(-1, 1, len(batch.tokens) * width).view(-1, width)
    layers.gradient = whole[source.clamp(min=0)] * counted[:, None]
    with AsCuda():
        hidden = layers.once()
    placed = torch.zeros_like(whole)
    placed[source[counted]] = hidden.detach().float().view(-1, width)[counted]
    return placed.numpy(), layers.gradients(), micro.tokens.numel()


def _part(tokens: int, tensor: int, rank: int) -> slice:
    """Returns a tensor rank's part of a row."""
    return slice(tokens // tensor * rank, tokens // tensor * (rank + 1))
