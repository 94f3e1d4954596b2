"""Carries a plan out: packs boxes into flat buckets, sends them pairwise, and unpacks them where they belong.

Every process goes through its messages in one order that all share, with at most two under way in each direction, so a
cycle of waiting cannot arise: the first unfinished message of that order has both its ends ready. Extra memory is four
buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.layout.box import Box
from skyrl_mega.weights.plan import Plan, Transfer
from skyrl_mega.weights.transport import Transport

IN_FLIGHT = 2
"""Messages under way at once in each direction: one is packed or unpacked while the other is on the wire."""

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Message:
    """One bucket between this process and a peer."""

    outgoing: bool
    peer: int
    tag: int
    transfers: tuple[Transfer, ...]

    @property
    def numel(self) -> int:
        return sum(t.box.numel for t in self.transfers)

    @property
    def what(self) -> str:
        first = self.transfers[0].tensor
        return first if len(self.transfers) == 1 else f"{first} and {len(self.transfers) - 1} more"


class Exchange:
    """A plan as one process sees it, cut into messages once and run as often as wanted.

    Args:
        plan: all transfers; every process of the transport has the same one.
        transport: the group; source rank s of the plan is its rank `source_base + s`, target rank t `target_base + t`.
        source, target: this process's ranks in the two layouts; None where it has no part.
        dtype: the type on the wire, and what bytes are counted in; the sender converts to it, the receiver from it.
        bucket_bytes: size of one message at most.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        *,
        source: int | None,
        target: int | None,
        dtype: torch.dtype,
        bucket_bytes: int,
        source_base: int = 0,
        target_base: int = 0,
    ) -> None:
        self.transport, self.dtype = transport, dtype
        room = max(1, bucket_bytes // dtype.itemsize)
        self._local: list[Transfer] = []
        ordered: list[tuple[tuple[int, int, int], _Message]] = []
        for (s, t), transfers in plan.pairs.items():
            sends, takes = s == source, t == target
            if not sends and not takes:
                continue
            if source_base + s == target_base + t:
                self._local += transfers
                continue
            peer = target_base + t if sends else source_base + s
            # Shifted by round, so that in a round every process talks to another peer.
            shift = (t - s) % max(plan.sources, plan.targets)
            for k, bucket in enumerate(buckets(transfers, room)):
                ordered.append(((k, shift, s), _Message(sends, peer, k, tuple(bucket))))
        ordered.sort(key=lambda item: item[0])
        self._messages = [message for _, message in ordered]
        self._largest = max((m.numel for m in self._messages), default=0)

    def run(self, source: Params | None = None, target: Params | None = None) -> tuple[int, int]:
        """Moves every box from the sources' parameters to the targets'. A collective of all processes in the plan.

        Returns:
            Bytes sent and bytes received over the transport.

        Raises:
            TransportError: a peer did not answer in time; it names peer and tensor.
        """
        moved = {True: 0, False: 0}
        with torch.no_grad():
            for t in self._local:
                assert source is not None and target is not None
                local_view(target[t.target_param], t.target_offset, t.box).copy_(
                    local_view(source[t.source_param], t.source_offset, t.box).to(self.dtype)
                )
            under_way: dict[bool, deque[tuple[Any, _Message, Tensor]]] = {True: deque(), False: deque()}
            spare: dict[bool, list[Tensor]] = {
                way: [self._buffer() for _ in range(IN_FLIGHT)]
                if any(m.outgoing is way for m in self._messages)
                else []
                for way in (True, False)
            }

            def finish(way: bool) -> None:
                work, message, buffer = under_way[way].popleft()
                self.transport.wait(work, message.peer, message.what)
                if not way:
                    assert target is not None
                    _unpack(buffer, message.transfers, target)
                spare[way].append(buffer)

            for message in self._messages:
                way = message.outgoing
                if not spare[way]:
                    finish(way)
                buffer = spare[way].pop()
                flat = buffer[: message.numel]
                if way:
                    assert source is not None
                    _pack(flat, message.transfers, source)
                    work = self.transport.send(flat, message.peer, message.tag)
                else:
                    work = self.transport.receive(flat, message.peer, message.tag)
                moved[way] += flat.nbytes
                under_way[way].append((work, message, buffer))
            for way in (False, True):
                while under_way[way]:
                    finish(way)
        return moved[True], moved[False]

    def _buffer(self) -> Tensor:
        return torch.empty(self._largest, dtype=self.dtype, device=self.transport.device)


def send(plan: Plan, rank: int, params: Params, transport: Transport, bucket_bytes: int, dtype: torch.dtype) -> int:
    """Source rank `rank`'s part of a plan between two groups of processes, sources first in the transport.

    Returns the bytes sent. See `Exchange`.
    """
    exchange = Exchange(
        plan,
        transport,
        source=rank,
        target=None,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        target_base=plan.sources,
    )
    return exchange.run(source=params)[0]


def receive(plan: Plan, rank: int, params: Params, transport: Transport, bucket_bytes: int, dtype: torch.dtype) -> int:
    """Target rank `rank`'s part of a plan between two groups of processes, sources first in the transport.

    Fills `params` and returns the bytes received. See `Exchange`.
    """
    exchange = Exchange(
        plan,
        transport,
        source=None,
        target=rank,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        target_base=plan.sources,
    )
    return exchange.run(target=params)[1]


def copy(plan: Plan, sources: Sequence[Params], targets: Sequence[Params]) -> None:
    """Carries out a plan whose ranks are all in this process."""
    with torch.no_grad():
        for t in plan.transfers:
            local_view(targets[t.target][t.target_param], t.target_offset, t.box).copy_(
                local_view(sources[t.source][t.source_param], t.source_offset, t.box)
            )


def buckets(transfers: Sequence[Transfer], room: int) -> list[list[Transfer]]:
    """Fills buckets of at most `room` elements, in order; a larger box is cut along its leading dimensions."""
    filled: list[list[Transfer]] = []
    left = 0
    for transfer in transfers:
        for part in _split(transfer, room):
            if part.box.numel > left:
                filled.append([])
                left = room
            filled[-1].append(part)
            left -= part.box.numel
    return filled


def _split(transfer: Transfer, room: int) -> Iterator[Transfer]:
    """Cuts a transfer into boxes of at most `room` elements."""
    box = transfer.box
    if box.numel <= room:
        yield transfer
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    slab = box.numel // box.shape[axis]
    step = max(1, room // slab)
    for at in range(0, box.shape[axis], step):
        n = min(step, box.shape[axis] - at)
        part = replace(
            transfer,
            box=Box(
                (*box.start[:axis], box.start[axis] + at, *box.start[axis + 1 :]),
                (*box.shape[:axis], n, *box.shape[axis + 1 :]),
            ),
            source_offset=_moved(transfer.source_offset, axis - len(box.shape), at),
            target_offset=_moved(transfer.target_offset, axis - len(box.shape), at),
        )
        yield from _split(part, room)


def _moved(offset: tuple[int, ...], axis: int, by: int) -> tuple[int, ...]:
    """`offset`, further by `by` along `axis` (counted from the end)."""
    moved = list(offset)
    moved[axis] += by
    return tuple(moved)


def local_view(param: Tensor, offset: tuple[int, ...], box: Box) -> Tensor:
    """The part of a local parameter that holds `box`."""
    stack = len(offset) - len(box.shape)
    inner = tuple(slice(a, a + n) for a, n in zip(offset[stack:], box.shape, strict=True))
    index: Any = (*offset[:stack], *inner)
    return param[index]


def _pack(flat: Tensor, transfers: Sequence[Transfer], params: Params) -> None:
    at = 0
    for t in transfers:
        flat[at : at + t.box.numel].view(t.box.shape).copy_(local_view(params[t.source_param], t.source_offset, t.box))
        at += t.box.numel


def _unpack(flat: Tensor, transfers: Sequence[Transfer], params: Params) -> None:
    at = 0
    for t in transfers:
        local_view(params[t.target_param], t.target_offset, t.box).copy_(flat[at : at + t.box.numel].view(t.box.shape))
        at += t.box.numel
