"""Parameters kept in FP8 (`policy.precision.parameters`): Transformer Engine tensors with scales for 128 × 128 blocks.

Such a parameter reports `model.dtype`. Memory per number is 1 byte for the forward pass and 1 byte for the transposed
copy of the backward pass, plus float32 scales of both. An optimizer step rounds the master weights directly into the
forward bytes, which data parallelism gathers. This module covers the work outside of layers: device memory, the weight
sync (numbers and scales sent unchanged), and loading, which fills the master weights so that no precision of a file is
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from skyrl_mega.common.groups import groups
from skyrl_mega.hf_checkpoint import load as files
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.megatron.model import gather_parameters
from skyrl_mega.megatron.moments import inner_optimizers, master_weights
from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.fp8.format import FP8, SUFFIX

Name = TypeVar("Name")

PIECE = 1 << 27
"""Numbers read from files, or rounded, at a time: 256 MiB in bfloat16, the dtype used for both."""
FORWARD = ("_rowwise_data", "_rowwise_scale_inv")
"""Attributes with the tensors read by a forward pass."""
ALL = (*FORWARD, "_columnwise_data", "_columnwise_scale_inv")


def storage_tensors(params: Iterable[Tensor], attributes: tuple[str, ...] = ALL) -> Iterator[Tensor]:
    """Yields the tensors that hold the parameters' bytes: the named `attributes` of a parameter in FP8, any other
    parameter itself."""
    for p in params:
        if is_float8tensor(p):
            yield from (t for name in attributes if (t := getattr(p, name)) is not None)
        else:
            yield p


def merge_storages(params: Iterable[Tensor]) -> None:
    """Moves the FP8 numbers for the backward pass, and the scales of both passes, of all FP8 parameters into one
    contiguous tensor each, of which the parameters hold views.

    Other parameters stay unchanged. The forward pass's numbers already lie in data parallelism's buffers. So a thousand
    experts are four copies to host memory instead of four thousand.
    """
    fp8: list[Any] = [p for p in params if is_float8tensor(p)]
    for p in fp8:
        # megatron-core reads the initial master weights here. Transformer Engine's own value serves only one optimizer,
        # and without any value every master weight would be a view of the whole parameter in float32.
        vars(p).pop("_high_precision_init_val", None)
        p.get_high_precision_init_val = partial(dequantised, p)
        p.clear_high_precision_init_val = _no_op
    for name in ALL[1:]:
        tensors = [t for p in fp8 if (t := getattr(p, name)) is not None]
        if len(tensors) != len(fp8) or not tensors:
            continue
        flat = torch.cat([t.reshape(-1) for t in tensors])
        for p, t, view in zip(fp8, tensors, flat.split([t.numel() for t in tensors]), strict=True):
            setattr(p, name, view.view(t.shape))


def sync_tensors(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors for the weight sync by local name, without copying.

    A parameter in FP8 becomes E4M3 numbers [N, K] under its name, and float32 scales [⌈N/128⌉, ⌈K/128⌉] under its name
    and `SUFFIX`; other parameters stay unchanged.
    """
    tensors: dict[str, Tensor] = {}
    for name, p in params.items():
        if not is_float8tensor(p):
            tensors[name] = p.data
            continue
        fp8: Any = p
        rows, columns = (-(-n // BLOCK) for n in p.shape)
        tensors[name] = fp8._rowwise_data.view(FP8)
        tensors[name + SUFFIX] = fp8._rowwise_scale_inv[:rows, :columns]  # without TE's padding to 4
    return tensors


def dequantised_values(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name → values in the dtype of the model: a copy in host memory of a parameter in FP8, any other
    parameter's own tensor, without a copy."""
    return {name: dequantised(p).cpu() if is_float8tensor(p) else p.data for name, p in params.items()}


@torch.no_grad()
def dequantised(p: Any) -> Tensor:
    """Returns the values of an FP8 parameter as a new tensor in the dtype of the model, on the same device."""
    values: Tensor = p.dequantize()
    return values


def _no_op() -> None:
    """Does nothing: no high-precision copy is kept."""


def round_into(p: Any, values: Tensor) -> None:
    """Rounds values, of the shape of the FP8 parameter `p`, and writes numbers and scales into the tensors of `p` that
    a forward pass reads. The copies for a backward pass stay unchanged."""
    rounded = p._quantizer(values)
    for name in FORWARD:
        getattr(p, name).copy_(getattr(rounded, name))


def load(
    path: Path,
    shard: Shard,
    params: Mapping[str, Tensor],
    *,
    optional: Mapping[str, tuple[int, ...]] | None = None,
    optimizer: MegatronOptimizer | None = None,
    chunks: Iterable[Any] = (),
) -> None:
    """Fills a rank's parameters, and an optimizer's master weights, from a Hugging Face directory.

    FP8 parameters are read in the model's dtype, at most `PIECE` numbers at a time. With an optimizer the values go
    into the master weights and are rounded as after an optimizer step (a collective). Without an optimizer the values
    are rounded directly into the parameters.

    Args:
        path: The directory.
        shard: This rank's shard.
        params: The rank's parameters.
        optional: See `hf_checkpoint.load`.
        optimizer: The optimizer of these parameters; None: no master weights are written.
        chunks: The data-parallel model chunks, for gathering the parameters; needed with an optimizer.

    Raises:
        UserError: A tensor is missing or misshapen, or a file is truncated; a message of a single line.
        Damaged: A file is corrupted.
    """
    files.load(path, _part(shard, [n for n, p in params.items() if not is_float8tensor(p)]), params, optional)
    if optimizer is not None:
        optimizer.reload_model_params()
    master_weights = MasterWeights(optimizer, params) if optimizer is not None else None
    fp8 = {name: p for name, p in params.items() if is_float8tensor(p)}
    for group in batches(fp8):
        values = {n: torch.zeros(fp8[n].shape, dtype=fp8[n].dtype, device=fp8[n].device) for n in group}
        files.load(path, _part(shard, group), values)
        for name, loaded in values.items():
            if master_weights is None:
                round_into(fp8[name], loaded)
            else:
                master_weights.write(name, loaded)
    if fp8 and master_weights is not None:
        master_weights.round(chunks)


def batches(params: Mapping[Name, Tensor]) -> Iterator[list[Name]]:
    """Yields the names of the parameters in order, in groups of at most `PIECE` numbers; a larger parameter is a group
    alone."""
    return groups(params, lambda name: params[name].numel(), PIECE)


def _part(shard: Shard, names: Iterable[str]) -> Shard:
    """Returns the shard restricted to some local tensors."""
    selected = {name: shard.params[name] for name in names}
    return replace(shard, params=selected, pieces=tuple(piece for piece in shard.pieces if piece.param in selected))


def round_in_pieces(optimizer: MegatronOptimizer) -> None:
    """Makes the optimizer round master weights `PIECE` numbers at a time, also after a step. Changes the optimizer in
    place; does nothing for optimizers without FP8 parameters.

    Transformer Engine copies all given master weights to bfloat16 before rounding the first, and megatron-core passes
    all masters of a rank at once: an unplanned peak of 2 bytes per weight. Data-parallel ranks hold the same parameters
    in the same order, hence the same pieces.
    """
    for part in inner_optimizers(optimizer):
        get_shards, copy_others = part._get_fp8_params_and_shard_fp32_from_fp8, part._copy_main_params_to_model_params
        if get_shards()[0]:
            part._get_fp8_params_and_shard_fp32_from_fp8 = lambda: ([], [], [])  # leaves nothing for `others` to round
            part._copy_main_params_to_model_params = partial(_round, part, get_shards, copy_others)


def _round(part: Any, get_shards: Callable[[], Sequence[Any]], copy_others: Callable[[], None]) -> None:
    """Replaces `_copy_main_params_to_model_params` of a distributed optimizer."""
    entries = dict(enumerate(zip(*get_shards(), strict=True)))
    for group in batches({number: p for number, (p, _, _) in entries.items()}):
        params, shards, starts = zip(*(entries[number] for number in group), strict=True)
        quantize_param_shard([*params], [*shards], [*starts], part.data_parallel_group)
    copy_others()


class MasterWeights:
    """The optimizer's float32 master weights of FP8 parameters, by local name: this rank's run of each."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        params: Mapping[str, Tensor],
        readable: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """Finds the master weights of all FP8 parameters in the optimizer.

        Args:
            optimizer: The optimizer of the parameters.
            params: The rank's parameters by local name.
            readable: Returns a tensor with the same values, wherever they are now (`megatron.residency`).
        """
        names = {id(p): name for name, p in params.items() if is_float8tensor(p)}
        self._optimizer, self._readable = optimizer, readable
        self._runs = {
            names[id(p)]: (part._get_model_param_range_map(p)["param"], master)
            for part in inner_optimizers(optimizer)
            for p, master in master_weights(part)
            if id(p) in names
        }

    def write(self, name: str, values: Tensor) -> None:
        """Copies this rank's run of `values`, of the whole parameter `name`, into the master weight. Does nothing if
        this rank trains no run of the parameter."""
        if name in self._runs:
            run, master = self._runs[name]
            master.data.copy_(values.view(-1)[run.start : run.end])

    def copies(self) -> dict[str, Tensor]:
        """Returns name → copy in host memory of this rank's run of each master weight, for `restore`."""
        return {name: self._readable(master.detach()).to("cpu", copy=True) for name, (_, master) in self._runs.items()}

    def restore(self, copies: Mapping[str, Tensor]) -> None:
        """Copies the result of `copies` back into the master weights of the same names. The parameters stay unchanged;
        `round` updates the parameters. Raises KeyError for a name without a master weight on this rank."""
        for name, values in copies.items():
            self._runs[name][1].data.copy_(values)

    def round(self, chunks: Iterable[Any]) -> None:
        """Rounds the master weights into the parameters, and gathers the parameters over the data-parallel ranks, as
        after an optimizer step. A collective. `chunks` are the rank's data-parallel model chunks."""
        for part in inner_optimizers(self._optimizer):
            part._copy_main_params_to_model_params()
        gather_parameters(chunks)
