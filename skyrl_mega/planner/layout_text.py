"""Rows of a layout table: one row per policy rank or engine worker."""

from __future__ import annotations

from typing import Any

from skyrl_mega.config.schema import Config
from skyrl_mega.models.blocks.base import EngineCut, share
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims


def policy_rows(parallel: ParallelDims, decoder: Decoder) -> list[dict[str, Any]]:
    """Returns a row (name of the column → value) for each policy rank, in the order of ranks, for the table of a dry
    run.

    The columns are `rank`, the fields of `RankCoords`, `layers`, and, if the model has them, `heads`, `kv` heads,
    `experts` and `columns` of an expert. `layers` has an inclusive range such as `0-7` for each virtual stage,
    separated by spaces. The other parts are a range or a single number.

    Raises:
        ValueError: The model's layers cannot be divided among the pipeline stages.
    """
    rows = []
    for rank in range(parallel.ranks):
        at = parallel.coordinates(rank)
        chunks = [parallel.stage_layers(decoder.layers, at.pp, chunk) for chunk in range(parallel.virtual_pipeline)]
        row = {"rank": rank, **at._asdict(), "layers": " ".join(f"{c.start}-{c.stop - 1}" for c in chunks)}
        index = {"tensor": at.tp, "expert": at.ep, "expert_tensor": at.etp}
        for cut in (cut for block in decoder.blocks for cut in block.megatron_cuts()):
            if cut.column:
                row[cut.column] = share(cut.total, getattr(parallel, cut.dimension), index[cut.dimension])
        rows.append(row)
    return rows


def worker_rows(config: Config, decoder: Decoder) -> list[dict[str, Any]]:
    """Returns a row (name of the column → value) for each worker of an engine, for the table of a dry run. All engines
    are alike.

    The columns are `worker` (a number from 0), `layers`, and, if the model has them, `heads`, `kv` heads, `experts` and
    `columns` of an expert. `layers` is always the range of all layers, such as `0-7`. The other parts are an inclusive
    range or a single number, as text.
    """
    cut = EngineCut.of(config.rollout)
    rows = []
    for worker in range(cut.workers):
        row = {"worker": worker, "layers": f"0-{decoder.layers - 1}"}
        for block in decoder.blocks:
            row |= block.engine_row(cut, worker)
        rows.append(row)
    return rows
