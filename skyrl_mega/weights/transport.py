"""Point-to-point messages between processes, over gloo or NCCL, in a group of their own.

The group is built directly on a store and is not torch's default one, so policy ranks (whose default group is
Megatron's) and engine workers (whose default group is vLLM's) can be in it together.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore


class TransportError(RuntimeError):
    """A peer did not answer in time or went away; the message names it."""


@dataclass(frozen=True)
class Transport:
    """A joined group. `rank` and `size` are this group's; `names[rank]` is what people call a process."""

    group: Any
    rank: int
    size: int
    names: tuple[str, ...]
    device: torch.device
    """Where message buffers must lie."""
    timeout_s: float
    """Seconds that one message may take."""

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> Any:
        """Starts to send a contiguous tensor; `wait` for it before it is changed."""
        return self._start("send", self.group.send, tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int = 0) -> Any:
        """Starts to receive into a contiguous tensor; `wait` for it before it is read."""
        return self._start("receive", self.group.recv, tensor, peer, tag)

    def _start(self, verb: str, operation: Any, tensor: Tensor, peer: int, tag: int) -> Any:
        try:
            return operation([tensor], peer, tag)
        except RuntimeError as error:
            raise TransportError(f"{self.names[self.rank]}: {verb} with {self.names[peer]} failed: {error}") from error

    def wait(self, work: Any, peer: int, what: str) -> None:
        """Waits until a message is through.

        Raises:
            TransportError: naming the peer and `what` was in the message.
        """
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise TransportError(
                f"{self.names[self.rank]}: {self.names[peer]} did not answer within {self.timeout_s:g} s while {what} "
                f"was under way: {str(error).splitlines()[0]}"
            ) from error


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
) -> Transport:
    """Joins the group called `group` at a store: NCCL on a CUDA device, gloo on a CPU. Returns when all have joined.

    Args:
        address: host and port of the store; the process that hosts it may give the store itself.
        rank, size: this process's place in the group.
        name: what errors call this process, such as "policy rank 3".

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
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            made: Any = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl)
        else:
            backend: Any = dist.ProcessGroupGloo
            gloo = backend._Options()
            gloo._timeout = timeout
            gloo._devices = [backend.create_device(hostname=_own_address(host))]
            made = backend(PrefixStore("gloo", store), rank, size, gloo)
    except TransportError:
        raise
    except RuntimeError as error:
        raise TransportError(f"{name}: cannot join group {group!r} at {address}: {error}") from error
    return Transport(made, rank, size, names, device, timeout_s)


def default_group(timeout_s: float, device: torch.device) -> Transport:
    """torch's default group as a transport, for movements among the policy's own ranks."""
    size = dist.get_world_size()
    names = tuple(f"rank {r}" for r in range(size))
    return Transport(dist.group.WORLD, dist.get_rank(), size, names, device, timeout_s)


def _meet(store: Store, rank: int, size: int, name: str, timeout_s: float) -> tuple[str, ...]:
    """Every process leaves its name at the store and waits for those of the others."""
    store.set(f"name/{rank}", name)
    deadline = time.monotonic() + timeout_s
    missing = [f"name/{r}" for r in range(size)]
    while missing := [key for key in missing if not store.check([key])]:
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
