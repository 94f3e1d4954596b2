"""What tensors are on the wire: as they are, or block-scaled FP8 with the scales as tensors of their own.

The scales of `<name>` are the float32 tensor `<name>_scale_inv`, one for every 128 × 128 block of the global tensor, as
in Hugging Face's block-FP8 checkpoints. `with_scales` adds them to a layout, so that plans move them like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.parallel.box import Box, Layout, Piece, Shard

FP8 = torch.float8_e4m3fn
SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Wire:
    """The type of every tensor on the wire."""

    dtype: torch.dtype
    """Of what is not quantised: router, norms, embedding, head, biases."""
    quantised: frozenset[str] = frozenset()
    """Tensors that travel as E4M3."""

    @property
    def scales(self) -> frozenset[str]:
        """The names of their scales."""
        return frozenset(name + SUFFIX for name in self.quantised)

    def type_of(self, name: str) -> torch.dtype:
        """What the elements of one tensor are on the wire."""
        if name in self.quantised:
            return FP8
        return torch.float32 if name.removesuffix(SUFFIX) in self.quantised else self.dtype

    def itemsize(self, name: str) -> int:
        """Bytes of one element; for `plan`."""
        return self.type_of(name).itemsize


def quantised(names: Iterable[str]) -> frozenset[str]:
    """The linear weights of attention, experts and MLPs: what vLLM's and Hugging Face's block-FP8 models quantise."""
    return frozenset(name for name in names if name.endswith("_proj.weight"))


def with_scales(layout: Layout, names: frozenset[str]) -> Layout:
    """The layout, with the scales of the tensors `names`.

    A piece brings the scales of all blocks that it touches, in a local tensor called like the piece's with
    `_scale_inv`. Where a piece begins inside a block or not on a block of its local tensor, as no engine that serves
    FP8 has it, the scales of each piece are a local tensor of their own: `_scale_inv.0`, `_scale_inv.1`, …
    """
    scales = scale_shapes(layout.tensors, names)
    shards, which = layout.distinct
    extended = [_extended(shard, names) for shard in shards]
    # First, so that whoever dequantises has them in time.
    return Layout({**scales, **layout.tensors}, tuple(extended[i] for i in which))


def scale_shapes(tensors: Mapping[str, tuple[int, ...]], names: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """The tensors that the scales of `names` are."""
    return {name + SUFFIX: tuple(-(-n // BLOCK) for n in shape) for name, shape in tensors.items() if name in names}


def scale_box(box: Box) -> Box:
    """The blocks that a box touches."""
    low = tuple(a // BLOCK for a in box.start)
    return Box(low, tuple(-(-(a + n) // BLOCK) - b for a, n, b in zip(box.start, box.shape, low, strict=True)))


def _extended(shard: Shard, names: frozenset[str]) -> Shard:
    """A shard with its scale pieces, one for each piece of a tensor in `names`, in order."""
    mine = [piece for piece in shard.pieces if piece.tensor in names]
    odd = {
        piece.param
        for piece in mine
        if any(a % BLOCK for a in piece.box.start) or any(o % BLOCK for o in piece.offset[-len(piece.box.start) :])
    }
    params: dict[str, tuple[int, ...]] = {}
    pieces = []
    count: Counter[str] = Counter()
    for piece in mine:
        box = scale_box(piece.box)
        stack = len(piece.offset) - len(box.start)
        if piece.param in odd:
            name = f"{piece.param}{SUFFIX}.{count[piece.param]}"
            count[piece.param] += 1
            params[name] = box.shape
            offset: tuple[int, ...] = (0,) * len(box.start)
        else:
            name = piece.param + SUFFIX
            shape = shard.params[piece.param]
            params[name] = (*shape[:stack], *(-(-n // BLOCK) for n in shape[stack:]))
            offset = (*piece.offset[:stack], *(o // BLOCK for o in piece.offset[stack:]))
        pieces.append(Piece(piece.tensor + SUFFIX, box, name, offset))
    return replace(shard, params={**shard.params, **params}, pieces=(*shard.pieces, *pieces))
