"""What each rank writes to a checkpoint, and the host memory that it needs for it. Counted, but for the index.

The same as the boxes of `models.dist_checkpoint`, as numbers.
"""

from __future__ import annotations

from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.buffers import MASTER, MOMENTS, buffer, full_bucket
from skyrl_mega.planner.parameters import stage

STAGING = 64 * 2**20
"""Bytes of the buffers through which a rank writes or reads (`hf_checkpoint.box_files`)."""
INDEX = 64 * 2**20
"""Bytes of the index in a rank that reads: names, boxes, and one file's header at a time. Estimated; that of
Qwen3-30B-A3B on 32 ranks takes 7 MiB (`tests/planner/test_checkpoint.py`)."""


def written(
    d: Decoder,
    parallel: ParallelDims,
    rank: int,
    itemsize: int,
    freeze_router: bool = False,
    *,
    overlap: bool = False,
    moments: int = MOMENTS["float32"],
) -> int:
    """Bytes that a rank writes, without file headers. Of a trained parameter these are master and moments, whatever the
    model's type: the weight is the master's.

    Args:
        itemsize: of a parameter: a frozen one is written as it is.
        overlap: Communication overlaps with compute, which cuts buffers into buckets.
        moments: Bytes of an element's two moments.
    """
    at, found = parallel.coordinates(rank), 0.0
    data, place = parallel.data * parallel.context, at.dp * parallel.context + at.cp
    for i, chunk in enumerate(stage(d, parallel, at.pp)):
        full = full_bucket(parallel, at, i) if overlap else None
        frozen = chunk.router & freeze_router
        found += (chunk.numel[frozen] / chunk.copies[frozen]).sum() * itemsize / data
        experts = chunk.expert & (parallel.expert > 1)
        for chosen, ranks, index in ((~experts, data, place), (experts, parallel.expert_data, at.edp)):
            made = buffer(chunk.where(chosen & ~frozen), ranks, full)
            runs = made.runs(index)
            found += ((runs[:, 1] - runs[:, 0]) / made.copies).sum() * (MASTER + moments)
    return int(found)
