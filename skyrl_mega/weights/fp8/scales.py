"""The sender's side of an FP8 wire: scales of the policy's blocks, including blocks shared by several ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.kernels.block_fp8 import BLOCK, block_amax, scales
from skyrl_mega.parallel.box import Box, Layout, Piece
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.fp8.format import FP8, SUFFIX, scale_box, with_scales
from skyrl_mega.weights.plan.intersect import Ints

Agree = Callable[[Tensor], None]
"""Function that replaces a float32 vector in place by the element-wise maximum over all policy ranks; every rank calls
it once a run."""


def largest_of_all(amax: Tensor) -> None:
    """Replaces `amax` in place by the element-wise maximum over the policy ranks (`Agree`)."""
    dist.all_reduce(amax, dist.ReduceOp.MAX)


class Scales:
    """A policy rank's scale tables.

    Args:
        layout: The policy's layout, with scales (`fp8.format.with_scales`).
        rank: This process's rank in the layout.
        quantised: Tensors sent as FP8.
        sent: Quantised tensors and scales with parts sent by this rank.
        agree: Maximum over ranks; unused if no block straddles ranks.
        device: Device of the tables.

    Raises:
        ValueError: A block straddles ranks and `agree` is None.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        quantised: frozenset[str],
        sent: Collection[str],
        agree: Agree | None,
        device: torch.device,
    ) -> None:
        self._agree = agree
        shard = layout.shards[rank]
        common = straddled(layout, quantised)
        self._common = sum(len(blocks) for blocks in common.values())
        if self._common and agree is None:
            name = next(iter(common))
            raise ValueError(f"{name}: several shards have parts of one block, so ranks must agree on its scale")
        first_block = dict(zip(common, np.cumsum([0, *map(len, common.values())]).tolist(), strict=False))
        weights = [piece for piece in shard.pieces if piece.tensor in quantised]
        of_scales = {name + SUFFIX for name in quantised}
        tables = [piece for piece in shard.pieces if piece.tensor in of_scales]
        shapes = {piece.param: shard.params[piece.param] for piece in tables}
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self._flat = torch.ones(sum(sizes), dtype=torch.float32, device=device)
        views = torch.split(self._flat, sizes)
        self.tables = {name: view.view(shape) for (name, shape), view in zip(shapes.items(), views, strict=True)}
        """Scales by local name, filled by `compute`."""
        numbers = dict(zip(shapes, torch.split(torch.arange(sum(sizes)), sizes), strict=True))
        self.pieces: list[tuple[Piece, Tensor]] = []
        """Every piece of a quantised tensor sent or agreed on by this rank, with its scales [I, J]."""
        table_indices: list[Tensor] = []
        common_indices: list[Ints] = []
        for piece, table in zip(weights, tables, strict=True):
            if piece.tensor not in sent and table.tensor not in sent and piece.tensor not in common:
                continue
            self.pieces.append((piece, local_view(self.tables[table.param], table.offset, table.box)))
            if piece.tensor in common:
                blocks = common[piece.tensor] - np.array(table.box.start)
                inside = ((blocks >= 0) & (blocks < np.array(table.box.shape))).all(1)
                where = local_view(numbers[table.param].view(shapes[table.param]), table.offset, table.box)
                table_indices.append(where[tuple(torch.from_numpy(blocks[inside].T.copy()))])
                common_indices.append(first_block[piece.tensor] + np.flatnonzero(inside))
        self._table_indices = (
            torch.cat(table_indices).to(device) if table_indices else torch.empty(0, dtype=torch.int64, device=device)
        )
        self._common_indices = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *common_indices])).to(device)

    def compute(self, params: Mapping[str, Tensor]) -> None:
        """Computes the scales of the policy's present weights and writes the scales to `tables`. Existing scales of
        weights already in FP8 are used unchanged. A collective of all policy ranks if a block straddles ranks (several
        ranks hold a part).

        Args:
            params: This rank's parameters by local name, with the scales of weights already in FP8.

        Raises:
            KeyError: `params` lacks a parameter.
        """
        for piece, table in self.pieces:
            if params[piece.param].dtype == FP8:
                continue
            row, column = piece.box.start
            table.copy_(block_amax(local_view(params[piece.param], piece.offset, piece.box), row, column))
        if self._common:
            assert self._agree is not None
            common = torch.zeros(self._common, dtype=torch.float32, device=self._flat.device)
            common.scatter_reduce_(0, self._common_indices, self._flat[self._table_indices], "amax")
            self._agree(common)
            self._flat[self._table_indices] = common[self._common_indices]
        self._flat.copy_(scales(self._flat))
        for name, table in self.tables.items():
            if name in params:
                table.copy_(params[name])


def straddled(layout: Layout, names: frozenset[str]) -> dict[str, Ints]:
    """Returns tensor name → indices [blocks, 2] (block row, block column) of the FP8 blocks of which several different
    pieces hold a part, so that ranks must agree on their scales. Equal pieces on several ranks count as one. Tensors
    without such a block are left out.

    Args:
        layout: The layout of the weights.
        names: The tensors to examine.
    """
    boxes: dict[str, dict[Box, None]] = {}
    for shard in layout.distinct[0]:
        for piece in shard.pieces:
            if piece.tensor in names:
                boxes.setdefault(piece.tensor, {})[piece.box] = None
    shared = {name: _shared(layout.tensors[name], tuple(of)) for name, of in sorted(boxes.items())}
    return {name: blocks for name, blocks in shared.items() if len(blocks)}


def without_own_blocks(layout: Layout, names: frozenset[str]) -> str | None:
    """Returns the name of the first tensor whose local tensor cannot be quantised in the blocks sent to the engines,
    because a block is cut among ranks, or a piece does not begin on a block of the local tensor; None without any.

    Args:
        layout: The layout of the weights.
        names: The tensors to examine.
    """
    cut = next(iter(straddled(layout, names)), None)
    if cut is not None:
        return cut
    for shard in with_scales(layout, names).distinct[0]:
        for piece in shard.pieces:
            if f"{SUFFIX}." in piece.param:
                return piece.tensor.removesuffix(SUFFIX)
    return None


@cache
def _shared(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Ints:
    """Returns the blocks touched by several boxes, [blocks, 2]. Cached because thousands of tensors are cut alike."""
    touched = np.zeros([-(-n // BLOCK) for n in shape], np.int64)
    for box in boxes:
        touched[scale_box(box).slices()] += 1
    return np.argwhere(touched > 1)
