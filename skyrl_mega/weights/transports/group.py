"""Point-to-point messages between processes, over gloo or NCCL, in a dedicated process group.

The group is built directly on a store and is not torch's default group, so policy ranks (default group: Megatron's)
and engine workers (default group: vLLM's) can join together. NCCL allows a single process per device; any other
process of the device is a *device peer*, with a name and the store, but without a rank in the group
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
"""Seconds reserved at the end of a timeout (at most a tenth of it) to learn which process the peer itself has lost.

After a connection closes, the peer gets the same time to report another lost process before being blamed.
"""


TOLERANCE_S = 0.05
"""Tolerance in seconds for a wait ending early but still counted as timed out: backends use milliseconds, rounded
down.
"""


CALLED_OFF = "called off"
"""Store key of the reason why a group will stay incomplete."""


class TransportError(RuntimeError):
    """A peer did not answer in time or left; the message names the process.

    `peer` is the process's name, `what` the tensors under way.
    """

    def __init__(self, message: str, peer: str = "", what: str = "") -> None:
        super().__init__(message)
        self.peer, self.what = peer, what


class Deadline:
    """The end of the time allowed for a whole run of an exchange, `timeout_s` seconds after construction."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.end = time.monotonic() + timeout_s
        self._waits_end = self.end - min(GRACE_S, timeout_s / 10)

    def left(self) -> float:
        """Returns the seconds left for a wait, at least 0.01. Waits end `GRACE_S` before the deadline (at most a tenth
        of the timeout), so that time is left to learn which process failed."""
        return max(0.01, self._waits_end - time.monotonic())

    @property
    def passed(self) -> bool:
        """True if no time is left for a wait, though some is left to learn which process failed."""
        return time.monotonic() >= self._waits_end - TOLERANCE_S


@dataclass(frozen=True)
class Message:
    """A message between this process and a peer."""

    tensor: Tensor
    """Contiguous; must not be touched before `wait`."""
    peer: int
    """Number of the other process, as `Transport.rank`."""
    what: str
    """Description for errors."""


