"""Checkpoints: each rank writes the boxes that it owns, and reads the boxes that it needs, whatever layout wrote them.

Of every parameter the distributed optimizer trains a run of elements on this rank: master weight (of a float32 model
the weight itself) and Adam's two moments. Runs are boxes of Hugging Face tensors (`parallel.flat`), so files are a
layout like any other (`hf_checkpoint.box_files`) and nothing is gathered. The model's weights are the masters in the
model's type; they are not stored, and after loading come to the other ranks as they do after an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from skyrl_mega.config.errors import UserError
from skyrl_mega.hf_checkpoint.box_files import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    WEIGHT,
    Entry,
    Part,
    check_entries,
    file_name,
    read_boxes,
    read_entries,
    write_boxes,
)
from skyrl_mega.hf_checkpoint.box_header import Header, read_header, write_header
from skyrl_mega.megatron.model import gather
from skyrl_mega.megatron.moments import allocate_moments, masters, parts, set_step
from skyrl_mega.models import dist_checkpoint, huggingface
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.parallel.flat import FlatPiece, Run, flat_pieces, strides

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Trained:
    """What a rank's checkpoint is of."""

    decoder: Decoder
    parallel: ParallelDims
    rank: int
    shard: Shard
    """The rank's, with the names of `params`."""
    params: Mapping[str, Tensor]
    """This rank's parameters."""
    chunks: Sequence[Any]
    """Megatron's data-parallel model chunks, which the parameters are of."""
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    held: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Where a tensor's values lie, for reading: on the device, or in host memory (`megatron.residency`)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return next(iter(self.params.values())).dtype


@dataclass(frozen=True)
class _Owned:
    """A run of a parameter that this rank's optimizer trains; the tensors are [stop - start]."""

    run: Run
    state: dict[str, Tensor]
    """Kind → values."""


def save(folder: Path, trained: Trained) -> None:
    """Writes this rank's part into `folder`, which must exist and be empty. A collective, of a few bytes a rank.

    Raises:
        RuntimeError: A rank could not write; says which, and why.
    """
    owned, frozen = _owned(trained), _frozen(trained)
    runs = {param: part.run for param, part in owned.items()}
    mine = dist_checkpoint.written(trained.decoder, trained.parallel, trained.rank, trained.shard, runs, frozen)
    pieces = flat_pieces(trained.shard, mine)
    written = _everywhere(lambda: write_boxes(folder / file_name(trained.rank), _parts(trained, pieces, owned)))
    header = Header(
        dtype=str(trained.dtype).removeprefix("torch."),
        step=trained.schedule.num_steps,
        schedule=trained.schedule.state_dict(),
        layout=asdict(trained.parallel),
        tensors=huggingface.tensors(trained.decoder),
        files={file_name(rank): one for rank, one in enumerate(written)},
    )
    _everywhere(lambda: write_header(folder, header) if trained.rank == 0 else None)


def load(folder: Path, trained: Trained) -> None:
    """Reads this rank's part of `folder` into model, optimizer and schedule. A collective.

    All that is read is compared with its check sums. Where ranks read entries in part, as in another layout, all of the
    checkpoint is read once more for that, an equal share by each rank.

    Raises:
        UserError: the checkpoint is of another model; the first rank's that finds it, on every rank.
        Damaged: It is not whole, or not as it was saved; the same.
        RuntimeError: a rank could not read; says which, and why.
    """
    for chunk in trained.chunks:
        if chunk.ddp_config.overlap_param_gather:  # what an optimizer step has begun ends before we write there
            chunk.start_param_sync(force_sync=True)
    owned, frozen = _owned(trained), _frozen(trained)
    answers = _everywhere(lambda: _read(folder, trained, owned, frozen))
    if not all(compared for *_, compared in answers):
        _everywhere(lambda: check_entries(_share(folder)))
    step, schedule, _ = answers[trained.rank]
    for part in parts(trained.optimizer):
        part._copy_main_params_to_model_params()
    gather(trained.chunks)
    trained.schedule.num_steps = 0  # it counts on from where it stands
    trained.schedule.load_state_dict(schedule)
    set_step(trained.optimizer, step)


