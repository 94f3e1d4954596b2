"""Checkpoints of a Megatron model, readable in any layout: each rank writes the boxes that the rank owns, and reads the
boxes that the rank needs.

For each parameter, the distributed optimizer trains a run of elements on this rank: master weight (in a float32 model
the weight itself) and Adam's two moments. Runs are boxes of Hugging Face tensors (`parallel.flat`), so the files of a
checkpoint are a layout like any other (`hf_checkpoint.box_files`) and nothing is gathered. The model's weights are the
masters rounded to the model's dtype. Checkpoints do not store these weights; after loading, the other ranks receive the
weights as after an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint.box_files import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    WEIGHT,
    BoxEntry,
    LocalBox,
    check_entries,
    file_name,
    read_boxes,
    read_entries,
    write_boxes,
)
from skyrl_mega.hf_checkpoint.box_header import Header, read_header, write_header
from skyrl_mega.hf_checkpoint.on_all_ranks import on_all_ranks
from skyrl_mega.megatron.model import gather_parameters
from skyrl_mega.megatron.moments import allocate_moments, inner_optimizers, master_weights, set_step
from skyrl_mega.models import dist_checkpoint, huggingface
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.parallel.flat import FlatPiece, Run, flat_pieces, strides


@dataclass(frozen=True)
class RankState:
    """The state of one rank to save or restore."""

    decoder: Decoder
    parallel: ParallelDims
    rank: int
    shard: Shard
    """The rank's shard, with the same local names as `params`."""
    params: Mapping[str, Tensor]
    """This rank's parameters by local name."""
    chunks: Sequence[Any]
    """Megatron's data-parallel model chunks with these parameters."""
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    readable: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Returns a tensor with the same values to read from: on the device, or in host memory (`megatron.residency`)."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: that of the rank's first parameter."""
        return next(iter(self.params.values())).dtype


@dataclass(frozen=True)
class _OwnedRun:
    """A run of a parameter trained by this rank's optimizer; the tensors are [stop - start]."""

    run: Run
    state: dict[str, Tensor]
    """Kind → values."""


def save(folder: Path, state: RankState) -> None:
    """Writes this rank's part of a checkpoint into `folder`, an empty directory shared by all ranks; rank 0 then
    completes the checkpoint, and all ranks return.

    A collective of all ranks, which exchange only a few bytes. Offloaded state is read through `state.readable`.

    Raises:
        RuntimeError: A rank could not write; names the rank and the reason. The folder is then incomplete; the caller
            removes the folder.
    """
    owned, frozen = _owned(state), _frozen(state)
    owned_runs = {param: part.run for param, part in owned.items()}
    runs_to_write = dist_checkpoint.runs_to_write(
        state.decoder, state.parallel, state.rank, state.shard, owned_runs, frozen
    )
    pieces = flat_pieces(state.shard, runs_to_write)
    files = on_all_ranks(lambda: write_boxes(folder / file_name(state.rank), _parts(state, pieces, owned)))
    header = Header(
        dtype=str(state.dtype).removeprefix("torch."),
        step=state.schedule.num_steps,
        schedule=state.schedule.state_dict(),
        layout=asdict(state.parallel),
        tensors=huggingface.tensors(state.decoder),
        files={file_name(rank): entries for rank, entries in enumerate(files)},
    )
    on_all_ranks(lambda: write_header(folder, header) if state.rank == 0 else None)


def load(folder: Path, state: RankState) -> None:
    """Reads this rank's part of the checkpoint `folder` into model, optimizer and schedule. A collective of all ranks.
    Parameters and optimizer must be on the device.

    All bytes read are verified with checksums. If ranks read entries only in part, as in another layout, the whole
    checkpoint is read a second time for verification, an equal share by each rank.

    Raises:
        UserError: The checkpoint belongs to another model or has another format; raised on every rank.
        Damaged: The checkpoint is incomplete or corrupted, perhaps found after a part was read, so that the state is
            mixed; raised on every rank.
        RuntimeError: A rank could not read; names the rank and the reason.
    """
    for chunk in state.chunks:
        if chunk.ddp_config.overlap_param_gather:  # finish the gather of the last step before writing
            chunk.start_param_sync(force_sync=True)
    owned, frozen = _owned(state), _frozen(state)
    answers = on_all_ranks(lambda: _read(folder, state, owned, frozen))
    if not all(compared for *_, compared in answers):
        on_all_ranks(lambda: check_entries(_share(folder)))
    step, schedule, _ = answers[state.rank]
    for inner in inner_optimizers(state.optimizer):
        inner._copy_main_params_to_model_params()
    gather_parameters(state.chunks)
    state.schedule.num_steps = 0  # load_state_dict adds to the present count
    state.schedule.load_state_dict(schedule)
    set_step(state.optimizer, step)


