"""Weights that say who they are: every element follows from its tensor, its place in it and a version."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_mega.parallel.box import Piece, Shard
from skyrl_mega.weights.exchange.pack import local_view


def fill(shard: Shard, tensors: dict[str, tuple[int, ...]], params: dict[str, Tensor], version: int) -> None:
    """Writes the version's weights into a rank's bfloat16 parameters."""
    number = {name: i for i, name in enumerate(tensors)}
    for piece in shard.pieces:
        local = local_view(params[piece.param], piece.offset, piece.box)
        local.copy_(_bits(piece, tensors[piece.tensor], number[piece.tensor], version, local.device))


def different(shard: Shard, tensors: dict[str, tuple[int, ...]], params: dict[str, Tensor], version: int) -> int:
    """Elements of a rank's parameters that are not the version's."""
    number = {name: i for i, name in enumerate(tensors)}
    wrong = torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)
    for piece in shard.pieces:
        local = local_view(params[piece.param], piece.offset, piece.box)
        wanted = _bits(piece, tensors[piece.tensor], number[piece.tensor], version, local.device)
        wrong += (local.contiguous().view(torch.int16) != wanted.view(torch.int16)).sum()
    return int(wrong)


def _bits(piece: Piece, shape: tuple[int, ...], number: int, version: int, device: torch.device) -> Tensor:
    """The box's elements: finite numbers whose bits are a hash."""
    flat = torch.zeros((), dtype=torch.int32, device=device)
    for start, size, whole in zip(piece.box.start, piece.box.shape, shape, strict=True):
        flat = (flat * whole)[..., None] + torch.arange(start, start + size, dtype=torch.int32, device=device)
    mixed = (flat * 40503 + number * 9973 + version * 31337) * 69069 + 12345
    return ((mixed >> 9) & 0xBFFF).to(torch.int16).view(torch.bfloat16)
