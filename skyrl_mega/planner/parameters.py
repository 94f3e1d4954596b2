"""What a policy rank holds, parameter by parameter, in megatron-core's order.

The sizes are those of the boxes in `models.megatron`, which also move the weights. All layers of a kind are alike, so a
model of one layer says them, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from skyrl_mega.models import dist_checkpoint, megatron
from skyrl_mega.models.blocks.experts import MEGATRON_EXPERTS as EXPERTS
from skyrl_mega.models.blocks.experts import MEGATRON_ROUTER as ROUTER
from skyrl_mega.models.blocks.value_head import MEGATRON_VALUE, ValueHead
from skyrl_mega.models.decoder import Decoder, Layer
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Parameters:
    """Parameters in the order of `named_parameters()` [n]."""

    numel: Ints
    expert: Bools
    """Of an expert."""
    router: Bools
    """Of a router, which may be frozen."""
    shared: Bools
    """An embedding that is also the head, and lies on two pipeline stages."""
    copies: Ints
    """Ranks that hold it besides the data-parallel ones, which write a part each of it to a checkpoint."""

    @property
    def total(self) -> int:
        """Elements of all of them."""
        return int(self.numel.sum())

    def where(self, chosen: Bools) -> Parameters:
        """Some of them."""
        return Parameters(*(getattr(self, field.name)[chosen] for field in fields(self)))


@lru_cache(maxsize=4096)
def stage(d: Decoder, parallel: ParallelDims, pp: int) -> tuple[Parameters, ...]:
    """The model chunks (one, or one per virtual stage) of a rank on pipeline stage `pp`.

    Ranks that differ in anything but `pp` hold tensors of the same shapes.
    """
    cut = (parallel.tensor, parallel.expert, parallel.expert_tensor)
    chunks = []
    for chunk in range(parallel.virtual_pipeline):
        first, last = parallel.holds_embedding(pp, chunk), parallel.holds_head(pp, chunk)
        parts = [_layer(d, d.layer(i), *cut) for i in parallel.stage_layers(d.layers, pp, chunk)]
        embedding, norm, head = _ends(d, *cut)
        twice = d.tied and parallel.pipeline > 1
        if first:
            parts.insert(0, _plain(embedding, shared=twice))
        if last:
            parts.append(_plain(norm, copies=parallel.tensor))
        if last and not (d.tied and first):
            parts.append(_plain(head, shared=twice, copies=parallel.tensor if isinstance(d.head, ValueHead) else 1))
        chunks.append(_joined(parts))
    return tuple(chunks)


def layers(d: Decoder, parallel: ParallelDims, pp: int) -> dict[int, int]:
    """Elements of each decoder layer of a rank on pipeline stage `pp`, by the layer's number in the model."""
    cut = (parallel.tensor, parallel.expert, parallel.expert_tensor)
    mine = (i for chunk in range(parallel.virtual_pipeline) for i in parallel.stage_layers(d.layers, pp, chunk))
    return {i: _layer(d, d.layer(i), *cut).total for i in mine}


def _plain(numel: int, shared: bool = False, copies: int = 1) -> Parameters:
    false = np.zeros(1, bool)
    return Parameters(np.array([numel]), false, false, np.array([shared]), np.array([2 if shared else copies]))


def _joined(parts: list[Parameters]) -> Parameters:
    return Parameters(*(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(Parameters)))


@lru_cache(maxsize=512)
def _layer(d: Decoder, kind: Layer, tensor: int, expert: int, expert_tensor: int) -> Parameters:
    """One layer's parameters on one rank."""
    small = d.of_one_layer(kind)
    shard = _small(small, tensor, expert, expert_tensor)
    found = {name: prod(shape) for name, shape in shard.params.items() if ".layers.0." in name}
    # Tensor parallelism leaves norms and routers as they are: every tensor rank has them.
    uncut = dist_checkpoint.uncut(small, shard) if tensor > 1 else set()
    return Parameters(
        np.array(list(found.values()), np.int64),
        np.array([EXPERTS in name for name in found], bool),
        np.array([name.endswith(ROUTER) for name in found], bool),
        np.zeros(len(found), bool),
        np.array([tensor if name in uncut and EXPERTS not in name else 1 for name in found], np.int64),
    )


@lru_cache(maxsize=512)
def _ends(d: Decoder, tensor: int, expert: int, expert_tensor: int) -> tuple[int, int, int]:
    """Elements of the embedding, the last norm and the head (a tied one is the embedding) on one rank."""
    shard = _small(d.of_one_layer(d.kinds[0]), tensor, expert, expert_tensor)
    found = {name: prod(shape) for name, shape in shard.params.items()}
    embedding = found["0.embedding.word_embeddings.weight"]
    head = next((n for name, n in found.items() if name.endswith(("output_layer.weight", MEGATRON_VALUE))), embedding)
    return embedding, found["0.decoder.final_layernorm.weight"], head


def _small(d: Decoder, tensor: int, expert: int, expert_tensor: int) -> Shard:
    """What rank 0 of a model of one layer holds, cut this way."""
    sizes = ParallelDims(
        ranks=np.lcm(tensor, expert * expert_tensor).item(), tensor=tensor, expert=expert, expert_tensor=expert_tensor
    )
    return megatron.shard(d, sizes, 0, "local")