@dataclass
class Transport:
    """A process's membership in a group that exchanges weights.

    `rank` and `size` count all processes: the members of the process group, and the device peers, which exchange data
    through another process on the same device. `names[rank]` is a process's name for the user.
    """

    group: Any
    """The process group; None for a device peer, and after closing."""
    rank: int
    """Number of this process."""
    size: int
    """Number of processes."""
    names: tuple[str, ...]
    """Name of each process in errors."""
    device: torch.device
    """Device of the message buffers."""
    timeout_s: float
    """Seconds allowed for a run of an exchange."""
    store: Store | None = None
    """Store of the group."""
    group_rank: dict[int, int] = field(default_factory=dict)
    """Rank in `group` of each process."""
    _works: dict[int, tuple[Any, Message]] = field(default_factory=dict, repr=False)
    _tickets: int = 0

    @property
    def on_streams(self) -> bool:
        """True if messages and waits are queued on CUDA streams without blocking the host."""
        return self.device.type == "cuda"

    def exchange(
        self, receive: Message | None, send: Message | None, tag: int, prepare: Callable[[], None] = lambda: None
    ) -> tuple[int | None, int | None]:
        """Starts at most one message in each direction. Only for members of the process group that have not left it; a
        process whose device another process owns is no member.

        If waiting blocks the host, the receive is already under way when `prepare` runs; on CUDA streams both messages
        start as an NCCL group.

        Args:
            receive: The message to receive; None for none.
            send: The message to send; None for none.
            tag: Number shared by both ends of a message, to match sends with receives on gloo.
            prepare: Called once, even without `send`, and before the send starts, to fill the send tensor; may wait for
                earlier messages. Its errors are passed on.

        Returns:
            Tickets for `wait`, each to be waited for once: (of `receive`, of `send`); None without a message.

        Raises:
            TransportError: A message cannot start because the peer is gone; the group is then left.
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
            work = getattr(self.group, verb)([message.tensor], self.group_rank[message.peer], tag)
        except RuntimeError as error:
            failure = str(error)
        if failure is not None:
            raise self.failed(message.peer, message.what, failure, timed_out=False)
        self._tickets += 1
        self._works[self._tickets] = (work, message)
        return self._tickets

    def wait(self, ticket: int, deadline: Deadline) -> None:
        """Waits until a message is complete. On CUDA only the current stream waits, not the host, so the message may
        still be under way, and `deadline` has no effect.

        Args:
            ticket: Result of `exchange`, not waited for yet.
            deadline: The end of the run's time.

        Raises:
            TransportError: The message failed or is not complete at the deadline; names the peer and the tensors. The
                group is then left.
        """
        failure = None
        try:
            # On NCCL a wait with a timeout would block the host; `Exchange` bounds the streams at its end.
            self._works[ticket][0].wait(*(() if self.on_streams else (timedelta(seconds=deadline.left()),)))
        except RuntimeError as error:
            failure = str(error)
        message = self._works.pop(ticket)[1]  # without the work: see `close`
        if failure is not None:
            raise self.failed(message.peer, message.what, failure, timed_out=deadline.passed, deadline=deadline)

    def failed(
        self, peer: int, what: str, reason: str, *, timed_out: bool, deadline: Deadline | None = None
    ) -> TransportError:
        """Leaves the group at once, so peers stop waiting, and returns, without raising it, an error naming the lost
        process.

        The lost process is the peer, unless the peer reports at the store, before leaving or in the remaining time, the
        loss of another process.

        Args:
            peer: Rank of the peer of the failed message.
            what: The tensors under way.
            reason: Text of the original error; may be empty.
            timed_out: True if the peer did not answer in time, False if the peer left.
            deadline: The end of the run's time; None without any.
        """
        self._report_lost(peer, what, timed_out)
        self.close()
        lost, what, timed_out = self._culprit(peer, what, timed_out, deadline)
        seen = "" if lost == peer else f" (noticed by {self.names[peer]})"
        verdict = f"did not answer within {self.timeout_s:g} s" if timed_out else "went away"
        # Gloo's message begins with its source file and ends with advice.
        words = reason.splitlines()[0].split("] ", 1)[-1].split(". ")[0] if reason else ""
        cause = "" if timed_out or not words else f": {words}"
        return TransportError(
            f"{self.names[self.rank]}: {self.names[lost]} {verdict} while {what} was under way{seen}{cause}",
            self.names[lost],
            what,
        )

    def give_up(self, what: str) -> None:
        """Leaves the group because of an error in this process. Peers stop waiting; their errors name this process and
        `what`, the tensors under way."""
        self._report_lost(self.rank, what, False)
        self.close()

    def close(self) -> None:
        """Leaves the group; closing twice is harmless.

        On CPUs waiting peers notice at once. On CUDA waiting peers notice only at their deadline: `give_up` leaves the
        group and reports this to the peers.
        """
        if self.group is not None and self.on_streams:
            self.group.abort()
        # Gloo's sockets, with unfinished messages, close when nothing refers to the group any more.
        self._works.clear()
        self.group = None

    @property
    def broken(self) -> bool:
        """True if a process has reported at the store that it left after a failure; on CUDA streams a message to such a
        process never ends. False without a store. Reading raises RuntimeError if the store does not answer."""
        return self.store is not None and bool(self.store.check(["lost/any"]))

    def _report_lost(self, peer: int, what: str, timed_out: bool) -> None:
        if self.store is not None:
            try:
                self.store.set(f"lost/{self.rank}", json.dumps([peer, what, timed_out]))
                self.store.set("lost/any", "")
                # A set returns before the store has the value; an answer from the store means that peers can read it.
                self.store.check(["lost/any"])
            except RuntimeError:  # the store's host is gone too; the raised error is enough
                self.store = None

    def _culprit(self, peer: int, what: str, timed_out: bool, deadline: Deadline | None) -> tuple[int, str, bool]:
        """Follows the reports of lost processes from `peer` on, to a process without a report.

        After a timeout, reports of other processes are due soon and are awaited until the deadline. A closed
        connection may belong to a process whose own wait has just timed out: gloo closes it before the process can
        report.
        """
        lost, loss, seen = peer, (what, timed_out), {self.rank}
        until = deadline.end - 0.05 if timed_out and deadline else time.monotonic() + min(GRACE_S, self.timeout_s / 10)
        while self.store is not None and lost not in seen:
            try:
                report = self.store.check([f"lost/{lost}"]) and json.loads(self.store.get(f"lost/{lost}"))
            except RuntimeError:  # the store's host is gone, as above
                break
            if report:
                seen.add(lost)
                lost, loss = int(report[0]), (str(report[1]), bool(report[2]))
            elif time.monotonic() < until:
                time.sleep(0.02)
            else:
                break
        # Processes that lost each other in a circle know no more than this process, except about a timeout.
        return (peer, what, timed_out or loss[1]) if lost == self.rank else (lost, *loss)


def call_off(store: TCPStore, group: str, cause: str) -> None:
    """Cancels the group called `group`: every process that waits in `join` at this store for other processes, now or
    later, raises TransportError with `cause`. Processes that have already joined are not affected. Does not wait.

    Raises:
        RuntimeError: The store does not answer.
    """
    PrefixStore(group, store).set(CALLED_OFF, cause)


def host_store(host: str, timeout_s: float) -> TCPStore:
    """Opens the store where processes meet, on a free port of the local address `host`, and returns the store; its
    `.port` is the port. The store ends with the returned object.

    Args:
        host: Address of this machine.
        timeout_s: Seconds until an operation of the store must be complete.

    Raises:
        OSError: `host` is no address of this machine.
    """
    listener = socket.create_server((host, 0), family=socket.getaddrinfo(host, None)[0][0])
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # The socket is ours, because the store itself would listen on every address of the machine.
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
    device_peers: Collection[int] = (),
) -> Transport:
    """Joins the group called `group` at a store: NCCL on a CUDA device, gloo on a CPU. Returns after all processes
    joined.

    Args:
        address: Host and port of the store; the process hosting the store may pass the store itself.
        rank, size: This process's number, and the number of processes.
        name: Name of this process in errors, such as "policy rank 3".
        device: Device of all tensors to send and receive.
        timeout_s: Seconds for joining, and later the time limit of each run.
        group: Name unlike any earlier group's at this store.
        device_peers: Numbers of the processes whose device another process owns; these get no rank in the process
            group. See `ipc.device_owners`.

    Raises:
        TransportError: The store does not answer, ranks did not join within `timeout_s`, or the group was called off
            (`call_off`); names the missing ranks or the cause.
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
        names = _exchange_names(store, rank, size, name, timeout_s)
        members = {r: i for i, r in enumerate(r for r in range(size) if r not in device_peers)}
        process_group: Any = None
        if rank in device_peers:
            pass
        elif device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = 2 * timeout  # `Exchange` enforces its own deadline and leaves the group in order
            with _without_nccl_watchdog():
                process_group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), members[rank], len(members), nccl)
            # NCCL creates the communicator with the first message, for which all members must be present.
            process_group.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()
        else:
            backend: Any = dist.ProcessGroupGloo
            gloo = backend._Options()
            gloo._timeout = timeout
            gloo._devices = [backend.create_device(hostname=_own_address(host))]
            process_group = backend(PrefixStore("gloo", store), members[rank], len(members), gloo)
    except TransportError:
        raise
    except RuntimeError as error:
        raise TransportError(f"{name}: cannot join group {group!r} at {address}: {error}") from error
    return Transport(process_group, rank, size, names, device, timeout_s, store=store, group_rank=members)


