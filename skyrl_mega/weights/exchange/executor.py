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
from skyrl_mega.weights.exchange.rank_program import ProgramStep, RankBucket
from skyrl_mega.weights.transports.group import Deadline, Message, Transport
from skyrl_mega.weights.transports.ipc import SharedBuffers, ToOwner, ToPeer

CHECK_S = 0.5
"""Seconds between checks for departed processes while waiting for the GPU."""
SPIN_S, SLEEP_S = 0.002, 0.0002
"""While waiting for the GPU: seconds without sleep, then seconds of each sleep. A bucket's copy takes a tenth of a
millisecond, less than a short sleep."""


class ChecksumError(RuntimeError):
    """A part that differs from the data sent, or was written to the wrong place.

    `tensor` and `box` identify the data; `source` and `target` are the names of the packing and the unpacking process.
    """

    def __init__(self, tensor: str, box: object, source: str, target: str) -> None:
        super().__init__(f"{target}: {tensor}, {box} is not what {source} sent (the checksums differ)")
        self.tensor, self.box, self.source, self.target = tensor, box, source, target


@dataclass
class ExchangeReport:
    """Times and bytes of a run in a process. Seconds are host time; on a GPU, to launch work, except `wire_s`."""

    pack_s: float = 0.0
    """Copying parameters into buckets."""
    wire_s: float = 0.0
    """Waiting for messages and for processes sharing the device."""
    load_s: float = 0.0
    """Copying buckets into parameters, and in an engine the end of the update (`finish_weight_update`)."""
    quantise_s: float = 0.0
    """Computing scales, quantising to FP8, and dequantising if the receiver stores another type."""
    checksum_s: float = 0.0
    """Computing and comparing checksums."""
    sent: int = 0
    """Bytes of parts packed and sent by this process."""
    received: int = 0
    """Bytes of parts packed on other devices and loaded by this process."""
    forwarded: int = 0
    """Bytes of parts packed by other processes and forwarded by this process."""
    local: int = 0
    """Bytes of parts packed on this process's device and loaded by this process."""
    extra_bytes: int = 0
    """Bytes of the buffers."""
    table_bytes: int = 0
    """Bytes of the tables of parts, on a GPU."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds spent in the `with` block to the field with the name `what`, also after an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - start)


Bound = Callable[[RankBucket], tuple[BucketViews, list[Tensor]]]
"""Function from a bucket to its views and the parameters behind the views."""


@dataclass
class ExchangeRun:
    """The inputs and the progress of a run."""

    transport: Transport
    deadline: Deadline
    report: ExchangeReport
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
    _mismatches: list[tuple[RankBucket, Tensor]] = field(default_factory=list)
    """Masks of the parts differing from the data sent, by bucket."""

    def pack(self, bucket: RankBucket, flat: Tensor) -> None:
        """Fills the memory of a bucket from the source's parameters, quantised if the wire is FP8, followed by the
        checksums if the run has any.

        Args:
            bucket: The bucket.
            flat: Memory of the bucket, uint8 [`bucket.size(with_checksums)`]; overwritten.
        """
        self.under_way = bucket.what
        with self.report.timed("pack_s"):
            views, params = self.sources(bucket)
            views.pack(params, flat)
        if views.conversions:
            with self.report.timed("quantise_s"):
                views.quantise(params, flat)
        if self.with_checksums:
            with self.report.timed("checksum_s"):
                _trailer(bucket, flat).copy_(views.checksums(params, flat))

    def load(self, bucket: RankBucket, flat: Tensor, *, local: bool) -> None:
        """Unpacks a bucket into the target's parameters and, with checksums, compares the result with the data sent. A
        difference raises nothing here, but in `verify`. Calls `loaded` with the name of each parameter that is now
        complete.

        Args:
            bucket: The bucket.
            flat: Content of the bucket, uint8 [`bucket.size(with_checksums)`].
            local: True if the bytes stayed on the device; the report counts these separately.
        """
        self.under_way = bucket.what
        with self.report.timed("load_s"):
            views, params = self.targets(bucket)
            views.unpack(params, flat)
        if views.conversions:
            with self.report.timed("quantise_s"):
                views.dequantise(params, flat)
        if local:
            self.report.local += bucket.payload
        else:
            self.report.received += bucket.payload
        if self.with_checksums and views.views:
            with self.report.timed("checksum_s"):
                sent = _trailer(bucket, flat)
                if bucket.places != list(range(bucket.parts)):
                    sent = sent[upload(np.array(bucket.places), sent.device)]
                self._mismatches.append((bucket, views.mismatches(params, flat, sent)))
        del params  # `loaded` may free the memory
        for name, places in bucket.writes.items():
            self.remaining[name] -= places
            if not self.remaining[name]:
                self.loaded(name)

    def verify(self) -> None:
        """Raises an error unless the checksums of all loaded parts agree with the sender's. Called once, at the end: on
        a GPU the host waits for the result. Without checksums checks nothing.

        Raises:
            ChecksumError: A part is wrong; names the first.
        """
        if not self._mismatches:
            return
        with self.report.timed("checksum_s"):
            wrong = torch.cat([different for _, different in self._mismatches]).nonzero().view(-1).tolist()
        if wrong:
            at = wrong[0]
            for bucket, different in self._mismatches:
                if at < len(different):
                    item, names = bucket.items[bucket.places[at]], self.transport.names
                    raise ChecksumError(item.tensor, item.box, names[bucket.source], names[self.transport.rank])
                at -= len(different)


def _trailer(bucket: RankBucket, flat: Tensor) -> Tensor:
    """Returns the checksums behind a bucket's parts, int64 [parts]."""
    return flat[bucket.nbytes : bucket.size(True)].view(torch.int64)


