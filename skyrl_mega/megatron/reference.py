"""Reference weights for the policy's model: swapped with the policy's weights, so that the device holds only one set.

The parameters stay in place, so addresses known to data parallelism's buffers and the weight sync stay valid. Host
memory holds the set of weights not in use by the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PIECE = 64 * 2**20
"""Bytes swapped at a time, through a buffer of this size on the device. Large enough for the link's full rate, and a
power of two, because torch rounds pinned blocks up to a power of two."""


class Reference:
    """A second set of weights in host memory, which can replace the model's weights for a while; zeros at first.

    To load the set, load the model's parameters inside `swapped`. All copies run on the current stream, so only
    computations with the weights wait.

    Args:
        params: The model's parameters.

    Raises:
        ValueError: A parameter is not contiguous.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._pieces = [
            (piece, host_bytes(piece.numel(), piece.device)) for span in _runs(params) for piece in span.split(PIECE)
        ]
        self._buffer: Tensor | None = None
        self._copies_done = 0
        """Number of copies done, out of 6 per piece: 3 to swap the reference in and 3 to swap it out."""

    @property
    def host_size(self) -> int:
        """Bytes of host memory with the set of weights not in use."""
        return sum(held.numel() for _, held in self._pieces)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchanges the reference's weights with the parameters' values inside the context; then exchanges both back,
        bit by bit, also after an error, so values written into the parameters inside become the reference. The
        parameters must be on the device, with no gather pending."""
        self.restore_policy()
        try:
            self._copy_until(3 * len(self._pieces))
            yield
        finally:
            self.restore_policy()

    def restore_policy(self) -> None:
        """Ends a swap, so that the parameters hold the policy's weights, no matter at which copy the swap was
        interrupted. Does nothing without a swap.

        If `restore_policy` itself is interrupted, another call continues.
        """
        swapped_in, total = 3 * len(self._pieces), 6 * len(self._pieces)
        if 0 < self._copies_done < swapped_in:
            self._copy_until(-(-self._copies_done // 3) * 3)  # a half-swapped piece can only be finished
        if self._copies_done:
            self._copies_done = max(
                self._copies_done, total - self._copies_done
            )  # swap back the pieces done so far, last piece first
            self._copy_until(total)
        self._copies_done, self._buffer = 0, None

    def _copy_until(self, end: int) -> None:
        """Makes copies until `end` of them are done.

        A piece and its counterpart are swapped with three copies. Each copy may be made twice, so an interrupted copy
        is simply repeated.
        """
        count = len(self._pieces)
        while self._copies_done < end:
            number, copy = divmod(self._copies_done, 3)
            device_bytes, host_bytes = self._pieces[number if number < count else 2 * count - 1 - number]
            if self._buffer is None:
                size = max(piece.numel() for piece, _ in self._pieces)
                self._buffer = torch.empty(size, dtype=torch.uint8, device=device_bytes.device)
            buffer = self._buffer.narrow(0, 0, device_bytes.numel())
            to, source = ((buffer, host_bytes), (host_bytes, device_bytes), (device_bytes, buffer))[copy]
            to.copy_(source, non_blocking=True)
            self._copies_done += 1


def host_bytes(size: int, device: torch.device) -> Tensor:
    """Returns zeros in host memory, uint8 [size], pinned if `device` is a GPU: a GPU reads pageable memory at a tenth
    of the link's rate."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _runs(params: Iterable[Tensor]) -> list[Tensor]:
    """Returns the memory of all parameters as bytes: a view per storage, from the first parameter to the last.

    Data parallelism puts all parameters of a kind into the same storage, with little padding in between.
    """
    views: dict[int, list[Tensor]] = {}
    for p in params:
        if not p.is_contiguous():
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is not contiguous: its bytes cannot be swapped")
        views.setdefault(p.untyped_storage()._cdata, []).append(p.data)
    runs = []
    for tensors in views.values():
        first = min(p.storage_offset() * p.itemsize for p in tensors)
        last = max((p.storage_offset() + p.numel()) * p.itemsize for p in tensors)
        whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
        runs.append(whole.narrow(0, first, last - first))
    return runs
