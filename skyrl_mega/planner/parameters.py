"""Parameters of a policy rank, in megatron-core's order.

Sizes come from the boxes in `models.megatron`, by which weights are also moved. All layers of a kind are alike, so
their sizes come from a model of a single layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from skyrl_mega.models import dist_checkpoint, megatron
from skyrl_mega.models.blocks.experts import MEGATRON_EXPERTS as EXPERTS
from skyrl_mega.models.blocks.experts import MEGATRON_ROUTER, MEGATRON_ROUTER_BIAS
from skyrl_mega.models.blocks.value_head import MEGATRON_VALUE, ValueHeadBlock
from skyrl_mega.models.decoder import Decoder, Layer
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Parameters:
    """Arrays over the parameters [n], in the order of `named_parameters()`."""

    numel: Ints
    """Number of elements of each parameter on the rank."""
    expert: Bools
    """True for parameters of an expert."""
    router: Bools
    """True for parameters of a router (may be frozen)."""
    fixed: Bools
    """True for correction biases: never trained, and in float32 in a model of any type."""
    shared: Bools
    """True for an embedding tied to the head and present on two pipeline stages."""
    copies: Ints
    """Number of ranks, besides data-parallel ones, with the same parameter; each writes a part of it to a
    checkpoint."""

    @cached_property
    def total(self) -> int:
        """Number of elements of all parameters together."""
        return int(self.numel.sum())

    def untrained(self, freeze_router: bool) -> Bools:
        """Returns a mask [n]: True for parameters without gradients and optimizer state, correction biases and, with
        `freeze_router`, routers."""
        return self.fixed | (self.router & freeze_router)

    def select(self, chosen: Bools) -> Parameters:
        """Returns the parameters with True in the mask `chosen` [n]."""
        return Parameters(*(getattr(self, field.name)[chosen] for field in fields(self)))


@lru_cache(maxsize=4096)
def stage(decoder: Decoder, parallel: ParallelDims, pp: int) -> tuple[Parameters, ...]:
    """Returns the parameters of each model chunk of a rank on pipeline stage `pp` (from 0): one chunk, or one per
    virtual stage. Ranks with equal `pp` hold tensors of the same shapes. Raises ValueError if the stages cannot divide
    the layers."""
    cut = (parallel.tensor, parallel.expert, parallel.expert_tensor)
    chunks = []
    for chunk in range(parallel.virtual_pipeline):
        first, last = parallel.holds_embedding(pp, chunk), parallel.holds_head(pp, chunk)
        parts = [_layer(decoder, decoder.layer(i), *cut) for i in parallel.stage_layers(decoder.layers, pp, chunk)]
        embedding, norm, head = _ends(decoder, *cut)
        twice = decoder.tied and parallel.pipeline > 1
        if first:
            parts.insert(0, _single(embedding, shared=twice))
        if last:
            parts.append(_single(norm, copies=parallel.tensor))
        if last and not (decoder.tied and first):
            parts.append(
                _single(head, shared=twice, copies=parallel.tensor if isinstance(decoder.head, ValueHeadBlock) else 1)
            )
        chunks.append(_concatenated(parts))
    return tuple(chunks)


def layers(decoder: Decoder, parallel: ParallelDims, pp: int) -> dict[int, int]:
    """Returns global index of a layer → number of its elements on a rank, for the layers of pipeline stage `pp`.
    `parallel` is the grid of ranks, of the policy or of another model. Raises ValueError if the stages cannot divide
    the layers."""
    cut = (parallel.tensor, parallel.expert, parallel.expert_tensor)
    own_layers = (
        i for chunk in range(parallel.virtual_pipeline) for i in parallel.stage_layers(decoder.layers, pp, chunk)
    )
    return {i: _layer(decoder, decoder.layer(i), *cut).total for i in own_layers}


def _single(numel: int, shared: bool = False, copies: int = 1) -> Parameters:
    false = np.zeros(1, bool)
    return Parameters(np.array([numel]), false, false, false, np.array([shared]), np.array([2 if shared else copies]))


def _concatenated(parts: list[Parameters]) -> Parameters:
    return Parameters(*(np.concatenate([getattr(p, field.name) for p in parts]) for field in fields(Parameters)))


@lru_cache(maxsize=512)
def _layer(decoder: Decoder, kind: Layer, tensor: int, expert: int, expert_tensor: int) -> Parameters:
    """Returns the parameters of a layer on a rank."""
    one_layer = decoder.of_one_layer(kind)
    shard = _one_layer_shard(one_layer, tensor, expert, expert_tensor)
    sizes = {name: prod(shape) for name, shape in shard.params.items() if ".layers.0." in name}
    # Tensor parallelism does not cut norms and routers: every tensor rank holds all of them.
    uncut = dist_checkpoint.whole_params(one_layer, shard) if tensor > 1 else set()
    fixed = {piece.param for piece in shard.pieces if piece.tensor in one_layer.frozen_tensors}
    return Parameters(
        np.array(list(sizes.values()), np.int64),
        np.array([EXPERTS in name for name in sizes], bool),
        np.array([name.endswith((MEGATRON_ROUTER, MEGATRON_ROUTER_BIAS)) for name in sizes], bool),
        np.array([name in fixed for name in sizes], bool),
        np.zeros(len(sizes), bool),
        np.array([tensor if name in uncut and EXPERTS not in name else 1 for name in sizes], np.int64),
    )


@lru_cache(maxsize=512)
def _ends(decoder: Decoder, tensor: int, expert: int, expert_tensor: int) -> tuple[int, int, int]:
    """Returns the number of elements of embedding, last norm and head on a rank; a tied head is the embedding."""
    shard = _one_layer_shard(decoder.of_one_layer(decoder.kinds[0]), tensor, expert, expert_tensor)
    sizes = {name: prod(shape) for name, shape in shard.params.items()}
    embedding = sizes["0.embedding.word_embeddings.weight"]
    head = next((n for name, n in sizes.items() if name.endswith(("output_layer.weight", MEGATRON_VALUE))), embedding)
    return embedding, sizes["0.decoder.final_layernorm.weight"], head


def _one_layer_shard(decoder: Decoder, tensor: int, expert: int, expert_tensor: int) -> Shard:
    """Returns the shard of rank 0 of a model with a single layer, cut in the given way."""
    sizes = ParallelDims(
        ranks=np.lcm(tensor, expert * expert_tensor).item(), tensor=tensor, expert=expert, expert_tensor=expert_tensor
    )
    return megatron.shard(decoder, sizes, 0, "local")
