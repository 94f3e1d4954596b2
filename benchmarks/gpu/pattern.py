"""Weights with identity: each element is a hash of its tensor, its position and a version."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from skyrl_mega.parallel.box import Piece, Shard
from skyrl_mega.weights.exchange.pack import local_view


def fill(shard: Shard, tensors: dict[str, tuple[int, ...]], params: dict[str, Tensor], version: int) -> None:
    """Writes a version's weights into a rank's bfloat16 parameters."""
    number = {name: i for i, name in enumerate(tensors)}
    for piece in shard.pieces:
        local = local_view(params[piece.param], piece.offset, piece.box)
        local.copy_(_bits(piece, tensors[piece.tensor], number[piece.tensor], version, local.device))


def different(
    shard: Shard,
    tensors: dict[str, tuple[int, ...]],
    params: dict[str, Tensor],
    version: int,
    quantised: Collection[str] = (),
) -> int:
    """Returns the number of elements of a rank's bfloat16 parameters that differ from the version's.

    Args:
        quantised: Tensors sent as block-scaled FP8. The wanted value of their elements is the rounded value.
    """
    number = {name: i for i, name in enumerate(tensors)}
    wrong = torch.zeros((), dtype=torch.int64, device=next(iter(params.values())).device)
    for piece in shard.pieces:
        local = local_view(params[piece.param], piece.offset, piece.box)
        wanted = _bits(piece, tensors[piece.tensor], number[piece.tensor], version, local.device)
        if piece.tensor in quantised:
            wanted = rounded(wanted)
        wrong += (local.contiguous().view(torch.int16) != wanted.view(torch.int16)).sum()
    return int(wrong)


def rounded(weight: Tensor) -> Tensor:
    """Returns a bfloat16 matrix [R, C] after E4M3 rounding with one scale for each 128 x 128 block, in plain torch.

    The matrix is a whole tensor, or begins on a block boundary. Scales are max |w| / 448, at least 1e-4 / 448.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [rows of blocks, 128, columns of blocks, 128]
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
    numbers = (blocks * (1 / scale)).to(torch.float8_e4m3fn).float()
    return (numbers * scale).flatten(2, 3).flatten(0, 1)[:rows, :columns].bfloat16()


def _bits(piece: Piece, shape: tuple[int, ...], number: int, version: int, device: torch.device) -> Tensor:
    """Returns the elements of a box: finite numbers with hashed bits."""
    flat = torch.zeros((), dtype=torch.int32, device=device)
    for start, size, whole in zip(piece.box.start, piece.box.shape, shape, strict=True):
        flat = (flat * whole)[..., None] + torch.arange(start, start + size, dtype=torch.int32, device=device)
    mixed = (flat * 40503 + number * 9973 + version * 31337) * 69069 + 12345
    return ((mixed >> 9) & 0xBFFF).to(torch.int16).view(torch.bfloat16)