@torch.no_grad()
def _read(
    folder: Path, trained: Trained, owned: Mapping[str, _Owned], frozen: Mapping[str, Run]
) -> tuple[int, dict[str, Any], bool]:
    """Fills this rank's part.

    Returns the steps taken, the schedule's state, and whether all that was read is compared with its check sums.
    """
    header = read_header(folder)
    _check_model(folder, header, huggingface.tensors(trained.decoder))
    runs = {**{param: part.run for param, part in owned.items()}, **frozen}
    pieces = flat_pieces(trained.shard, runs)
    entries = read_entries(folder, header, {piece.tensor for piece in pieces})
    for part in owned.values():
        for values in part.state.values():
            values.zero_()  # padding of the vocabulary is in no checkpoint
    wanted = _parts(trained, pieces, owned)
    # What was trained then may be frozen now.
    trained_then = {entry.tensor for entry in entries if entry.kind == MASTER}
    wanted = [
        Part(p.tensor, p.box, MASTER, p.values) if p.kind == WEIGHT and p.tensor in trained_then else p for p in wanted
    ]
    compared = read_boxes(entries, wanted)
    return header.step, header.schedule, compared


def _share(folder: Path) -> list[Entry]:
    """Returns the entries that this rank compares where ranks have read some in part."""
    header = read_header(folder)
    return read_entries(folder, header, header.tensors)[dist.get_rank() :: dist.get_world_size()]


def _check_model(folder: Path, header: Header, tensors: Mapping[str, tuple[int, ...]]) -> None:
    for name in (*tensors, *header.tensors):
        here, there = tensors.get(name), header.tensors.get(name)
        if here != there:
            raise UserError(
                f"{folder}: is of another model: {name} has shape {list(there) if there else 'none'} there, "
                f"{list(here) if here else 'none'} in model.path; give that model, or another run.name"
            )


def _owned(trained: Trained) -> dict[str, _Owned]:
    """What the optimizer trains on this rank, by parameter."""
    allocate_moments(trained.optimizer)
    names = {id(p): name for name, p in trained.params.items()}
    found = {}
    for part in parts(trained.optimizer):
        for p, master in masters(part):
            run, adam = part._get_model_param_range_map(p)["param"], part.optimizer.state[master]
            state = {MASTER: master, EXP_AVG: adam["exp_avg"], EXP_AVG_SQ: adam["exp_avg_sq"]}
            values = {kind: trained.held(t.detach()) for kind, t in state.items()}
            found[names[id(p)]] = _Owned((run.start, run.end), values)
    return found


def _frozen(trained: Trained) -> dict[str, Run]:
    """Parameters that nobody trains: all of each."""
    return {name: (0, p.numel()) for name, p in trained.params.items() if not p.requires_grad}


def _parts(trained: Trained, pieces: Sequence[FlatPiece], owned: Mapping[str, _Owned]) -> list[Part]:
    """The pieces' values in this rank's memory."""
    found = []
    for piece in pieces:
        if held := owned.get(piece.param):
            state, first = held.state, held.run[0]
        else:
            state, first = {WEIGHT: trained.held(trained.params[piece.param].detach()).view(-1)}, 0
        steps = strides(trained.shard.params[piece.param])[-len(piece.box.shape) :]
        for kind, flat in state.items():
            values = flat.as_strided(piece.box.shape, steps, flat.storage_offset() + piece.at - first)
            found.append(Part(piece.tensor, piece.box, kind, values))
    return found


def _everywhere(do: Callable[[], Answer]) -> list[Answer]:
    """What `do` answers on every rank. A collective: it fails on all of them or on none.

    Raises:
        UserError: a rank's, on every rank, as it is.
        RuntimeError: a rank had an OSError; says which, and why.
    """
    answer: Answer | None = None
    fault: str | None = None
    wrong: UserError | None = None
    try:
        answer = do()
    except UserError as error:
        wrong = error
    except OSError as error:
        fault = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (answer, fault, wrong))
    if any(faults := [fault for _, fault, _ in told if fault]):
        raise RuntimeError("; ".join(faults))
    if first := next((wrong for _, _, wrong in told if wrong), None):
        raise first
    return [answer for answer, _, _ in told]
