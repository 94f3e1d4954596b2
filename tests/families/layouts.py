"""The layout sweep: every family in one process per rank of a layout, so that a layout starts once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from skyrl_mega.config.schema import MoeConfig, OptimizerConfig
from skyrl_mega.megatron import moments, objectives
from skyrl_mega.megatron.model import finish_gather
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.config_json import Hf
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Piece
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.families.models import MODELS, routed_batch, some_batch
from tests.megatron.layouts import deal, join_ranks, layout, load_model, policy_config

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP1": (1, {}),
    "TP2·EP2": (2, {"tensor": 2, "expert": 2}),
    "TP2·ETP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "EP2": (2, {"expert": 2}),
}
"""Ranks and sizes of every layout of the sweep; tensor parallelism includes sequence parallelism."""
EXPORTED = SAVED = "TP2·EP2"
"""The layout with an export, and with checkpoints."""
RESUMED = "PP2"
"""The layout that resumes the checkpoints of `SAVED`."""
POLICY = policy_config(
    micro_tokens=40,
    # No clipping: the gradient stays in the buffers as it was summed.
    optimizer=OptimizerConfig(lr=1e-2, clip_grad=1e9),
    moe=MoeConfig(replay="rollout"),
)
Arrays = dict[str, np.ndarray]


@dataclass
class RankResults:
    """A rank's results for a model."""

    rows: list[list[int]]
    """Sequences of each of this rank's micro-batches."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    """Log-probs of each micro-batch; none on ranks that repeat another rank's."""
    replayed: list[np.ndarray] = field(default_factory=list)
    """Log-probs of each micro-batch with the routes of `routed_batch`."""
    gradients: dict[str, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Parameter → index of the first element, and gradient, of the run that the rank's optimizer trains."""
    norm: float = 0.0
    """Gradient norm of the step."""
    weights: Arrays = field(default_factory=dict)
    """Parameters at the checkpoint, or after resuming from the checkpoint."""
    next_step: dict[str, float] = field(default_factory=dict)
    """Metrics of the step after the checkpoint."""


def sizes_of(name: str, which: str) -> tuple[int, ParallelDims]:
    """Returns the ranks and the layout `which` for a model. Uneven pipeline stages get the remaining layers first."""
    ranks, sizes = LAYOUTS[which]
    layers = MODELS[name].layers
    if sizes.get("pipeline") and layers % 2:
        sizes = {**sizes, "first_stage_layers": layers // 2 + 1, "last_stage_layers": layers // 2}
    return ranks, layout(ranks, **sizes)


def sweep(rank: int, address: str, folder: Path, which: str, names: list[str]) -> dict[str, RankResults]:
    """Returns this rank's results for the models of these names in a layout."""
    join_ranks(rank, address, sizes_of(names[0], which)[1])
    return {name: _examine(rank, name, folder, which) for name in names}


def _examine(rank: int, name: str, folder: Path, which: str) -> RankResults:
    """Computes log-probs, with and without given routes, then takes a step, then saves or resumes a checkpoint."""
    for variable in [variable for variable in os.environ if variable.startswith("NVTE_")]:
        del os.environ[variable]  # set by megatron-core for the previous model
    path, (_, parallel) = folder / f"{name}-0", sizes_of(name, which)
    worker = load_model(path, parallel, POLICY)
    rows, micros = deal(some_batch(), worker)
    routed = routed_batch(worker.hf)
    results = RankResults(
        rows, _logprobs(worker, micros), replayed=_logprobs(worker, [routed.take(row) for row in rows])
    )
    if which == EXPORTED:
        worker.export(folder / f"{name}-exported", path)
    results.norm = worker.train(micros, objectives.supervised).get("grad_norm", 0.0)
    results.gradients = gradients_of(worker)
    if which in (SAVED, RESUMED):
        checkpoint = folder / f"{name}-checkpoint"
        if which == SAVED:
            if rank == 0:
                checkpoint.mkdir()
            dist.barrier()
            worker.save(checkpoint)
        else:
            for parameter in (p for p in worker.params.values() if not p.requires_grad):
                parameter.data.zero_()  # nothing else changes a correction bias
            worker.restore(checkpoint)
        finish_gather(worker.chunks)
        results.weights = {param: values.detach().numpy().copy() for param, values in worker.params.items()}
        results.next_step = worker.train(micros, objectives.supervised)
    return results


def _logprobs(worker: ModelWorker, micros: list[Sequences]) -> list[np.ndarray]:
    """Returns the log-probs of each micro-batch; none on ranks that repeat another rank's."""
    answer, at = worker.logprobs(micros), worker.parallel.coordinates(dist.get_rank())
    return [] if answer is None or at.tp or at.cp else [values.numpy() for values, _ in answer]


def gradients_of(worker: ModelWorker) -> dict[str, tuple[int, np.ndarray]]:
    """Returns the gradients summed by the last step, from the buffers of the distributed optimizer.

    Data-parallel ranks scatter the sum, so only the run trained by this rank is complete.
    """
    finish_gather(worker.chunks)
    names = {id(p): name for name, p in worker.params.items()}
    gradients = {}
    for part in moments.inner_optimizers(worker.optimizer):
        for p in part.model_param_group_index_map:
            run = part._get_model_param_range_map(p)["param"]
            gradients[names[id(p)]] = (run.start, p.main_grad.view(-1)[run.start : run.end].numpy().copy())
    return gradients


# ---- comparisons ---------------------------------------------------------------------------------------------------


def joined_logprobs(ranks: list[RankResults], replayed: bool = False) -> np.ndarray:
    """Returns [T] log-probs of `some_batch` from all ranks; NaN for tokens of no rank."""
    batch = some_batch()
    values_T = np.full(len(batch.tokens), np.nan)
    for rank in ranks:
        for rows, values in zip(rank.rows, rank.replayed if replayed else rank.logprobs, strict=False):
            values_T[batch.index(rows).numpy()] = values
    return values_T


def joined_weights(hf: Hf, parallel: ParallelDims, ranks: list[RankResults]) -> Arrays:
    """Returns the Hugging Face tensors of all ranks' parameters. Replicas must agree bit by bit."""
    tensors = {name: np.full(shape, np.nan, np.float32) for name, shape in architecture(hf).tensors(hf).items()}
    for number, rank in enumerate(ranks):
        shard = architecture(hf).megatron_shard(hf, parallel, number, "local")
        for piece in shard.pieces:
            weights = rank.weights[piece.param].reshape(shard.params[piece.param])
            into, local = tensors[piece.tensor][piece.box.slices()], weights[_local(piece)]
            assert (np.isnan(into) | (into == local)).all(), piece
            into[...] = local
    assert not [name for name, values in tensors.items() if np.isnan(values).any()]
    return tensors


def gradient_errors(hf: Hf, parallel: ParallelDims, ranks: list[RankResults], expected: Arrays) -> dict[str, float]:
    """Returns the largest error of every tensor's gradient, relative to the largest element of the expected gradient.

    Every replica is compared. The error is infinite for a tensor with an element that no rank trains.
    """
    errors, untrained = {}, {name: np.ones(values.shape, bool) for name, values in expected.items()}
    for number, rank in enumerate(ranks):
        shard = architecture(hf).megatron_shard(hf, parallel, number, "local")
        for piece in (piece for piece in shard.pieces if piece.param in rank.gradients):
            start, run = rank.gradients[piece.param]
            flat = np.full(math.prod(shard.params[piece.param]), np.nan, np.float32)
            flat[start : start + len(run)] = run
            actual, wanted = flat.reshape(shard.params[piece.param])[_local(piece)], expected[piece.tensor]
            trained = ~np.isnan(actual)
            untrained[piece.tensor][piece.box.slices()][trained] = False
            error = np.abs(actual - wanted[piece.box.slices()])[trained].max(initial=0.0)
            scale = np.abs(wanted).max() + 1e-9  # an expert without tokens has a gradient of 0
            errors[piece.tensor] = max(errors.get(piece.tensor, 0.0), float(error / scale))
    return errors | {name: math.inf for name, left in untrained.items() if left.any()}


def _local(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.box.shape, strict=True))
