"""Types of tensors on the wire: unchanged, or block-scaled FP8 with the scales as separate tensors.

The scales of `<name>` are the float32 tensor `<name>_scale_inv`, one for every 128 × 128 block of the global tensor,
as in Hugging Face's block-FP8 checkpoints. `with_scales` adds these tensors to a layout, so plans move scales like any
other tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.models.quantization import SCALE_SUFFIX
from skyrl_mega.parallel.box import Box, Layout, Piece, Shard

FP8 = torch.float8_e4m3fn
SUFFIX = SCALE_SUFFIX


@dataclass(frozen=True)
class Wire:
    """The type of every tensor on the wire."""

    dtype: torch.dtype
    """Type of all other tensors: router, norms, embedding, head, biases."""
    quantised: frozenset[str] = frozenset()
    """Tensors sent as E4M3."""
    float32: frozenset[str] = frozenset()
    """Tensors sent in float32 whatever the model's type (`Decoder.float32_tensors`)."""

    @property
    def scales(self) -> frozenset[str]:
        """Names of the quantised tensors' scales."""
        return frozenset(name + SUFFIX for name in self.quantised)

    def type_of(self, name: str) -> torch.dtype:
        """Returns the type of the elements of the tensor `name` on the wire: E4M3 for a quantised tensor, float32 for
        its scales and for the tensors `float32`, else `dtype`."""
        if name in self.quantised:
            return FP8
        in_float32 = name in self.float32 or name.removesuffix(SUFFIX) in self.quantised
        return torch.float32 if in_float32 else self.dtype

    def itemsize(self, name: str) -> int:
        """Returns the bytes of an element of the tensor `name` on the wire."""
        return self.type_of(name).itemsize


def quantised(names: Iterable[str]) -> frozenset[str]:
    """Returns those of the tensor names that vLLM's and Hugging Face's block-FP8 models quantise: all linear weights of
    attention, experts and MLPs, recognised by the end `_proj.weight`.
    """
    return frozenset(name for name in names if name.endswith("_proj.weight"))


def with_scales(layout: Layout, names: frozenset[str]) -> Layout:
    """Returns a new layout: the scales of the tensors `names`, then all tensors of `layout`. Names not in the layout
    are ignored.

    A piece gets the scales of all touched blocks, in a local tensor called like the piece's with `_scale_inv`. If a
    piece begins inside a block or not on a block of the local tensor (never in an engine serving FP8), the scales of
    each piece are a separate local tensor: `_scale_inv.0`, `_scale_inv.1`, …
    """
    scales = scale_shapes(layout.tensors, names)
    shards, which = layout.distinct
    extended = [_extended(shard, names) for shard in shards]
    # Scales first, so that a dequantising receiver has them in time.
    return Layout({**scales, **layout.tensors}, tuple(extended[i] for i in which))


def scale_shapes(tensors: Mapping[str, tuple[int, ...]], names: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Returns name → shape of the scale tensors of the tensors `names`: the name with `SUFFIX`, and every size divided
    by the block size, rounded up.

    Args:
        tensors: Shape of each tensor.
        names: The quantised tensors; names not in `tensors` are ignored.
    """
    return {name + SUFFIX: tuple(-(-n // BLOCK) for n in shape) for name, shape in tensors.items() if name in names}


def scale_box(box: Box) -> Box:
    """Returns the box, in a scale tensor, of the scales of all blocks that a box of the weight touches."""
    low = tuple(a // BLOCK for a in box.start)
    return Box(low, tuple(-(-(a + n) // BLOCK) - b for a, n, b in zip(box.start, box.shape, low, strict=True)))


def _extended(shard: Shard, names: frozenset[str]) -> Shard:
    """Returns a shard with scale pieces added, one for each piece of a tensor in `names`, in order."""
    quantised_pieces = [piece for piece in shard.pieces if piece.tensor in names]
    misaligned = {
        piece.param
        for piece in quantised_pieces
        if any(a % BLOCK for a in piece.box.start) or any(o % BLOCK for o in piece.offset[-len(piece.box.start) :])
    }
    params: dict[str, tuple[int, ...]] = {}
    pieces = []
    count: Counter[str] = Counter()
    for piece in quantised_pieces:
        box = scale_box(piece.box)
        stack = len(piece.offset) - len(box.start)
        if piece.param in misaligned:
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