@dataclass
class _Started:
    """A step in progress."""

    step: ProgramStep
    incoming: int | None
    outgoing: int | None
    packed: torch.cuda.Event | None
    """On a GPU, the end of packing this step's bucket for device peers."""
    delivered: bool = False


@dataclass
class Member:
    """A member of the process group: sends, receives, forwards, and serves device peers."""

    run: ExchangeRun
    steps: Sequence[ProgramStep]
    buffers: SharedBuffers
    device_peers: Mapping[int, ToPeer]
    """Process number → connection to the device peer."""
    in_flight: int
    """Number of steps in progress before the oldest step's buckets are loaded."""
    _free: list[int] = field(default_factory=list)
    _slots: dict[int, int] = field(default_factory=dict)
    _arriving: dict[int, int] = field(default_factory=dict)
    _started: deque[_Started] = field(default_factory=deque)
    _marks: list[tuple[torch.cuda.Event, ProgramStep]] = field(default_factory=list)

    def run_steps(self) -> None:
        """Executes all steps of this process: packs, sends, receives, forwards and loads buckets, and on a GPU waits
        for the end of all copies. Checksums are computed, but compared only by `ExchangeRun.verify`.

        Raises:
            TransportError: A peer left, or did not answer before the deadline of the run.
            KeyError, ValueError: A parameter to send or to receive is missing; see `Exchange.run`.
        """
        self._free = list(range(self.buffers.count))
        for step in self.steps:
            while len(self._free) < len(step.new):
                self._complete_oldest()
            for bucket in step.new:
                self._slots[bucket.number] = self._free.pop()
            self._start(step)
            self._deliver_arrived()
        while self._started:
            self._complete_oldest()
        self._finish()

    def _deliver_arrived(self) -> None:
        """Delivers steps in order: of the steps before the last one those without an incoming message, and any that
        started `in_flight` - 1 steps ago. So device peers read a bucket while the next one is packed.
        """
        waiting = [started for started in self._started if not started.delivered]
        for number, started in enumerate(waiting[:-1]):
            if started.incoming is not None and number > len(waiting) - self.in_flight:
                return
            self._deliver(started)

    def _flat(self, bucket: RankBucket) -> Tensor:
        return self.buffers.slot(self._slots[bucket.number])[: bucket.size(self.run.with_checksums)]

    def _start(self, step: ProgramStep) -> None:
        run, send = self.run, step.send
        receive = outgoing = None
        if step.receive is not None:
            receive = Message(self._flat(step.receive), step.sender, step.receive.what)
        if send is not None and step.receiver >= 0:
            outgoing = Message(self._flat(send), step.receiver, send.what)
            if send.packed:
                run.report.sent += send.payload
            else:
                run.report.forwarded += send.payload

        packed = torch.cuda.Event() if run.transport.on_streams and send is not None and send.device_peers else None

        def prepare() -> None:
            if send is not None and send.packed:
                run.pack(send, self._flat(send))
                if packed is not None:
                    packed.record()
            elif send is not None:
                self._wait_until_arrived(send)

        if receive is None and outgoing is None:
            prepare()
            self._started.append(_Started(step, None, None, packed))
            return
        incoming, sending = run.transport.exchange(receive, outgoing, step.round, prepare)
        if step.receive is not None and incoming is not None:
            self._arriving[step.receive.number] = incoming
        self._started.append(_Started(step, incoming, sending, packed))

    def _wait_until_arrived(self, bucket: RankBucket) -> None:
        """Waits for a bucket to arrive."""
        ticket = self._arriving.pop(bucket.number, None)
        if ticket is not None:
            with self.run.report.timed("wire_s"):
                self.run.transport.wait(ticket, self.run.deadline)

    def _deliver(self, started: _Started) -> None:
        """Loads the buckets of a step and announces each to device peers."""
        started.delivered = True
        for bucket in started.step.new:
            self._wait_until_arrived(bucket)
            if bucket.device_peers:
                self._wait_for_gpu(started, bucket)
            for peer in bucket.device_peers:
                at = self._slots[bucket.number] * self.buffers.size
                self.device_peers[peer].ready(bucket.number, at, bucket.what, self.run.deadline)
            if bucket.unpacked:
                self.run.load(bucket, self._flat(bucket), local=bucket.packed)

    def _complete_oldest(self) -> None:
        """Completes the oldest step and frees the buffers no longer needed."""
        started = self._started[0]
        if not started.delivered:
            self._deliver(started)
        self._started.popleft()
        with self.run.report.timed("wire_s"):
            if started.outgoing is not None:
                self.run.transport.wait(started.outgoing, self.run.deadline)
            for bucket in started.step.finished:
                for peer in bucket.device_peers:
                    self.device_peers[peer].wait_until_read(bucket.number, bucket.what, self.run.deadline)
                self._free.append(self._slots.pop(bucket.number))
        if self.run.transport.on_streams:
            event = torch.cuda.Event()
            event.record()
            self._marks.append((event, started.step))

    def _wait_for_gpu(self, started: _Started, bucket: RankBucket) -> None:
        """Waits until the GPU has packed or received a bucket, because another process reads the bucket next."""
        if self.run.transport.on_streams:
            event = started.packed if bucket.packed else None
            if event is None:
                event = torch.cuda.Event()
                event.record()
            self._wait_for_event(event, started.step)

    def _finish(self) -> None:
        for event, step in self._marks:
            self._wait_for_event(event, step)

    def _wait_for_event(self, event: torch.cuda.Event, step: ProgramStep) -> None:
        """Waits for an event of the current stream.

        Raises:
            TransportError: The deadline passed or a process left the group.
        """
        transport, deadline = self.run.transport, self.run.deadline
        began = last_check = time.monotonic()
        with self.run.report.timed("wire_s"):
            while not event.query():
                time.sleep(0 if time.monotonic() < began + SPIN_S else SLEEP_S)
                due = time.monotonic() > last_check + CHECK_S
                if deadline.passed or (due and transport.broken):
                    peer, what = self._awaited(step)
                    raise transport.failed(peer, what, "", timed_out=deadline.passed, deadline=deadline)
                last_check = time.monotonic() if due else last_check

    def _awaited(self, step: ProgramStep) -> tuple[int, str]:
        """Returns the peer and the tensors of a step, or of the oldest step in progress with a peer."""
        for at in (step, *(started.step for started in self._started)):
            if at.receive is not None:
                return at.sender, at.receive.what
            if at.send is not None and at.receiver >= 0:
                return at.receiver, at.send.what
        return self.run.transport.rank, self.run.under_way


def read_from_owner(
    run: ExchangeRun, owner: ToOwner, buffers: Tensor, buckets: Sequence[RankBucket], owner_rank: int
) -> None:
    """Executes a run in a process whose device is owned by another process (`ipc.device_owners`): waits for each bucket
    and loads its parts directly from the owner's buffers, without a copy of the bucket.

    Args:
        run: Inputs and progress of the run.
        owner: Connection to the device owner.
        buffers: The owner's buffers, uint8, shared by both processes.
        buckets: The buckets to load, in the owner's order.
        owner_rank: Process number of the owner.

    Raises:
        TransportError: The owner left, or did not answer before the deadline of the run.
        ValueError: A parameter to receive is missing, or a type cannot be converted; see `Exchange.run`.
    """
    for bucket in buckets:
        with run.report.timed("wire_s"):
            at = owner.wait_until_ready(bucket.number, bucket.what, run.deadline)
        flat = buffers[at : at + bucket.size(run.with_checksums)]
        run.load(bucket, flat, local=bucket.source == owner_rank)
        if run.transport.on_streams:
            torch.cuda.current_stream().synchronize()  # only copies on this device, which cannot hang
        owner.read(bucket.number, bucket.what, run.deadline)
