"""Division of a checkpoint's elements among ranks: every element is written exactly once, by a rank that holds it.

A run of elements held by several ranks is split into equal parts. The distributed optimizer already cuts trained
parameters over the data-parallel ranks. The remaining replicas are norms and routers (on all tensor-parallel ranks), a
tied embedding (on the first and the last pipeline stage), and frozen parameters.
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


def runs_to_write(
    decoder: Decoder,
    parallel: ParallelDims,
    rank: int,
    shard: Shard,
    owned: Mapping[str, Run],
    frozen: Mapping[str, Run],
) -> dict[str, Run]:
    """Returns parameter → run of elements (start, stop) to be written into a checkpoint by this rank, for every
    parameter of `owned` and `frozen`. A run may be empty: other ranks then write the elements.

    Args:
        decoder: The model.
        parallel: The layout.
        rank: The rank in the layout.
        shard: The rank's shard (`megatron.shard`).
        owned: Parameter → the run trained by the distributed optimizer on this rank.
        frozen: Untrained parameter → the run of all its elements.

    Raises:
        ValueError: `rank` is not in the layout.
    """
    at = parallel.coordinates(rank)
    uncut = whole_params(decoder, shard) if parallel.tensor > 1 else set()
    dense, expert = (at.dp * parallel.context + at.cp, parallel.data * parallel.context), (at.edp, parallel.expert_data)
    runs = {}
    for param, run in (*owned.items(), *frozen.items()):
        index, count = 0, 1
        is_dealt_expert = MEGATRON_EXPERTS in param and parallel.expert > 1
        if param in uncut and not is_dealt_expert:
            index, count = at.tp, parallel.tensor
        if decoder.tied and parallel.pipeline > 1 and param.partition(".")[2] in _VOCABULARY:
            index, count = 2 * index + param.endswith("output_layer.weight"), 2 * count
        if param in frozen:
            replica, replicas = expert if is_dealt_expert else dense
            index, count = index * replicas + replica, count * replicas
        start, size = run[0], run[1] - run[0]
        runs[param] = (start + size * index // count, start + size * (index + 1) // count)
    return runs


def whole_params(decoder: Decoder, shard: Shard) -> set[str]:
    """Returns the names of the shard's local parameters filled by whole Hugging Face tensors, as norms and routers are;
    other ranks hold the same parameters."""
    tensors = huggingface.tensors(decoder)
    missing: dict[str, int] = dict.fromkeys(shard.params, 0)
    for piece in shard.pieces:
        missing[piece.param] += prod(tensors[piece.tensor]) - piece.box.numel
    return {param for param, elements in missing.items() if not elements}
