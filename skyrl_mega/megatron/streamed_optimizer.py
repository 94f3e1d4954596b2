"""Streamed optimizer: the state lies in host memory, and a step moves the state to the device piece by piece and back.

During the step of a piece, the next piece is loaded and the previous piece unloaded. So the link to the host works in
both directions, and the device holds at most three pieces. The computation, and the order for each weight, are the same
as with the whole state on the device: results are bit-identical.
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

from skyrl_mega.common.groups import groups
from skyrl_mega.megatron.moments import MOMENTS, allocate, inner_optimizers, master_weights
from skyrl_mega.megatron.residency import OffloadablePart


@dataclass(frozen=True)
class OptimizerPiece:
    """Some of the trained weights of a rank, with the optimizer's state for these weights."""

    weights: list[tuple[Tensor, Tensor]]
    """Pairs of a model parameter and the float32 [n] master weight of this rank's run."""
    part: OffloadablePart
    """Masters and moments, on or off the device."""

    def tensors(self, inner: Any) -> Iterator[Tensor]:
        """Yields the tensors to move between device and host memory: the masters, and the moments in the state of
        `inner`, an Adam optimizer.

        A float32 model's masters are the weights themselves and stay on the device. Raises KeyError if the moments are
        not allocated (`moments.allocate`).
        """
        for p, master in self.weights:
            if not _same_memory(p, master):
                yield master.detach()
            yield from (inner.state[master][kind] for kind in MOMENTS)


class StreamedPart:
    """megatron-core's optimizer of the dense or of the expert parameters, in pieces.

    Args:
        part: The optimizer to modify: step, and copies between masters and model weights, run piece by piece.
        device: Device of the step.
        size: Bytes of a piece; a piece holds at least one parameter.
    """

    def __init__(self, part: DistributedOptimizer, device: torch.device, size: int) -> None:
        self.part, self._inner_step = part, part.optimizer.step
        self._group_of = {id(w): i for i, group in enumerate(part.optimizer.param_groups) for w in group["params"]}
        # Assumes three float32 tensors to move for each weight.
        parts = groups(master_weights(part), lambda pair: pair[1].nbytes * (1 + len(MOMENTS)), size)
        self.pieces = [OptimizerPiece(weights, OffloadablePart(device)) for weights in parts]
        for piece in self.pieces:
            allocate(part.optimizer, [master for _, master in piece.weights])
            piece.part.offload(piece.tensors(part.optimizer))
        patched: Any = part
        patched.optimizer.step = self.step
        patched._copy_main_params_to_model_params = self.to_model
        patched._copy_model_params_to_main_params = self.from_model
        self._stepped = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Takes one step of every weight, piece by piece, and copies the masters into the model's weights. If the step
        fails, all pieces return to host memory and Adam's step counts are restored; pieces already stepped keep their
        new values. `closure`, if given, is called once per piece."""
        groups = self.part.optimizer.param_groups
        saved_groups = [(group["params"], group.get("step")) for group in groups]
        try:
            with closing(self._pieces_on_device()) as pieces:
                for piece in pieces:
                    self._restore_step_counts(saved_groups)
                    for group, group_params in zip(groups, self._by_group(piece), strict=True):
                        group["params"] = group_params
                    self._inner_step(closure)
                    self._to_model(piece)
            if any("step" in group for group in groups):  # Transformer Engine counts calls; all pieces are one step
                for group, (_, count) in zip(groups, saved_groups, strict=True):
                    group["step"] = (count or 0) + 1
        except BaseException:
            self._restore_step_counts(saved_groups)
            raise
        finally:
            for group, (params, _) in zip(groups, saved_groups, strict=True):
                group["params"] = params
        self._stepped = True

    def _restore_step_counts(self, saved_groups: Sequence[tuple[Any, int | None]]) -> None:
        """Restores the step counts of all groups."""
        for group, (_, count) in zip(self.part.optimizer.param_groups, saved_groups, strict=True):
            if count is None:
                group.pop("step", None)
            else:
                group["step"] = count

    def to_model(self) -> None:
        """Copies the masters into the model's weights, piece by piece. The first call after `step` does nothing,
        because the step copied the masters already."""
        if not self._stepped:
            with closing(self._pieces_on_device()) as pieces:
                for piece in pieces:
                    self._to_model(piece)
        self._stepped = False

    @torch.no_grad()
    def from_model(self, state_dict: Any = None) -> None:
        """Copies the model's weights into the masters, piece by piece; the moments stay. `state_dict` must be None,
        else raises AssertionError."""
        assert state_dict is None, "weights come from the model alone"
        with closing(self._pieces_on_device()) as pieces:
            for p, master in (pair for piece in pieces for pair in piece.weights):
                if not _same_memory(p, master):
                    master.copy_(self._run(p))

    @torch.no_grad()
    def _to_model(self, piece: OptimizerPiece) -> None:
        for p, master in piece.weights:
            if not _same_memory(p, master):
                self._run(p).copy_(master)

    def _by_group(self, piece: OptimizerPiece) -> list[list[Tensor]]:
        """Returns the piece's masters by the optimizer's groups."""
        by_group: list[list[Tensor]] = [[] for _ in self.part.optimizer.param_groups]
        for _, master in piece.weights:
            by_group[self._group_of[id(master)]].append(master)
        return by_group

    def _run(self, p: Tensor) -> Tensor:
        """Returns this rank's run of a parameter, [n]."""
        run = self.part._get_model_param_range_map(p)["param"]
        return p.detach().view(-1)[run.start : run.end]

    def _pieces_on_device(self) -> Generator[OptimizerPiece, None, None]:
        """Yields each piece while on the device. On any exit, all pieces end up in host memory."""
        previous: OptimizerPiece | None = None
        try:
            if self.pieces:
                self.pieces[0].part.begin_onload()
            for piece, following in zip(self.pieces, [*self.pieces[1:], None], strict=True):
                if following:
                    following.part.begin_onload()
                piece.part.end_onload()
                yield piece
                piece.part.begin_offload(piece.tensors(self.part.optimizer))
                if previous:
                    previous.part.end_offload()
                previous = piece
            if previous:
                previous.part.end_offload()
        except BaseException:  # the loop over the pieces failed
            for piece in self.pieces:
                piece.part.offload(piece.tensors(self.part.optimizer))
            raise


class StreamedOptimizer:
    """All optimizers of a rank, changed in place: state in host memory, steps on the device piece by piece.

    Args:
        optimizer: megatron-core's optimizer.
        device: Device of the step.
        size: Bytes of a piece.
    """

    def __init__(self, optimizer: MegatronOptimizer, device: torch.device, size: int) -> None:
        self.parts = [StreamedPart(part, device, size) for part in inner_optimizers(optimizer)]

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """Returns a view of the values of a master weight or moment in host memory; None for any other tensor."""
        return next((values for part in self._storage_groups() if (values := part.host_view(tensor)) is not None), None)

    def release_pages(self) -> None:
        """Lets the operating system reclaim memory read through `host_view`; the values stay valid."""
        for part in self._storage_groups():
            part.release_pages()

    def close(self) -> None:
        """Frees the host memory; the optimizer is unusable afterwards."""
        for part in self._storage_groups():
            part.close()

    def _storage_groups(self) -> Iterator[OffloadablePart]:
        return (piece.part for part in self.parts for piece in part.pieces)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
