"""A run of an exchange in a process: packing, transfer and loading overlap within a fixed number of buffers.

A member of the process group executes steps in round order (`rounds`): start a step, load the buckets received
`in_flight` - 1 steps ago, free buffers on demand. A peer on the same device loads from the owner's buffers.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.kernels.boxes import upload
from skyrl_mega.weights.exchange.pack import BucketViews
from skyrl_mega.weights.exchange.rank_program import RankBucket, Step
from skyrl_mega.weights.transports.group import Deadline, Message, Transport
from skyrl_mega.weights.transports.ipc import Buffers, ToOwner, ToPeer

LOOK_S = 0.5
"""Seconds between checks for departed processes while waiting for the GPU."""


class ChecksumError(RuntimeError):
    """A box differing from the data sent, or was written to the wrong place.

    `tensor` and `box` identify the data; `source` and `target` are the names of the packing and the unpacking process.
    """

    def __init__(self, tensor: str, box: object, source: str, target: str) -> None:
        super().__init__(f"{target}: {tensor}, {box} is not what {source} sent")
        self.tensor, self.box, self.source, self.target = tensor, box, source, target


@dataclass
class Report:
    """Times and bytes of a run in a process. Seconds are host time; on a GPU, to launch work, except `wire_s`."""

    pack_s: float = 0.0
    wire_s: float = 0.0
    """Waiting for messages and for processes sharing the device."""
    load_s: float = 0.0
    quantise_s: float = 0.0
    """Computing scales, quantising to FP8, and dequantising if the receiver stores another type."""
    checksum_s: float = 0.0
    sent: int = 0
    """Bytes of parts packed and sent by this process."""
    received: int = 0
    """Bytes of parts packed on other devices and loaded by this process."""
    handed_on: int = 0
    """Bytes of parts packed elsewhere and forwarded by this process."""
    local: int = 0
    """Bytes of parts packed on this process's device and loaded by this process."""
    extra_bytes: int = 0
    """Bytes of the buffers."""
    table_bytes: int = 0
    """Bytes of the tables of parts, on a GPU."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the time spent in the context to the field `what`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - start)


Bound = Callable[[RankBucket], tuple[BucketViews, list[Tensor]]]
"""Function from a bucket to its views and the parameters behind the views."""


@dataclass
class Run:
    """The inputs and the progress of a run."""

    transport: Transport
    deadline: Deadline
    report: Report
    with_checksums: bool
    sources: Bound
    """Function for the packing side of a bucket."""
    targets: Bound
    """Function for the unpacking side of a bucket. Called on arrival; no parameter is held before or after."""
    remaining: Counter[str]
    """Places still to be written, by target parameter."""
    loaded: Callable[[str], None]
    under_way: str = ""
    """Description of the last bucket handled, for errors."""
    _proofs: list[tuple[RankBucket, Tensor]] = field(default_factory=list)
    """Masks of the parts differing from the data sent, by bucket."""

    def pack(self, cargo: RankBucket, flat: Tensor) -> None:
        """Fills a bucket and the trailing checksums."""
        self.under_way = cargo.what
        with self.report.timed("pack_s"):
            views, params = self.sources(cargo)
            views.pack(params, flat)
        if views.conversions:
            with self.report.timed("quantise_s"):
                views.quantise(params, flat)
        if self.with_checksums:
            with self.report.timed("checksum_s"):
                _trailer(cargo, flat).copy_(views.checksums(params, flat))

    def load(self, cargo: RankBucket, flat: Tensor, *, local: bool) -> None:
        """Unpacks a bucket into the target's parameters and, with checksums, compares the result with the data sent."""
        self.under_way = cargo.what
        with self.report.timed("load_s"):
            views, params = self.targets(cargo)
            views.unpack(params, flat)
        if views.conversions:
            with self.report.timed("quantise_s"):
                views.dequantise(params, flat)
        if local:
            self.report.local += cargo.payload
        else:
            self.report.received += cargo.payload
        if self.with_checksums and views.views:
            with self.report.timed("checksum_s"):
                sent = _trailer(cargo, flat)
                if cargo.places != list(range(cargo.parts)):
                    sent = sent[upload(np.array(cargo.places), sent.device)]
                self._proofs.append((cargo, views.unlike(params, flat, sent)))
        del params  # `loaded` may free the memory
        for name, places in cargo.writes.items():
            self.remaining[name] -= places
            if not self.remaining[name]:
                self.loaded(name)

    def prove(self) -> None:
        """Checks that every part arrived in the right place. Called once, at the end: on a GPU the host waits for the
        result.

        Raises:
            ChecksumError: A part is wrong; names the first.
        """
        if not self._proofs:
            return
        with self.report.timed("checksum_s"):
            wrong = torch.cat([different for _, different in self._proofs]).nonzero().view(-1).tolist()
        if wrong:
            at = wrong[0]
            for cargo, different in self._proofs:
                if at < len(different):
                    item, names = cargo.items[cargo.places[at]], self.transport.names
                    raise ChecksumError(item.tensor, item.box, names[cargo.source], names[self.transport.rank])
                at -= len(different)


def _trailer(cargo: RankBucket, flat: Tensor) -> Tensor:
    """Returns the checksums behind a bucket's parts, int64 [parts]."""
    return flat[cargo.nbytes : cargo.size(True)].view(torch.int64)


@dataclass
class _Started:
    """A step in progress."""

    step: Step
    incoming: int | None
    outgoing: int | None
    delivered: bool = False


