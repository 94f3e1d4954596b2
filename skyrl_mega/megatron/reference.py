"""Other weights for the same model: they change places with the policy's own, and are never beside them on the device.

The parameters' memory stays where it is, so that whoever knows an address (data parallelism's buffers, the weight sync)
still knows it. Host memory holds one set of weights, whichever the model does not compute with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PIECE = 64 * 2**20
"""Bytes that change places at once, through a buffer of this size on the device. Large enough for the link's full rate;
a power of two, to which torch rounds every block of pinned memory up."""


class Reference:
    """Weights in host memory that a model can compute with for a while. They are zeros until something is loaded.

    All of it lies on the current stream, so nothing waits for a copy but what computes with it.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._pieces = [
            (piece, host_bytes(piece.numel(), piece.device)) for run in _runs(params) for piece in run.split(PIECE)
        ]
        self._buffer: Tensor | None = None
        self._done = 0
        """Copies that have been made, of the 6 for each piece that lead to the reference and back again."""

    @property
    def host_size(self) -> int:
        """Bytes of host memory."""
        return sum(held.numel() for _, held in self._pieces)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters hold the reference inside, and the policy's own weights after it, bit by bit."""
        self.put_back()
        try:
            self._go(3 * len(self._pieces))
            yield
        finally:
            self.put_back()

    def put_back(self) -> None:
        """The parameters hold the policy's own weights again, however far an exchange came that something broke off.

        Where this itself is broken off, another call goes on with it.
        """
        there, all_ = 3 * len(self._pieces), 6 * len(self._pieces)
        if 0 < self._done < there:
            self._go(-(-self._done // 3) * 3)  # a piece under way can only be finished
        if self._done:
            self._done = max(self._done, all_ - self._done)  # what has gone over comes back, the last piece first
            self._go(all_)
        self._done, self._buffer = 0, None

    def _go(self, end: int) -> None:
        """Makes copies until `end` of them are done.

        A piece and its counterpart change places in three copies. Each of them may be made twice, so one that was
        broken off is simply made again.
        """
        count = len(self._pieces)
        while self._done < end:
            number, copy = divmod(self._done, 3)
            live, held = self._pieces[number if number < count else 2 * count - 1 - number]
            if self._buffer is None:
                size = max(piece.numel() for piece, _ in self._pieces)
                self._buffer = torch.empty(size, dtype=torch.uint8, device=live.device)
            buffer = self._buffer.narrow(0, 0, live.numel())
            to, source = ((buffer, held), (held, live), (live, buffer))[copy]
            to.copy_(source, non_blocking=True)
            self._done += 1


def host_bytes(size: int, device: torch.device) -> Tensor:
    """Zeros in host memory, uint8 [size]: pinned for a GPU, which reads pageable memory at a tenth of the link's rate.

    Without CUDA there is no pinned memory, and nothing to pin it for.
    """
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _runs(params: Iterable[Tensor]) -> list[Tensor]:
    """The memory of all parameters as bytes: one view for each storage, from its first parameter to its last.

    Data parallelism lays all parameters of a kind into one storage, with a few paddings between them.
    """
    views: dict[int, list[Tensor]] = {}
    for p in params:
        if not p.is_contiguous():
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is not contiguous")
        views.setdefault(p.untyped_storage()._cdata, []).append(p.data)
    runs = []
    for held in views.values():
        first = min(p.storage_offset() * p.itemsize for p in held)
        last = max((p.storage_offset() + p.numel()) * p.itemsize for p in held)
        whole = torch.empty(0, dtype=torch.uint8, device=held[0].device).set_(held[0].untyped_storage())
        runs.append(whole.narrow(0, first, last - first))
    return runs
