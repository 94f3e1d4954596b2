"""Parameters that are kept in FP8 (`policy.precision.parameters`): Transformer Engine's tensors in 128 × 128 blocks.

Such a parameter says that it is in `model.dtype`; its memory is a byte for each number as layers go forward, one more
as they go backward (the same, transposed), and float32 scales of both. An optimizer step rounds the master weights
straight into the first, and that is what data parallelism gathers. What is not a layer's own business goes by these
tensors: the device's memory, the weight sync, which sends numbers and scales as they are, and loading, which fills the
master weights, so that nothing of a file is lost to the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor

from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.megatron.moments import masters, parts
from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.fp8.format import FP8, SUFFIX

PIECE = 1 << 28
"""Numbers that are read from files at once, before they are rounded."""
FORWARD = ("_rowwise_data", "_rowwise_scale_inv")
"""What a forward pass reads."""
ALL = (*FORWARD, "_columnwise_data", "_columnwise_scale_inv")

Read = Callable[[Shard, Mapping[str, Tensor]], None]
"""Fills the tensors of a shard."""


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


def on_the_wire(name: str, p: Any) -> Iterator[tuple[str, Tensor]]:
    """What the sync takes of a parameter, by local name: numbers as E4M3 [N, K] and scales float32 [⌈N/128⌉, ⌈K/128⌉].

    Nothing is copied. Of a parameter that is not in FP8 that is its own values.
    """
    if not is_float8tensor(p):
        yield name, p.data
        return
    rows, columns = (-(-n // BLOCK) for n in p.shape)
    yield name, p._rowwise_data.view(FP8)
    yield name + SUFFIX, p._rowwise_scale_inv[:rows, :columns]  # Transformer Engine's rows are a multiple of 4 long


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


def plain(p: Any) -> Tensor:
    """A parameter's values in its own type: of one in FP8 a copy, on the host."""
    return dequantised(p).cpu() if is_float8tensor(p) else p.data


def load(shard: Shard, params: Mapping[str, Tensor], read: Read, write: Callable[[str, Tensor], None]) -> None:
    """Fills what is in FP8: reads it in its own type, at most `PIECE` numbers at once, and gives it to `write`.

    Padding, which no file has, is zeros.
    """
    group: dict[str, Tensor] = {}
    for name in [n for n, p in params.items() if is_float8tensor(p)]:
        if group and sum(t.numel() for t in group.values()) + params[name].numel() > PIECE:
            _load(shard, group, read, write)
            group = {}
        group[name] = torch.zeros(params[name].shape, dtype=params[name].dtype, device=params[name].device)
    _load(shard, group, read, write)


def _load(shard: Shard, group: Mapping[str, Tensor], read: Read, write: Callable[[str, Tensor], None]) -> None:
    pieces = tuple(piece for piece in shard.pieces if piece.param in group)
    read(replace(shard, params={name: shard.params[name] for name in group}, pieces=pieces), group)
    for name, values in group.items():
        write(name, values)


def unlike(shard: Shard, params: Mapping[str, Tensor]) -> Shard:
    """The part of a shard that is not in FP8."""
    plain = {name: shape for name, shape in shard.params.items() if not is_float8tensor(params[name])}
    return replace(shard, params=plain, pieces=tuple(piece for piece in shard.pieces if piece.param in plain))


class Masters:
    """The float32 weights that an optimizer has of parameters in FP8, by local name: this rank's run of each."""

    def __init__(
        self, optimizer: Any, params: Mapping[str, Tensor], held: Callable[[Tensor], Tensor] = lambda tensor: tensor
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
        """Takes what `copies` gave."""
        for name, (_, master) in self._of.items():
            master.data.copy_(copies[name])

    def round(self, chunks: Iterable[Any]) -> None:
        """Rounds them into the parameters, and gathers those: as after an optimizer step. A collective."""
        for part in parts(self._optimizer):
            part._copy_main_params_to_model_params()
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
