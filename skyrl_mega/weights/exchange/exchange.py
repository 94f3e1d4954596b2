"""Carries a plan out: packs boxes into flat buckets, moves them, and unpacks them where they belong.

`Exchange` is built once in every process: `buckets` cuts the plan's routes into messages, `rounds` gives them one
order that all share, `rank_program` picks what this process has to do, `tensors` finds it in the parameters, `executor`
does it.
Extra memory is `in_flight` buckets at most, those that are sent, received and handed on together, and on a GPU the
tables of `kernels.boxes`: about a thousandth of the bytes that a process sends or receives. Both stay over all runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from skyrl_mega.config.limits import SYNC_BUCKETS
from skyrl_mega.parallel.box import Layout, Shard
from skyrl_mega.weights.exchange.executor import ChecksumError, Member, Report, Run, visit
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.exchange.rank_program import Role, rank_program
from skyrl_mega.weights.exchange.tensors import Ends
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.fp8.scales import Agree, Scales
from skyrl_mega.weights.plan.plan import Plan
from skyrl_mega.weights.transports.group import Deadline, Transport
from skyrl_mega.weights.transports.ipc import Buffers, ToOwner, ToPeer, connect, hosts

__all__ = ["ChecksumError", "Exchange", "Lane", "Report", "copy", "local_view"]

Params = Mapping[str, Tensor]


class Lane:
    """A process's stream and buffers, over all runs of an exchange, or of several that run one after the other.

    One stream: the allocator keeps what is freed for the stream that it was used on. The buffers are made when they are
    first asked for, as large as the largest that somebody has wanted until then.
    """

    def __init__(self, transport: Transport) -> None:
        self._given = transport.device
        self._stream = torch.cuda.Stream(transport.device) if transport.on_streams else None
        self._size = self._count = 0
        self._shared = False
        self._made: Buffers | None = None
        self.device = torch.empty(0, device=transport.device).device
        """The transport's, and with a number."""

    def want(self, size: int, count: int, shared: bool = False) -> None:
        """What an exchange needs: bytes of a buffer, how many, and whether guests are to see them."""
        if self._made is not None:
            raise RuntimeError("the lane's buffers are made; an exchange that shares a lane is built before any runs")
        self._size, self._count = max(size, self._size), max(count, self._count)
        self._shared = shared or self._shared

    @property
    def buffers(self) -> Buffers:
        """All of them."""
        if self._made is None:
            with self.entered():
                self._made = Buffers(self._size, self._count, self._given, self._shared)
        return self._made

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On a GPU, on the lane's own stream: after what the current one has to do, and before what it gets next.

        Also where that fails: what was written until then must not be overtaken.
        """
        if self._stream is None:
            yield
            return
        outside = torch.cuda.current_stream(self._given)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def close(self) -> None:
        """Gives the buffers back. Closing it twice does no harm."""
        if self._made is not None:
            self._made.close()


class Exchange:
    """A plan as one process sees it, cut into messages once and run as often as wanted.

    Args:
        plan: all transfers; every process of the transport has the same one.
        transport: the group; source rank s of the plan is its process `source_base + s`, target rank t
            `target_base + t`. Its guests are those of `ipc.hosts`. Building connects guests with their hosts.
        wire: the types on the wire; the sender converts to them, the receiver from them.
        source, target: this process's ranks in the two layouts; None where it has no part.
        source_layout, target_layout: with scales where the wire quantises (`fp8.format.with_scales`).
        bucket_bytes: size of one message at most.
        in_flight: buffers of a process, 2 at least: one is packed or loaded while others are on the wire.
        agree: for a source of an FP8 wire, see `fp8.scales.Agree`.
        lane: shared with exchanges that are built before any of them runs, and run one after the other; all processes
            have devices of their own. None: it has its own.

    Raises:
        ValueError: fewer than 2 buffers; two sources on one device; blocks that straddle, and no `agree`; a shared lane
            for processes that share a device.
        TransportError: a process of this device did not come.
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
        source_base: int = 0,
        target_base: int = 0,
        agree: Agree | None = None,
        lane: Lane | None = None,
    ) -> None:
        if in_flight < 2:
            raise ValueError(f"an exchange needs 2 buffers at least, not {in_flight}")
        self.transport, self.wire, self.in_flight = transport, wire, in_flight
        self._target_shard = _shard(target_layout, target)
        role = Role(transport.rank, source, _shard(source_layout, source), target, self._target_shard)
        where = hosts(plan.topology, source_base, target_base)
        where.setdefault(transport.rank, transport.rank)
        self._host_rank = where[transport.rank]
        self._steps, self._visits = rank_program(
            plan,
            wire,
            role,
            bucket_bytes=bucket_bytes,
            in_flight=in_flight,
            source_base=source_base,
            target_base=target_base,
            hosts=where,
        )
        self._cargos = self._visits or list(
            {cargo.number: cargo for step in self._steps for cargo in step.new}.values()
        )
        self._places = Counter(p.param for cargo in self._cargos for item in cargo.items for p in item.put)
        self._scales: Scales | None = None
        if source is not None and source_layout is not None and wire.quantised:
            sent = {item.tensor for cargo in self._cargos for item in cargo.items if item.taken}
            self._scales = Scales(source_layout, source, wire.quantised, sent, agree, transport.device)
        self._target_scales: dict[str, Tensor] = {}
        self._runs = 0
        guests = [process for process, host in where.items() if host == transport.rank != process]
        size = 0 if self._visits else max((cargo.size(True) for cargo in self._cargos), default=0)
        self._lane = lane or Lane(transport)
        self._lane.want(size, min(in_flight, len(self._cargos)), bool(guests))
        self._guests: dict[int, ToPeer] = {}
        self._host: ToOwner | None = None
        if lane is None:
            with self._lane.entered():
                self._guests, self._host = connect(transport, where, self._lane.buffers)
        elif guests or self._visits:
            raise ValueError("processes that share a device cannot share a lane")
        self._sources, self._targets = Ends(True, self._lane.device), Ends(False, self._lane.device)

    def run(
        self,
        source: Params | None = None,
        target: Params | None = None,
        *,
        checksums: bool = False,
        loaded: Callable[[str], None] | None = None,
    ) -> Report:
        """Moves every box from the sources' parameters to the targets'. A collective of all processes in the plan.

        Args:
            source: this process's parameters by local name. What is worked out for them in the first run serves the
                later ones as long as their types, shapes and strides are the same, wherever they lie.
            target: likewise. A parameter is asked for when parts of it have arrived, and not held in between; so the
                mapping may make it then, and `loaded` may give it back. Scales may be absent.
            checksums: whether every part is proved where it has arrived; alike in all processes.
            loaded: called with a target parameter's name when its last part has been written; on a GPU when the copies
                are on the current stream, which it may use.

        Raises:
            TransportError: a peer went away or did not answer within the transport's timeout, which bounds the whole
                run; it names peer and tensor. After it, or any other error, the transport is closed.
            ChecksumError: a part is not what its sender packed; it names tensor, box and both processes.
        """
        given, wanted = source or {}, target or {}
        run = self._begin(given, wanted, loaded or (lambda name: None), checksums=checksums)
        with torch.no_grad(), self._lane.entered():
            done = False
            try:
                self._prepare(run, given, wanted)
                self._go(run)
                run.prove()
                done = True
            finally:
                if not done:
                    self._leave(run.under_way)
        self._runs += 1
        run.report.extra_bytes = self._lane.buffers.flat.numel()
        run.report.table_bytes = self._sources.table_bytes + self._targets.table_bytes
        return run.report

    def close(self) -> None:
        """Leaves the group and gives the buffers back. The exchange is over; closing it twice does no harm."""
        self.transport.close()
        for guest in self._guests.values():
            guest.close()
        if self._host is not None:
            self._host.close()
        self._lane.close()

    def _begin(self, given: Params, wanted: Params, loaded: Callable[[str], None], *, checksums: bool) -> Run:
        """A run that begins now, between these parameters and the tables of scales that are beside them."""

        def taken(name: str) -> Tensor:
            return self._scales.tables[name] if self._scales and name in self._scales.tables else given[name]

        def put(name: str) -> Tensor:
            return self._target_scales[name] if name in self._target_scales else wanted[name]

        def told(name: str) -> None:
            if name not in self._target_scales:
                loaded(name)

        return Run(
            self.transport,
            Deadline(self.transport.timeout_s),
            Report(),
            checksums,
            sources=lambda cargo: self._sources.of(cargo, taken),
            targets=lambda cargo: self._targets.of(cargo, put),
            remaining=self._places.copy(),
            loaded=told,
        )

    def _prepare(self, run: Run, given: Params, wanted: Params) -> None:
        """All that comes before the first message: scales, and in the first run a look at every source parameter, so
        that what lacks shows at once."""
        with run.report.timed("pack_s"):
            self._make_scales(wanted)
            if not self._runs:
                for cargo in self._cargos:
                    if cargo.packed:
                        run.sources(cargo)
        if self._scales is not None:
            with run.report.timed("quantise_s"):
                self._scales.compute(given)

    def _go(self, run: Run) -> None:
        if self._host is None:
            Member(run, self._steps, self._lane.buffers, self._guests, self.in_flight).go()
        else:
            visit(run, self._host, self._host.buffers, self._visits, self._host_rank)

    def _leave(self, what: str) -> None:
        """Whoever waits for this process learns at once that it will not come."""
        if self.transport.group is not None or self._host is not None:
            self.transport.give_up(what)
        self.close()

    def _make_scales(self, target: Params) -> None:
        """Tables for scales that the receiver wants only to dequantise."""
        shard = self._target_shard
        self._target_scales = {name: t for name, t in self._target_scales.items() if name not in target}
        for name in self._places.keys() - target.keys() - self._target_scales.keys():
            assert shard is not None
            if not any(p.param == name and p.tensor in self.wire.scales for p in shard.pieces):
                raise ValueError(f"parts of {name} arrive, and no such parameter is given")
            self._target_scales[name] = torch.empty(shard.params[name], device=self.transport.device)


def _shard(layout: Layout | None, rank: int | None) -> Shard | None:
    return None if layout is None or rank is None else layout.shards[rank]


def copy(plan: Plan, source: Layout, sources: Sequence[Params], target: Layout, targets: Sequence[Params]) -> None:
    """Carries out a plan whose ranks are all in this process."""
    with torch.no_grad():
        for route in plan.routes:
            taken = plan.parts.locate(source.shards[route.source], route.parts)
            boxes = plan.parts.boxes(route.parts)
            for receiver in route.receivers:
                put = plan.parts.locate(target.shards[receiver], route.parts)
                for (_, box), (here, *_), places in zip(boxes, taken, put, strict=True):
                    for place in places:
                        local_view(targets[receiver][place.param], place.offset, box).copy_(
                            local_view(sources[route.source][here.param], here.offset, box)
                        )
