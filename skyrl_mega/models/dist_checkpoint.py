"""Who writes what of a checkpoint: no element twice, none left out, and nothing that another rank holds.

A run of elements that several ranks hold alike is dealt out to them in equal parts. The distributed optimizer has cut
what it trains over the data-parallel ranks already; what is left are norms and routers, which all tensor-parallel ranks
hold, a tied embedding, which the first and the last pipeline stage hold, and frozen parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from skyrl_mega.models import huggingface
from skyrl_mega.models.blocks.experts import MEGATRON_EXPERTS
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.parallel.flat import Run

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def written(
    d: Decoder, parallel: ParallelDims, rank: int, shard: Shard, owned: Mapping[str, Run], frozen: Mapping[str, Run]
) -> dict[str, Run]:
    """The part of what a rank holds that it writes.

    Args:
        d: the model.
        parallel: the layout.
        rank: in it.
        shard: what the rank holds (`megatron.shard`).
        owned: parameter → the run that the distributed optimizer trains on this rank.
        frozen: parameter that no optimizer trains → all of it.
    """
    at = parallel.coordinates(rank)
    whole = uncut(d, shard) if parallel.tensor > 1 else set()
    dense, expert = (at.dp * parallel.context + at.cp, parallel.data * parallel.context), (at.edp, parallel.expert_data)
    found = {}
    for param, run in (*owned.items(), *frozen.items()):
        index, count = 0, 1
        dealt_experts = MEGATRON_EXPERTS in param and parallel.expert > 1
        if param in whole and not dealt_experts:
            index, count = at.tp, parallel.tensor
        if d.tied and parallel.pipeline > 1 and param.partition(".")[2] in _VOCABULARY:
            index, count = 2 * index + param.endswith("output_layer.weight"), 2 * count
        if param in frozen:
            place, replicas = expert if dealt_experts else dense
            index, count = index * replicas + place, count * replicas
        start, size = run[0], run[1] - run[0]
        found[param] = (start + size * index // count, start + size * (index + 1) // count)
    return found


def uncut(d: Decoder, shard: Shard) -> set[str]:
    """Parameters that hold their tensors in full."""
    tensors = huggingface.tensors(d)
    missing: dict[str, int] = dict.fromkeys(shard.params, 0)
    for piece in shard.pieces:
        missing[piece.param] += prod(tensors[piece.tensor]) - piece.box.numel
    return {param for param, elements in missing.items() if not elements}