@dataclass
class Member:
    """A member of the process group: sends, receives, forwards, and serves device peers."""

    run: Run
    steps: Sequence[Step]
    buffers: Buffers
    guests: Mapping[int, ToPeer]
    in_flight: int
    _free: list[int] = field(default_factory=list)
    _slots: dict[int, int] = field(default_factory=dict)
    _arriving: dict[int, int] = field(default_factory=dict)
    _started: deque[_Started] = field(default_factory=deque)
    _marks: list[tuple[torch.cuda.Event, Step]] = field(default_factory=list)

    def go(self) -> None:
        """Executes all steps."""
        self._free = list(range(self.buffers.count))
        for step in self.steps:
            while len(self._free) < len(step.new):
                self._release()
            for cargo in step.new:
                self._slots[cargo.number] = self._free.pop()
            self._start(step)
            waiting = [started for started in self._started if not started.delivered]
            for started in waiting[: max(0, len(waiting) - self.in_flight + 1)]:
                self._deliver(started)
        while self._started:
            self._release()
        self._finish()

    def _flat(self, cargo: RankBucket) -> Tensor:
        return self.buffers.slot(self._slots[cargo.number])[: cargo.size(self.run.with_checksums)]

    def _start(self, step: Step) -> None:
        run, send = self.run, step.send
        receive = outgoing = None
        if step.receive is not None:
            receive = Message(self._flat(step.receive), step.sender, step.receive.what)
        if send is not None and step.receiver >= 0:
            outgoing = Message(self._flat(send), step.receiver, send.what)
            if send.packed:
                run.report.sent += send.payload
            else:
                run.report.handed_on += send.payload

        def prepare() -> None:
            if send is not None and send.packed:
                run.pack(send, self._flat(send))
            elif send is not None:
                self._arrive(send)

        if receive is None and outgoing is None:
            prepare()
            self._started.append(_Started(step, None, None))
            return
        incoming, sending = run.transport.exchange(receive, outgoing, step.round, prepare)
        if step.receive is not None and incoming is not None:
            self._arriving[step.receive.number] = incoming
        self._started.append(_Started(step, incoming, sending))

    def _arrive(self, cargo: RankBucket) -> None:
        """Waits for a bucket to arrive."""
        ticket = self._arriving.pop(cargo.number, None)
        if ticket is not None:
            with self.run.report.timed("wire_s"):
                self.run.transport.wait(ticket, self.run.deadline)

    def _deliver(self, started: _Started) -> None:
        """Loads the buckets of a step and announces each to device peers."""
        started.delivered = True
        for cargo in started.step.new:
            self._arrive(cargo)
            if cargo.guests:
                self._settle(started.step)
            for guest in cargo.guests:
                at = self._slots[cargo.number] * self.buffers.size
                self.guests[guest].ready(cargo.number, at, cargo.what, self.run.deadline)
            if cargo.unpacked:
                self.run.load(cargo, self._flat(cargo), local=cargo.packed)

    def _release(self) -> None:
        """Completes the oldest step and frees the buffers no longer needed."""
        started = self._started[0]
        if not started.delivered:
            self._deliver(started)
        self._started.popleft()
        with self.run.report.timed("wire_s"):
            if started.outgoing is not None:
                self.run.transport.wait(started.outgoing, self.run.deadline)
            for cargo in started.step.over:
                for guest in cargo.guests:
                    self.guests[guest].wait_until_read(cargo.number, cargo.what, self.run.deadline)
                self._free.append(self._slots.pop(cargo.number))
        if self.run.transport.on_streams:
            mark = torch.cuda.Event()
            mark.record()
            self._marks.append((mark, started.step))

    def _settle(self, step: Step) -> None:
        """Waits for the GPU, because another process reads the buffers next."""
        if self.run.transport.on_streams:
            mark = torch.cuda.Event()
            mark.record()
            self._until(mark, step)

    def _finish(self) -> None:
        for mark, step in self._marks:
            self._until(mark, step)

    def _until(self, mark: torch.cuda.Event, step: Step) -> None:
        """Waits for an event of the current stream.

        Raises:
            TransportError: The deadline passed or a process left the group.
        """
        transport, deadline = self.run.transport, self.run.deadline
        looked = time.monotonic()
        with self.run.report.timed("wire_s"):
            while not mark.query():
                time.sleep(0.0002)
                due = time.monotonic() > looked + LOOK_S
                if deadline.passed or (due and transport.broken):
                    peer, what = self._waited_for(step)
                    raise transport.failed(peer, what, "", timed_out=deadline.passed, deadline=deadline)
                looked = time.monotonic() if due else looked

    def _waited_for(self, step: Step) -> tuple[int, str]:
        """Returns the peer and the tensors of a step, or of the oldest step in progress with a peer."""
        for at in (step, *(started.step for started in self._started)):
            if at.receive is not None:
                return at.sender, at.receive.what
            if at.send is not None and at.receiver >= 0:
                return at.receiver, at.send.what
        return self.run.transport.rank, self.run.under_way


def visit(run: Run, host: ToOwner, buffers: Tensor, cargos: Sequence[RankBucket], host_rank: int) -> None:
    """Executes a run as device peer: loads the owner's buckets in place.

    Args:
        buffers: The owner's buffers, uint8, shared by both processes.
    """
    for cargo in cargos:
        with run.report.timed("wire_s"):
            at = host.wait_until_ready(cargo.number, cargo.what, run.deadline)
        flat = buffers[at : at + cargo.size(run.with_checksums)]
        run.load(cargo, flat, local=cargo.source == host_rank)
        if run.transport.on_streams:
            torch.cuda.current_stream().synchronize()  # only copies on this device, which cannot hang
        host.read(cargo.number, cargo.what, run.deadline)
