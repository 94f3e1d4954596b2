"""An optimizer whose state lies in host memory: a step brings it to the device piece by piece, and takes it back.

While one piece is stepped, the next one comes and the one before leaves, so that the link to the host works in both
directions and the device holds three pieces at most. What is computed, and in which order for each weight, is what the
optimizer computes with all of its state on the device: no bit differs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from skyrl_mega.megatron.moments import MOMENTS, allocate, masters, parts
from skyrl_mega.megatron.residency import Part


@dataclass(frozen=True)
class Piece:
    """Some of the weights that a rank trains, with what the optimizer has of them."""

    weights: list[tuple[Tensor, Tensor]]
    """The model's parameter, and the float32 [n] master of this rank's run of it."""
    part: Part
    """Masters and moments: on the device, or away."""

    def tensors(self, inner: Any) -> Iterator[Tensor]:
        """What moves. A float32 model's masters are its weights, and stay where these are."""
        for p, master in self.weights:
            if not _same_memory(p, master):
                yield master.detach()
            yield from (inner.state[master][kind] for kind in MOMENTS)


class StreamedPart:
    """megatron-core's optimizer of the dense parameters or of the experts, in pieces.

    Args:
        part: It is changed: its step, and its copies between masters and the model's weights, go by pieces.
        device: Where it steps.
        size: Bytes of a piece; one parameter is one at least.
    """

    def __init__(self, part: DistributedOptimizer, device: torch.device, size: int) -> None:
        self.part, self._inner_step = part, part.optimizer.step
        self._group_of = {id(w): i for i, group in enumerate(part.optimizer.param_groups) for w in group["params"]}
        self.pieces = [Piece(weights, Part(device)) for weights in _cut(list(masters(part)), size)]
        for piece in self.pieces:
            allocate(part.optimizer, [master for _, master in piece.weights])
            piece.part.offload(piece.tensors(part.optimizer))
        changed: Any = part
        changed.optimizer.step = self.step
        changed._copy_main_params_to_model_params = self.to_model
        changed._copy_model_params_to_main_params = self.from_model
        self._stepped = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of every weight; the model's have its outcome."""
        groups = self.part.optimizer.param_groups
        whole = [(group["params"], group.get("step")) for group in groups]
        try:
            with closing(self._through()) as pieces:
                for piece in pieces:
                    self._take_back(whole)
                    for group, own in zip(groups, self._by_group(piece), strict=True):
                        group["params"] = own
                    self._inner_step(closure)
                    self._to_model(piece)
            if any("step" in group for group in groups):  # Transformer Engine counts calls, and these were one step
                for group, (_, count) in zip(groups, whole, strict=True):
                    group["step"] = (count or 0) + 1
        except BaseException:
            self._take_back(whole)
            raise
        finally:
            for group, (params, _) in zip(groups, whole, strict=True):
                group["params"] = params
        self._stepped = True

    def _take_back(self, whole: Sequence[tuple[Any, int | None]]) -> None:
        """Counts of steps are what they were."""
        for group, (_, count) in zip(self.part.optimizer.param_groups, whole, strict=True):
            if count is None:
                group.pop("step", None)
            else:
                group["step"] = count

    def to_model(self) -> None:
        """Copies masters into the model's weights; after a step that is done already."""
        if not self._stepped:
            with closing(self._through()) as pieces:
                for piece in pieces:
                    self._to_model(piece)
        self._stepped = False

    @torch.no_grad()
    def from_model(self, state_dict: Any = None) -> None:
        """Takes masters from the model's weights."""
        assert state_dict is None, "weights come from the model alone"
        with closing(self._through()) as pieces:
            for p, master in (pair for piece in pieces for pair in piece.weights):
                if not _same_memory(p, master):
                    master.copy_(self._run(p))

    @torch.no_grad()
    def _to_model(self, piece: Piece) -> None:
        for p, master in piece.weights:
            if not _same_memory(p, master):
                self._run(p).copy_(master)

    def _by_group(self, piece: Piece) -> list[list[Tensor]]:
        """The piece's masters in the groups of the optimizer."""
        found: list[list[Tensor]] = [[] for _ in self.part.optimizer.param_groups]
        for _, master in piece.weights:
            found[self._group_of[id(master)]].append(master)
        return found

    def _run(self, p: Tensor) -> Tensor:
        """What this rank trains of a parameter, [n]."""
        run = self.part._get_model_param_range_map(p)["param"]
        return p.detach().view(-1)[run.start : run.end]

    def _through(self) -> Generator[Piece, None, None]:
        """One piece after the other, while it is on the device. Whatever happens, all are in host memory at the end."""
        before: Piece | None = None
        try:
            if self.pieces:
                self.pieces[0].part.begin_onload()
            for piece, after in zip(self.pieces, [*self.pieces[1:], None], strict=True):
                if after:
                    after.part.begin_onload()
                piece.part.end_onload()
                yield piece
                piece.part.begin_offload(piece.tensors(self.part.optimizer))
                if before:
                    before.part.end_offload()
                before = piece
            if before:
                before.part.end_offload()
        except BaseException:  # whoever goes through them has failed
            for piece in self.pieces:
                piece.part.offload(piece.tensors(self.part.optimizer))
            raise


class StreamedOptimizer:
    """All of a rank's optimizer in pieces.

    Args:
        optimizer: megatron-core's.
        device: Where it steps.
        size: Bytes of a piece.
    """

    def __init__(self, optimizer: MegatronOptimizer, device: torch.device, size: int) -> None:
        self.parts = [StreamedPart(part, device, size) for part in parts(optimizer)]

    def held(self, tensor: Tensor) -> Tensor | None:
        """The values in host memory of a tensor that is away; None of any other."""
        return next((there for part in self._away() if (there := part.held(tensor)) is not None), None)

    def rest(self) -> None:
        """What `held` has given is not looked at any more."""
        for part in self._away():
            part.rest()

    def close(self) -> None:
        """Gives the host memory back. The optimizer is of no use any more."""
        for part in self._away():
            part.close()

    def _away(self) -> Iterator[Part]:
        return (piece.part for part in self.parts for piece in part.pieces)


def _cut(weights: Sequence[tuple[Tensor, Tensor]], size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """In their order, each piece as large as it may be."""
    piece: list[tuple[Tensor, Tensor]] = []
    total = 0
    for p, master in weights:
        own = master.nbytes * (1 + len(MOMENTS))  # as if all three moved and were float32
        if piece and total + own > size:
            yield piece
            piece, total = [], 0
        piece.append((p, master))
        total += own
    if piece:
        yield piece


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