def default_group(timeout_s: float, device: torch.device) -> Transport:
    """Returns torch's default group, which must be initialised, as a transport for transfers among the policy's ranks.
    Creates no group: on CUDA, closing the transport, as after an error, aborts the default group. Without a store, the
    errors of peers name only the process that they waited for.

    Args:
        timeout_s: Seconds allowed for a run of an exchange.
        device: Device of the message buffers.
    """
    size = dist.get_world_size()
    names = tuple(f"rank {r}" for r in range(size))
    world: Any = dist.group.WORLD
    return Transport(
        world._get_backend(device),
        dist.get_rank(),
        size,
        names,
        device,
        timeout_s,
        group_rank={r: r for r in range(size)},
    )


@contextmanager
def _without_nccl_watchdog() -> Iterator[None]:
    """Keeps NCCL's watchdog from killing this process when a peer is lost; groups created inside keep the setting."""
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


def _exchange_names(store: Store, rank: int, size: int, name: str, timeout_s: float) -> tuple[str, ...]:
    """Publishes this process's name at the store and waits for the rest; returns the names by rank.

    Raises:
        TransportError: The group was called off, or ranks did not join in time.
    """
    store.set(f"name/{rank}", name)
    deadline = time.monotonic() + timeout_s
    missing = [f"name/{r}" for r in range(size)]
    while missing := [key for key in missing if not store.check([key])]:
        if store.check([CALLED_OFF]):
            raise TransportError(f"{name}: joining was cancelled: {store.get(CALLED_OFF).decode()}")
        if time.monotonic() > deadline:
            absent = ", ".join(key.removeprefix("name/") for key in missing)
            raise TransportError(f"{name}: rank {absent} of {size} did not join within {timeout_s:g} s")
        time.sleep(0.02)
    return tuple(store.get(f"name/{r}").decode() for r in range(size))


def _own_address(host: str) -> str:
    """Returns the local address for reaching `host`, used by peers to find this process. Sends no packet."""
    family = socket.getaddrinfo(host, None)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