@torch.no_grad()
def _read(
    folder: Path, state: RankState, owned: Mapping[str, _OwnedRun], frozen: Mapping[str, Run]
) -> tuple[int, dict[str, Any], bool]:
    """Fills this rank's tensors from the checkpoint.

    Returns the number of steps taken, the schedule's state, and True if all bytes read were verified with checksums.
    """
    header = read_header(folder)
    _check_model(folder, header, huggingface.tensors(state.decoder))
    runs = {**{param: part.run for param, part in owned.items()}, **frozen}
    pieces = flat_pieces(state.shard, runs)
    entries = read_entries(folder, header, {piece.tensor for piece in pieces})
    for part in owned.values():
        for values in part.state.values():
            values.zero_()  # checkpoints hold no vocabulary padding
    to_read = _parts(state, pieces, owned)
    # A parameter trained in the saved run may be frozen now.
    trained_then = {entry.tensor for entry in entries if entry.kind == MASTER}
    to_read = [
        LocalBox(p.tensor, p.box, MASTER, p.values) if p.kind == WEIGHT and p.tensor in trained_then else p
        for p in to_read
    ]
    compared = read_boxes(entries, to_read)
    return header.step, header.schedule, compared


def _share(folder: Path) -> list[BoxEntry]:
    """Returns the entries for this rank to verify after ranks read some entries only in part."""
    header = read_header(folder)
    return read_entries(folder, header, header.tensors)[dist.get_rank() :: dist.get_world_size()]


def _check_model(folder: Path, header: Header, tensors: Mapping[str, tuple[int, ...]]) -> None:
    for name in (*tensors, *header.tensors):
        ours, theirs = tensors.get(name), header.tensors.get(name)
        if ours != theirs:
            raise UserError(
                f"this checkpoint is of another model: {name} has shape {(list(theirs) if theirs else 'none')} "
                f"in the checkpoint, {(list(ours) if ours else 'none')} in model.path",
                key=folder,
                fix="give the checkpoint's model as model.path, or another run.name",
            )


def _owned(state: RankState) -> dict[str, _OwnedRun]:
    """Returns the runs trained by this rank's optimizer, by parameter."""
    allocate_moments(state.optimizer)
    names = {id(p): name for name, p in state.params.items()}
    owned = {}
    for inner in inner_optimizers(state.optimizer):
        for p, master in master_weights(inner):
            run, adam = inner._get_model_param_range_map(p)["param"], inner.optimizer.state[master]
            kinds = {MASTER: master, EXP_AVG: adam["exp_avg"], EXP_AVG_SQ: adam["exp_avg_sq"]}
            values = {kind: state.readable(t.detach()) for kind, t in kinds.items()}
            owned[names[id(p)]] = _OwnedRun((run.start, run.end), values)
    return owned


def _frozen(state: RankState) -> dict[str, Run]:
    """Returns the run of each untrained parameter: all elements."""
    return {name: (0, p.numel()) for name, p in state.params.items() if not p.requires_grad}


def _parts(rank_state: RankState, pieces: Sequence[FlatPiece], owned: Mapping[str, _OwnedRun]) -> list[LocalBox]:
    """Returns each piece as a view of this rank's memory."""
    box_parts = []
    for piece in pieces:
        if owned_run := owned.get(piece.param):
            state, first = owned_run.state, owned_run.run[0]
        else:
            state, first = {WEIGHT: rank_state.readable(rank_state.params[piece.param].detach()).view(-1)}, 0
        steps = strides(rank_state.shard.params[piece.param])[-len(piece.box.shape) :]
        for kind, flat in state.items():
            values = flat.as_strided(piece.box.shape, steps, flat.storage_offset() + piece.at - first)
            box_parts.append(LocalBox(piece.tensor, piece.box, kind, values))
    return box_parts
