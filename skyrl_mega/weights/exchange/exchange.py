"""The execution of a plan: packing boxes into flat buckets, moving the buckets, and unpacking into parameters.

`Exchange` is built once in every process: `buckets` cuts the plan's routes into messages, `rounds` gives all messages
one shared order, `rank_program` selects the work of this process, `tensors` finds the parameters, `executor` runs the
steps. Extra memory is at most `in_flight` buckets, for sending, receiving and forwarding together, and on a GPU the
tables of `kernels.boxes`: about a thousandth of the bytes sent or received by a process. Both are kept between runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from skyrl_mega.common.limits import SYNC_BUCKETS
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.weights.exchange.executor import ChecksumError, ExchangeReport, ExchangeRun, Member, read_from_owner
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.exchange.rank_program import Role, rank_program
from skyrl_mega.weights.exchange.tensors import BucketViewCache
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.fp8.scales import Agree, Scales
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.transports.group import Deadline, Transport
from skyrl_mega.weights.transports.ipc import SharedBuffers, ToOwner, ToPeer, connect, device_owners

__all__ = ["ChecksumError", "Exchange", "ExchangeReport", "Staging", "local_view"]

Params = Mapping[str, Tensor]


class Staging:
    """A process's staging buffers and stream, for all runs of an exchange, or of several exchanges run in sequence.

    There is a single stream because the allocator keeps freed memory for the stream of last use. Buffers are allocated
    on first use, in the largest size requested until then.

    Args:
        transport: The group of the exchanges; decides device and kind of memory.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport_device = transport.device
        self._stream = torch.cuda.Stream(transport.device) if transport.on_streams else None
        self._size = self._count = 0
        self._shared = False
        self._allocated: SharedBuffers | None = None
        self.device = torch.empty(0, device=transport.device).device
        """The transport's device, with an index."""

    def reserve(self, size: int, count: int, shared: bool = False) -> None:
        """Requests at least `count` buffers of at least `size` bytes, in memory that processes on the same device can
        read if `shared`. Allocates nothing. Of several requests the largest of each number counts, and one `shared`
        shares all buffers.

        Raises:
            RuntimeError: The buffers are already allocated.
        """
        if self._allocated is not None:
            raise RuntimeError(
                "the staging buffers are allocated; build all exchanges that share a Staging before any runs"
            )
        self._size, self._count = max(size, self._size), max(count, self._count)
        self._shared = shared or self._shared

    @property
    def buffers(self) -> SharedBuffers:
        """All buffers, allocated on first access."""
        if self._allocated is None:
            with self.on_stream():
                self._allocated = SharedBuffers(self._size, self._count, self._transport_device, self._shared)
        return self._allocated

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Runs the body of the `with` block on the staging stream: after earlier and before later work of the current
        stream. On a CPU, changes nothing.

        The order also holds after an error, so that later work cannot overtake pending writes.
        """
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._transport_device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def close(self) -> None:
        """Frees the buffers, if allocated. Closing twice is harmless."""
        if self._allocated is not None:
            self._allocated.close()


class Exchange:
    """A plan as seen by a process, cut into messages once and run any number of times.

    Args:
        plan: All transfers; the same in every process of the transport.
        transport: The group; source rank s of the plan is process s, target rank t is process `target_base + t`.
            Of the processes on a device, the first (the device owner) sends and receives for the others (its device
            peers); see `ipc.device_owners`. Construction connects owners and peers.
        wire: The types on the wire; the sender converts to them, the receiver from them.
        source, target: This process's ranks in the two layouts; None without a part in a layout.
        source_layout, target_layout: With scales if the wire quantises (`fp8.format.with_scales`).
        bucket_bytes: Maximum size of a message.
        in_flight: Buffers of a process, at least 2: packing or loading of a bucket overlaps with transfers.
        agree: Maximum over ranks, for a source of an FP8 wire; see `fp8.scales.Agree`.
        staging: Stream and buffers shared with other exchanges. All of these are built before any runs, and run in
            sequence; no two processes may share a device. None creates new ones.

    Raises:
        ValueError: Fewer than 2 buffers; two sources on the same device; straddling blocks without `agree`; shared
            staging for processes on a shared device.
        TransportError: A process of this device did not connect.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        wire: Wire,
        *,
        source: int | None = None,
        source_layout: Layout | None = None,
        target: int | None = None,
        target_layout: Layout | None = None,
        bucket_bytes: int,
        in_flight: int = SYNC_BUCKETS,
        target_base: int = 0,
        agree: Agree | None = None,
        staging: Staging | None = None,
    ) -> None:
        if in_flight < 2:
            raise ValueError(f"an exchange needs 2 buffers at least, not {in_flight}")
        self.transport, self.wire, self.in_flight = transport, wire, in_flight
        self._source_shard, self._target_shard = _shard(source_layout, source), _shard(target_layout, target)
        role = Role(transport.rank, self._source_shard, self._target_shard)
        owners = device_owners(plan.topology, target_base)
        owners.setdefault(transport.rank, transport.rank)
        self._owner_rank = owners[transport.rank]
        self._steps, self._peer_buckets = rank_program(
            plan,
            wire,
            role,
            bucket_bytes=bucket_bytes,
            in_flight=in_flight,
            target_base=target_base,
            owners=owners,
        )
        self._buckets = self._peer_buckets or list(
            {bucket.number: bucket for step in self._steps for bucket in step.new}.values()
        )
        self._places = Counter(p.param for bucket in self._buckets for item in bucket.items for p in item.unpacked_to)
        self._scales: Scales | None = None
        if source is not None and source_layout is not None and wire.quantised:
            sent = {item.tensor for bucket in self._buckets for item in bucket.items if item.packed_from}
            self._scales = Scales(source_layout, source, wire.quantised, sent, agree, transport.device)
        self._target_scales: dict[str, Tensor] = {}
        self._run_count = 0
        device_peers = [process for process, owner in owners.items() if owner == transport.rank != process]
        size = 0 if self._peer_buckets else max((bucket.size(True) for bucket in self._buckets), default=0)
        self._staging = staging or Staging(transport)
        self._staging.reserve(size, min(in_flight, len(self._buckets)), bool(device_peers))
        self._device_peers: dict[int, ToPeer] = {}
        self._owner: ToOwner | None = None
        if staging is None:
            with self._staging.on_stream():
                self._device_peers, self._owner = connect(transport, owners, self._staging.buffers)
        elif device_peers or self._peer_buckets:
            raise ValueError("exchanges of processes on the same device cannot share a Staging")
        self._sources, self._targets = (
            BucketViewCache(True, self._staging.device),
            BucketViewCache(False, self._staging.device),
        )

    def run(
        self,
        source: Params | None = None,
        target: Params | None = None,
        *,
        checksums: bool = False,
        loaded: Callable[[str], None] | None = None,
    ) -> ExchangeReport:
        """Moves every box from the sources' parameters to the targets', in place, and returns this process's times and
        bytes. A collective: all processes of the plan call it.

        Args:
            source: This process's parameters by local name; None or {} in a process that sends nothing. Views from the
                first run are reused while types, shapes and strides stay the same, at any address.
            target: This process's parameters by local name, to be written; None or {} in a process that receives
                nothing. Parameters are looked up when parts arrive and are not held in between, so the mapping may
                create a parameter then, and `loaded` may free the memory. Scales may be absent.
            checksums: True to verify every part after arrival; the same in all processes.
            loaded: Called with a target parameter's name after the last part is written; None calls nothing. On a GPU
                the copies are then queued on the current stream, free for use by the callback.

        Raises:
            TransportError: A peer left, or did not answer within the transport's timeout for the whole run; names peer
                and tensor. After this or any other error the exchange is closed, and targets may be written in part.
            ChecksumError: A part differs from the data packed by the sender; names tensor, box and both processes.
                Raised at the end, when `loaded` has already been called.
            KeyError: `source` lacks a parameter to send.
            ValueError: `target` lacks a parameter to receive, or a tensor is FP8 at one end only and the wire cannot
                convert.
        """
        source_params, target_params = source or {}, target or {}
        run = self._begin(source_params, target_params, loaded or (lambda name: None), checksums=checksums)
        with torch.no_grad(), self._staging.on_stream():
            done = False
            try:
                self._prepare(run, source_params, target_params)
                self._execute(run)
                run.verify()
                done = True
            finally:
                if not done:
                    self._abort(run.under_way)
        self._run_count += 1
        run.report.extra_bytes = self._staging.buffers.flat.numel()
        run.report.table_bytes = self._sources.table_bytes + self._targets.table_bytes
        return run.report

    def close(self) -> None:
        """Leaves the group and frees the buffers for good; does not wait for other processes. Closing twice is
        harmless."""
        self.transport.close()
        for peer in self._device_peers.values():
            peer.close()
        if self._owner is not None:
            self._owner.close()
        self._staging.close()

    def _begin(
        self, source_params: Params, target_params: Params, loaded: Callable[[str], None], *, checksums: bool
    ) -> ExchangeRun:
        """Returns a new run between these parameters and the tables of scales."""

        def source_param(name: str) -> Tensor:
            assert self._source_shard is not None
            if self._scales and name in self._scales.tables:
                return self._scales.tables[name]
            return self._source_shard.shaped(name, source_params[name])

        def target_param(name: str) -> Tensor:
            assert self._target_shard is not None
            if name in self._target_scales:
                return self._target_scales[name]
            return self._target_shard.shaped(name, target_params[name])

        def notify_loaded(name: str) -> None:
            if name not in self._target_scales:
                loaded(name)

        return ExchangeRun(
            self.transport,
            Deadline(self.transport.timeout_s),
            ExchangeReport(),
            checksums,
            sources=lambda bucket: self._sources.of(bucket, source_param),
            targets=lambda bucket: self._targets.of(bucket, target_param),
            remaining=self._places.copy(),
            loaded=notify_loaded,
        )

    def _prepare(self, run: ExchangeRun, source_params: Params, target_params: Params) -> None:
        """Computes scales and, in the first run, looks up every source parameter, so missing parameters fail before
        the first message.
        """
        with run.report.timed("pack_s"):
            self._make_scales(target_params)
            if not self._run_count:
                for bucket in self._buckets:
                    if bucket.packed:
                        run.sources(bucket)
        if self._scales is not None:
            with run.report.timed("quantise_s"):
                self._scales.compute(source_params)

    def _execute(self, run: ExchangeRun) -> None:
        if self._owner is None:
            Member(run, self._steps, self._staging.buffers, self._device_peers, self.in_flight).run_steps()
        else:
            read_from_owner(run, self._owner, self._owner.buffers, self._peer_buckets, self._owner_rank)

    def _abort(self, what: str) -> None:
        """Closes the exchange; waiting processes are informed at once."""
        if self.transport.group is not None or self._owner is not None:
            self.transport.give_up(what)
        self.close()

    def _make_scales(self, target: Params) -> None:
        """Allocates tables for scales used by the receiver only to dequantise.

        Raises:
            ValueError: Parts arrive for a parameter missing in `target`.
        """
        shard = self._target_shard
        self._target_scales = {name: t for name, t in self._target_scales.items() if name not in target}
        for name in self._places.keys() - target.keys() - self._target_scales.keys():
            assert shard is not None
            if not any(p.param == name and p.tensor in self.wire.scales for p in shard.pieces):
                raise ValueError(f"the plan delivers parts of {name}, but the target parameters lack it")
            self._target_scales[name] = torch.empty(shard.params[name], device=self.transport.device)


def _shard(layout: Layout | None, rank: int | None) -> Shard | None:
    return None if layout is None or rank is None else layout.shards[rank]
