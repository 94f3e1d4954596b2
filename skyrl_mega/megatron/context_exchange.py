"""The exchange of context ranks around an attention layer with `policy.layout.context_exchange: all_to_all`: tokens of
all heads become heads of whole sequences, and back (Ulysses, arXiv:2309.14509).

Legend: C context ranks, T tokens of the whole packed row, L = T / C tokens of a rank, H heads of a tensor rank, D width
of a head. H and D differ between queries, keys and values. `global_L` [T] is the order of the row
(`packing.PackedRow`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import all_to_all_hp2sp, all_to_all_sp2hp
from torch import Tensor
from torch.distributed import ProcessGroup


def heads_of_whole_row(parts: Sequence[Tensor], global_L: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Returns for each tensor [L, H, D] this rank's heads of the whole row, [T, H / C, D], in the row's order.

    All tensors travel in a single message to each rank. A collective of the context ranks, forward and backward.

    Args:
        parts: Tensors of this rank's tokens.
        global_L: int64 [T], for each token of the row its index in the concatenation of the ranks' parts
            (`PackedRow.global_L`).
        group: The context ranks.

    Raises:
        ValueError: The ranks cannot split the heads of a tensor evenly.
    """
    ranks, tokens = group.size(), len(parts[0])
    if any(part.shape[1] % ranks for part in parts):
        raise ValueError(f"{ranks} context ranks cannot split heads {[part.shape[1] for part in parts]}")
    rows = [part.reshape(tokens, ranks, -1) for part in parts]  # the columns of every rank
    widths = [row.shape[-1] for row in rows]
    received = all_to_all_sp2hp(torch.cat(rows, dim=-1).flatten(1), group)[global_L]
    return [row.unflatten(1, (-1, part.shape[-1])) for row, part in zip(received.split(widths, 1), parts, strict=True)]


def tokens_of_all_heads(result: Tensor, global_L: Tensor, group: ProcessGroup) -> Tensor:
    """Returns this rank's tokens with all heads, [L, H · D], from the whole row with this rank's heads.

    The reverse of `heads_of_whole_row`. A collective of the context ranks, forward and backward.

    Args:
        result: Result of the attention for this rank's heads, [T, H / C · D], in the row's order.
        global_L: int64 [T], for each token of the row its index in the concatenation of the ranks' parts
            (`PackedRow.global_L`).
        group: The context ranks.
    """
    by_rank = torch.empty_like(result).index_copy_(0, global_L, result)
    received: Tensor = all_to_all_hp2sp(by_rank, group)
    return received
