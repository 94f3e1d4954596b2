"""Bytes written to a checkpoint by each rank, and the host memory needed for it. Counted, except the index.

Computes the same amounts as the boxes of `models.dist_checkpoint`, as plain numbers.
"""

from __future__ import annotations

import numpy as np

from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.buffers import FLOAT32, MASTER, MOMENTS, buffer, full_bucket
from skyrl_mega.planner.parameters import stage

STAGING = 64 * 2**20
"""Bytes of a rank's staging buffers for writing or reading (`hf_checkpoint.box_files`)."""
INDEX = 64 * 2**20
"""Estimated bytes of the index in a rank reading a checkpoint: names, boxes, and the header of a single file at a time.
The index of Qwen3-30B-A3B on 32 ranks takes 7 MiB (`tests/planner/test_checkpoint.py`)."""


def checkpoint_bytes(
    decoder: Decoder,
    parallel: ParallelDims,
    rank: int,
    itemsize: int,
    freeze_router: bool = False,
    *,
    overlap: bool = False,
    moments: int = MOMENTS["float32"],
) -> int:
    """Returns the bytes written into a checkpoint by a rank, without file headers.

    A trained parameter is written as master weight and moments, whatever the model's type; the master weight replaces
    the weight.

    Args:
        decoder: The model.
        parallel: The grid of ranks.
        rank: The rank.
        itemsize: Bytes of a parameter element; frozen parameters are written unchanged.
        freeze_router: True if routers are not trained.
        overlap: True if communication overlaps with compute, which cuts buffers into buckets.
        moments: Bytes of Adam's two moments per element.

    Raises:
        ValueError: `rank` is not in the grid, or the layers cannot be divided over the pipeline stages.
    """
    at, total = parallel.coordinates(rank), 0.0
    data, place = parallel.data * parallel.context, at.dp * parallel.context + at.cp
    for i, chunk in enumerate(stage(decoder, parallel, at.pp)):
        full = full_bucket(parallel, at.pp, i) if overlap else None
        untrained = chunk.untrained(freeze_router)
        sizes = np.where(chunk.fixed, FLOAT32, itemsize)[untrained]
        total += (chunk.numel[untrained] / chunk.copies[untrained] * sizes).sum() / data
        experts = chunk.expert & (parallel.expert > 1)
        for chosen, ranks, index in ((~experts, data, place), (experts, parallel.expert_data, at.edp)):
            flat = buffer(chunk.select(chosen & ~untrained), ranks, full)
            runs = flat.runs(index)
            total += ((runs[:, 1] - runs[:, 0]) / flat.copies).sum() * (MASTER + moments)
    return int(total)
