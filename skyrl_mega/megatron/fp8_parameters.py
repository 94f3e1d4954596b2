"""Parameters that are kept in FP8 (`policy.precision.parameters`): Transformer Engine's tensors in 128 × 128 blocks.

Such a parameter says that it is in `model.dtype`; its memory is a byte for each number as layers go forward, one more
as they go backward (the same, transposed), and float32 scales of both. An optimizer step rounds the master weights
straight into the first, and that is what data parallelism gathers. What is not a layer's own business goes by these
tensors: the device's memory, the weight sync, which sends numbers and scales as they are, and loading, which fills the
master weights, so that nothing of a file is lost to the rounding.
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

from skyrl_mega.hf_checkpoint import load as files
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.megatron.model import gather
from skyrl_mega.megatron.moments import masters, parts
from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.fp8.format import FP8, SUFFIX

Name = TypeVar("Name")

PIECE = 1 << 27
"""Numbers that are read from files, or rounded, at once: 256 MiB in bfloat16, which both go by."""
FORWARD = ("_rowwise_data", "_rowwise_scale_inv")
"""What a forward pass reads."""
ALL = (*FORWARD, "_columnwise_data", "_columnwise_scale_inv")


def memory(params: Iterable[Tensor], of: tuple[str, ...] = ALL) -> Iterator[Tensor]:
    """The tensors that parameters lie in: a parameter that is not in FP8 is its own."""
    for p in params:
        if is_float8tensor(p):
            yield from (t for name in of if (t := getattr(p, name)) is not None)
        else:
            yield p


def together(params: Iterable[Tensor]) -> None:
    """Lays the backward pass's numbers, and both kinds of scales, into one piece of memory each.

    The forward pass's numbers are data parallelism's buffers already. A thousand experts are then four copies to host
    memory, not four thousand.
    """
    fp8: list[Any] = [p for p in params if is_float8tensor(p)]
    for p in fp8:
        # megatron-core asks for the first master weights here. What Transformer Engine has for it serves one optimizer
        # alone, and without it every master weight would be a view of the whole parameter in float32.
        vars(p).pop("_high_precision_init_val", None)
        p.get_high_precision_init_val = partial(dequantised, p)
        p.clear_high_precision_init_val = _nothing
    for name in ALL[1:]:
        held = [t for p in fp8 if (t := getattr(p, name)) is not None]
        if len(held) != len(fp8) or not held:
            continue
        flat = torch.cat([t.reshape(-1) for t in held])
        for p, t, place in zip(fp8, held, flat.split([t.numel() for t in held]), strict=True):
            setattr(p, name, place.view(t.shape))


def on_the_wire(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the sync takes, by local name: a parameter in FP8 as numbers, E4M3 [N, K], and scales, float32 [⌈N/128⌉,
    ⌈K/128⌉], and any other as it is. Nothing is copied."""
    found: dict[str, Tensor] = {}
    for name, p in params.items():
        if not is_float8tensor(p):
            found[name] = p.data
            continue
        blocks: Any = p
        rows, columns = (-(-n // BLOCK) for n in p.shape)
        found[name] = blocks._rowwise_data.view(FP8)
        found[name + SUFFIX] = blocks._rowwise_scale_inv[:rows, :columns]  # theirs are a multiple of 4 long
    return found


def plain(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their values in their own type: of those in FP8 copies, on the host."""
    return {name: dequantised(p).cpu() if is_float8tensor(p) else p.data for name, p in params.items()}


@torch.no_grad()
def dequantised(p: Any) -> Tensor:
    """The values of a parameter in FP8, in its own type."""
    values: Tensor = p.dequantize()
    return values


def _nothing() -> None:
    """Nothing is kept that could be cleared."""


def round_into(p: Any, values: Tensor) -> None:
    """Rounds values into what a forward pass reads of a parameter."""
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

    What is in FP8 is read in its own type, at most `PIECE` numbers at once, and rounded: from master weights, as after
    an optimizer step (a collective then), or where there are none into what a forward pass reads.

    Args:
        path: The directory.
        shard: What this rank holds.
        params: Its parameters.
        optional: See `hf_checkpoint.load`.
        optimizer: Of these parameters.
        chunks: The data-parallel model chunks that gather them.

    Raises:
        UserError: one line for a missing or misshapen tensor and for a file that is cut off.
    """
    files.load(path, _part(shard, [n for n, p in params.items() if not is_float8tensor(p)]), params, optional)
    if optimizer is not None:
        optimizer.reload_model_params()
    masters = Masters(optimizer, params) if optimizer is not None else None
    fp8 = {name: p for name, p in params.items() if is_float8tensor(p)}
    for group in groups(fp8):
        values = {n: torch.zeros(fp8[n].shape, dtype=fp8[n].dtype, device=fp8[n].device) for n in group}
        files.load(path, _part(shard, group), values)
        for name, of in values.items():
            if masters is None:
                round_into(fp8[name], of)
            else:
                masters.write(name, of)
    if fp8 and masters is not None:
        masters.round(chunks)


def groups(params: Mapping[Name, Tensor]) -> Iterator[list[Name]]:
    """Their names in order, as many as have at most `PIECE` numbers together, or one."""
    group: list[Name] = []
    size = 0
    for name, p in params.items():
        if group and size + p.numel() > PIECE:
            yield group
            group, size = [], 0
        group.append(name)
        size += p.numel()
    if group:
        yield group


def _part(shard: Shard, names: Iterable[str]) -> Shard:
    """Some of a shard's local tensors."""
    mine = {name: shard.params[name] for name in names}
    return replace(shard, params=mine, pieces=tuple(piece for piece in shard.pieces if piece.param in mine))


def round_in_pieces(optimizer: MegatronOptimizer) -> None:
    """Has master weights rounded `PIECE` numbers at a time, after a step too.

    Transformer Engine makes bfloat16 copies of all master weights that it is given before it rounds the first, and
    megatron-core gives it all of a rank's: 2 bytes for each, at a peak that nobody plans. Every data-parallel rank has
    the same parameters in the same order, and so the same pieces.
    """
    for part in parts(optimizer):
        given, others = part._get_fp8_params_and_shard_fp32_from_fp8, part._copy_main_params_to_model_params
        if given()[0]:
            part._get_fp8_params_and_shard_fp32_from_fp8 = lambda: ([], [], [])  # what `others` would round
            part._copy_main_params_to_model_params = partial(_round, part, given, others)


def _round(part: Any, given: Callable[[], Sequence[Any]], others: Callable[[], None]) -> None:
    """In the place of a distributed optimizer's `_copy_main_params_to_model_params`."""
    every = dict(enumerate(zip(*given(), strict=True)))
    for group in groups({number: p for number, (p, _, _) in every.items()}):
        params, shards, starts = zip(*(every[number] for number in group), strict=True)
        quantize_param_shard([*params], [*shards], [*starts], part.data_parallel_group)
    others()


class Masters:
    """The float32 weights that an optimizer has of parameters in FP8, by local name: this rank's run of each."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        params: Mapping[str, Tensor],
        held: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        """`held`: where a tensor's values lie, for reading (`megatron.residency`)."""
        names = {id(p): name for name, p in params.items() if is_float8tensor(p)}
        self._optimizer, self._held = optimizer, held
        self._of = {
            names[id(p)]: (part._get_model_param_range_map(p)["param"], master)
            for part in parts(optimizer)
            for p, master in masters(part)
            if id(p) in names
        }

    def write(self, name: str, values: Tensor) -> None:
        """Takes this rank's run of a whole parameter's values."""
        if name in self._of:
            run, master = self._of[name]
            master.data.copy_(values.view(-1)[run.start : run.end])

    def copies(self) -> dict[str, Tensor]:
        """All of them, in host memory."""
        return {name: self._held(master.detach()).to("cpu", copy=True) for name, (_, master) in self._of.items()}

    def restore(self, copies: Mapping[str, Tensor]) -> None:
        """Takes what `copies` gave, where it did."""
        for name, values in copies.items():
            self._of[name][1].data.copy_(values)

    def round(self, chunks: Iterable[Any]) -> None:
        """Rounds them into the parameters, and gathers those: as after an optimizer step. A collective."""
        for part in parts(self._optimizer):
            part._copy_main_params_to_model_params()
        gather(chunks)
