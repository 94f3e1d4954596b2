"""Point-to-point messages between processes, over gloo or NCCL, in a group of their own.

The group is built directly on a store and is not torch's default one, so policy ranks (whose default group is
Megatron's) and engine workers (whose default group is vLLM's) can be in it together. NCCL has one process of a device
at most; another one there is a *guest*: it has a name and the store, but no place in the group
(`transports.ipc`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore

GRACE_S = 1.0
"""Kept of a timeout, a tenth of it at most, to find out whom those that were waited for had waited for themselves.

Nor is anybody said to have gone away before so long was left to him to tell of another."""


TOLERANCE_S = 0.05
"""A wait that ends so little before its time has timed out: backends count in milliseconds, rounded down."""


CALLED_OFF = "called off"
"""Key at the store under which somebody says why a group will not be whole."""


class TransportError(RuntimeError):
    """A process did not answer in time or went away; the message names it.

    `peer` is its name, `what` the tensors that were under way.
    """

    def __init__(self, message: str, peer: str = "", what: str = "") -> None:
        super().__init__(message)
        self.peer, self.what = peer, what


class Deadline:
    """A moment by which a whole run is over."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s
        self._waits_end = self.end - min(GRACE_S, timeout_s / 10)

    def left(self) -> float:
        """Seconds that a wait may still take; at least a moment."""
        return max(0.01, self._waits_end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether waiting is over."""
        return time.monotonic() >= self._waits_end - TOLERANCE_S


@dataclass(frozen=True)
class Message:
    """One message between this process and a peer."""

    tensor: Tensor
    """Contiguous; not touched before `wait`."""
    peer: int
    what: str
    """What errors call it."""


@dataclass
class Transport:
    """A joined group. `rank` counts processes, guests too; `names[rank]` is what people call one."""

    group: Any
    """The process group; None for a guest, and once it is closed."""
    rank: int
    size: int
    names: tuple[str, ...]
    device: torch.device
    """Where message buffers must lie."""
    timeout_s: float
    """Seconds that one run of an exchange may take."""
    store: Store | None = None
    """Where all have met."""
    place: dict[int, int] = field(default_factory=dict)
    """Process → rank in `group`."""
    _works: dict[int, tuple[Any, Message]] = field(default_factory=dict, repr=False)
    _tickets: int = 0

    @property
    def on_streams(self) -> bool:
        """Whether messages and waits are put on CUDA streams in order, and the host waits for none."""
        return self.device.type == "cuda"

    def exchange(
        self, receive: Message | None, send: Message | None, tag: int, prepare: Callable[[], None] = lambda: None
    ) -> tuple[int | None, int | None]:
        """Starts at most one message in each direction; returns a ticket of each, to `wait` for.

        `prepare` is called before the send starts and fills its tensor; it may wait for earlier messages. Where waiting
        blocks the host, the receive is under way meanwhile; on CUDA streams both messages start as one NCCL group.
        """
        if not self.on_streams:
            incoming = self._start("recv", receive, tag)
            prepare()
            return incoming, self._start("send", send, tag)
        prepare()
        self.group._start_coalescing()
        incoming, outgoing = self._start("recv", receive, tag), self._start("send", send, tag)
        work = self.group._end_coalescing()
        for ticket in (incoming, outgoing):
            if ticket is not None:
                self._works[ticket] = (work, self._works[ticket][1])
        return incoming, outgoing

    def _start(self, verb: str, message: Message | None, tag: int) -> int | None:
        if message is None:
            return None
        failure = None
        try:
            work = getattr(self.group, verb)([message.tensor], self.place[message.peer], tag)
        except RuntimeError as error:
            failure = str(error)
        if failure is not None:
            raise self.failed(message.peer, message.what, failure, timed_out=False)
        self._tickets += 1
        self._works[self._tickets] = (work, message)
        return self._tickets

    def wait(self, ticket: int, deadline: Deadline) -> None:
        """Waits until a message is through; on CUDA the current stream does, and the host goes on.

        Raises:
            TransportError: naming the peer and what was in the message.
        """
        failure = None
        try:
            # On NCCL a wait with a timeout would block the host; `Exchange` bounds the streams at its end.
            self._works[ticket][0].wait(*(() if self.on_streams else (timedelta(seconds=deadline.left()),)))
        except RuntimeError as error:
            failure = str(error)
        message = self._works.pop(ticket)[1]  # the message alone: see `close`
        if failure is not None:
            raise self.failed(message.peer, message.what, failure, timed_out=deadline.passed, deadline=deadline)

    def failed(
        self, peer: int, what: str, reason: str, *, timed_out: bool, deadline: Deadline | None = None
    ) -> TransportError:
        """Leaves the group at once, so that nobody waits for this process, and says who was lost.

        That is the peer, unless it told at the store before it left, or tells in the time that is left, that it had
        lost another.
        """
        self._tell(peer, what, timed_out)
        self.close()
        lost, what, timed_out = self._culprit(peer, what, timed_out, deadline)
        seen = "" if lost == peer else f" (noticed by {self.names[peer]})"
        verdict = f"did not answer within {self.timeout_s:g} s" if timed_out else "went away"
        # Gloo's own words begin with its source file and end with advice.
        words = reason.splitlines()[0].split("] ", 1)[-1].split(". ")[0] if reason else ""
        cause = "" if timed_out or not words else f": {words}"
        return TransportError(
            f"{self.names[self.rank]}: {self.names[lost]} {verdict} while {what} was under way{seen}{cause}",
            self.names[lost],
            what,
        )

    def give_up(self, what: str) -> None:
        """Leaves the group because of something that is wrong here; peers name this process and `what`."""
        self._tell(self.rank, what, False)
        self.close()

    def close(self) -> None:
        """Leaves the group; whoever waits for this process learns it at once."""
        if self.group is not None and self.on_streams:
            self.group.abort()
        # Gloo's sockets close when nothing refers to the group any more, unfinished messages included.
        self._works.clear()
        self.group = None

    @property
    def broken(self) -> bool:
        """Whether somebody has left the group; on CUDA streams a message to him just never ends."""
        return self.store is not None and bool(self.store.check(["lost/any"]))

    def _tell(self, peer: int, what: str, timed_out: bool) -> None:
        if self.store is not None:
            try:
                self.store.set(f"lost/{self.rank}", json.dumps([peer, what, timed_out]))
                self.store.set("lost/any", "")
                # A set returns before the store has it: an answer from the store means that peers find it there.
                self.store.check(["lost/any"])
            except RuntimeError:  # the store's host is gone too; the error that is raised says enough
                self.store = None

    def _culprit(self, peer: int, what: str, timed_out: bool, deadline: Deadline | None) -> tuple[int, str, bool]:
        """Follows who lost whom from `peer` on; the last one has told of nobody.

        After a timeout others are about to tell too: they are waited for until the deadline. And a connection that
        closed may be that of somebody whose own wait has just timed out: gloo closes it before he can tell.
        """
        lost, found, seen = peer, (what, timed_out), {self.rank}
        until = deadline.end - 0.05 if timed_out and deadline else time.monotonic() + min(GRACE_S, self.timeout_s / 10)
        while self.store is not None and lost not in seen:
            try:
                told = self.store.check([f"lost/{lost}"]) and json.loads(self.store.get(f"lost/{lost}"))
            except RuntimeError:  # as above
                break
            if told:
                seen.add(lost)
                lost, found = int(told[0]), (str(told[1]), bool(told[2]))
            elif time.monotonic() < until:
                time.sleep(0.02)
            else:
                break
        # Who lost each other in a circle: nobody knows better than this process, but for who left because he had waited
        # too long.
        return (peer, what, timed_out or found[1]) if lost == self.rank else (lost, *found)


def call_off(store: TCPStore, group: str, cause: str) -> None:
    """Tells all who are still waiting for others to join `group` that it comes to nothing."""
    PrefixStore(group, store).set(CALLED_OFF, cause)


def host_store(host: str, timeout_s: float) -> TCPStore:
    """Opens the store that the processes meet at, on a free port of the local address `host`; read it from `.port`."""
    listener = socket.create_server((host, 0), family=socket.getaddrinfo(host, None)[0][0])
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # A socket of our own, because the store itself would listen on every address of the machine.
        master_listen_fd=listener.detach(),
    )


def join(
    address: tuple[str, int] | TCPStore,
    rank: int,
    size: int,
    name: str,
    *,
    device: torch.device,
    timeout_s: float,
    group: str = "weights",
    guests: Collection[int] = (),
) -> Transport:
    """Joins the group called `group` at a store: NCCL on a CUDA device, gloo on a CPU. Returns when all have joined.

    Args:
        address: host and port of the store; the process that hosts it may give the store itself.
        rank, size: this process's number, and how many there are.
        name: what errors call this process, such as "policy rank 3".
        group: unlike that of any earlier group at this store.
        guests: processes that get no place in the process group; see `ipc.hosts`.

    Raises:
        TransportError: the store does not answer, or some ranks did not come in time; it says which.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        if isinstance(address, TCPStore):
            root: Store = address
            host = address.host
        else:
            host, port = address
            root = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        store = PrefixStore(group, root)
        names = _meet(store, rank, size, name, timeout_s)
        members = {r: i for i, r in enumerate(r for r in range(size) if r not in guests)}
        made: Any = None
        if rank in guests:
            pass
        elif device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = 2 * timeout  # `Exchange` has its own deadline and leaves the group in order
            with _errors_end_no_process():
                made = dist.ProcessGroupNCCL(PrefixStore("nccl", store), members[rank], len(members), nccl)
            # The communicator of all is made with the first message, for which all must be there.
            made.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()
        else:
            backend: Any = dist.ProcessGroupGloo
            gloo = backend._Options()
            gloo._timeout = timeout
            gloo._devices = [backend.create_device(hostname=_own_address(host))]
            made = backend(PrefixStore("gloo", store), members[rank], len(members), gloo)
    except TransportError:
        raise
    except RuntimeError as error:
        raise TransportError(f"{name}: cannot join group {group!r} at {address}: {error}") from error
    return Transport(made, rank, size, names, device, timeout_s, store=store, place=members)


def default_group(timeout_s: float, device: torch.device) -> Transport:
    """torch's default group as a transport, for movements among the policy's own ranks."""
    size = dist.get_world_size()
    names = tuple(f"rank {r}" for r in range(size))
    world: Any = dist.group.WORLD
    return Transport(
        world._get_backend(device), dist.get_rank(), size, names, device, timeout_s, place={r: r for r in range(size)}
    )


@contextmanager
def _errors_end_no_process() -> Iterator[None]:
    """NCCL's watchdog ends a process whose peer is lost, unless its group was made under this setting."""
    key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(key)
    os.environ[key] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _meet(store: Store, rank: int, size: int, name: str, timeout_s: float) -> tuple[str, ...]:
    """Every process leaves its name at the store and waits for those of the others."""
    store.set(f"name/{rank}", name)
    deadline = time.monotonic() + timeout_s
    missing = [f"name/{r}" for r in range(size)]
    while missing := [key for key in missing if not store.check([key])]:
        if store.check([CALLED_OFF]):
            raise TransportError(f"{name}: the meeting was called off: {store.get(CALLED_OFF).decode()}")
        if time.monotonic() > deadline:
            absent = ", ".join(key.removeprefix("name/") for key in missing)
            raise TransportError(f"{name}: rank {absent} of {size} did not join within {timeout_s:g} s")
        time.sleep(0.02)
    return tuple(store.get(f"name/{r}").decode() for r in range(size))


def _own_address(host: str) -> str:
    """The local address from which `host` is reached; peers find this process there. No packet is sent."""
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
