"""Data exchange between processes of a device: the device owner, a member of the process group, and device peers.

A device peer reads data in the owner's buffers: shared memory on a CPU (an anonymous file), a CUDA IPC handle on a
GPU. Over a Unix socket the owner announces the place of each bucket, and the peer confirms reading. Message formats
are fixed; nothing is unpickled.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.weights.plan.topology import Topology
from skyrl_mega.weights.transports.group import Deadline, Transport, TransportError

_HELLO = struct.Struct("<q")
_BUFFERS = struct.Struct("<qq")
"""Message: size of the buffers and size of the CUDA handle behind this message, in bytes. Without a handle a file
descriptor is attached.
"""
_READY = struct.Struct("<qq")
"""Message: bucket number and byte offset in the buffers."""
_DONE = struct.Struct("<q")
"""Message: bucket number."""
BUFFERS = "its device's buffers"
"""Name, in errors, of the data under way while a device owner and a peer connect."""
SLOT_ALIGNMENT = 256
"""Alignment of a buffer in bytes, as of memory from the allocator."""


def device_owners(topology: Topology, target_base: int) -> dict[int, int]:
    """Returns process → owner of its device for all processes. The owner, the first process on the device (policy ranks
    before engine workers), sends and receives for the others. A process alone on a device owns the device.

    Args:
        topology: Devices of the ranks.
        target_base: Process number of target rank 0. Source rank s is process s; a process may be both.

    Raises:
        ValueError: Two policy ranks share a device.
    """
    device_of = dict(enumerate(topology.targets, target_base)) | dict(enumerate(topology.sources))
    first: dict[int, int] = {}
    owners = {}
    for process, device in sorted(device_of.items()):
        owners[process] = first.setdefault(device, process)
        if owners[process] != process and process < len(topology.sources):
            raise ValueError(f"source ranks {owners[process]} and {process} share a device")
    return owners


class PeerChannel:
    """An end of the connection between a device owner and a peer."""

    def __init__(self, connection: socket.socket, transport: Transport, peer: int) -> None:
        self._connection, self._transport, self._peer = connection, transport, peer

    def _send(self, data: bytes, what: str, deadline: Deadline, descriptors: Sequence[int] = ()) -> None:
        failure = None
        try:
            self._connection.settimeout(deadline.left())
            if descriptors:
                socket.send_fds(self._connection, [data], descriptors)
            else:
                self._connection.sendall(data)
        except OSError as error:
            failure = str(error)
        if failure is not None:
            raise self._failed(what, failure, deadline)

    def _receive(self, size: int, what: str, deadline: Deadline) -> bytes:
        return self._receive_with(size, 0, what, deadline)[0]

    def _receive_with(self, size: int, descriptors: int, what: str, deadline: Deadline) -> tuple[bytes, list[int]]:
        data, failure = b"", None
        all_descriptors: list[int] = []
        try:
            while len(data) < size and failure is None:
                self._connection.settimeout(deadline.left())
                more, fds, _, _ = socket.recv_fds(self._connection, size - len(data), descriptors)
                data, all_descriptors = data + more, [*all_descriptors, *fds]
                failure = None if more else "connection closed"
        except OSError as error:
            failure = str(error) or "timed out"
        if failure is not None:
            raise self._failed(what, failure, deadline)
        return data, all_descriptors

    def _failed(self, what: str, failure: str, deadline: Deadline) -> TransportError:
        self.close()
        return self._transport.failed(self._peer, what, failure, timed_out=deadline.passed, deadline=deadline)

    def close(self) -> None:
        """Closes the connection; the other end notices at once. Closing twice is harmless."""
        self._connection.close()


class ToPeer(PeerChannel):
    """The owner's connection to a device peer. Construction shares `buffers`, used by all runs, with the peer.

    Args:
        connection: An open socket to the peer.
        transport: The group of both processes.
        peer: Process number of the peer.
        buffers: The owner's buffers.
        deadline: The end of the time for sharing the buffers.
    """

    def __init__(
        self, connection: socket.socket, transport: Transport, peer: int, buffers: SharedBuffers, deadline: Deadline
    ) -> None:
        super().__init__(connection, transport, peer)
        self._read: set[int] = set()
        handle = buffers.handle()
        header = _BUFFERS.pack(buffers.flat.numel(), len(handle))
        # An exchange without a bucket has no memory to share.
        self._send(header, BUFFERS, deadline, [buffers.descriptor] if buffers.descriptor >= 0 else [])
        if handle:
            self._send(handle, BUFFERS, deadline)

    def ready(self, bucket: int, at: int, what: str, deadline: Deadline) -> None:
        """Announces to the peer that a bucket lies in the buffers; does not wait until the peer has read it.

        Args:
            bucket: Number of the bucket.
            at: Byte offset of the bucket in the buffers.
            what: Description of the tensors, for errors.
            deadline: The end of the run's time.

        Raises:
            TransportError: The peer left, or did not take the message before the deadline.
        """
        self._send(_READY.pack(bucket, at), what, deadline)

    def wait_until_read(self, bucket: int, what: str, deadline: Deadline) -> None:
        """Waits until the peer has confirmed reading the bucket with this number.

        Args:
            bucket: Number of the bucket.
            what: Description of the tensors, for errors.
            deadline: The end of the run's time.

        Raises:
            TransportError: The peer left, or did not answer before the deadline.
        """
        while bucket not in self._read:
            self._read.update(_DONE.unpack(self._receive(_DONE.size, what, deadline)))
        self._read.discard(bucket)


class ToOwner(PeerChannel):
    """The connection of a device peer to the owner of its device. Construction waits for the owner's buffers.

    Args:
        connection: An open socket to the owner.
        transport: The group of both processes.
        peer: Process number of the owner.
        deadline: The end of the time for receiving the buffers.
    """

    def __init__(self, connection: socket.socket, transport: Transport, peer: int, deadline: Deadline) -> None:
        super().__init__(connection, transport, peer)
        self.buffers = self._receive_buffers(deadline)
        """The owner's buffers, uint8."""

    def close(self) -> None:
        """Closes the connection, which the owner notices at once, and releases this process's access to the owner's
        buffers. Closing twice is harmless."""
        super().close()
        self.buffers = torch.empty(0, dtype=torch.uint8)

    def _receive_buffers(self, deadline: Deadline) -> Tensor:
        data, descriptors = self._receive_with(_BUFFERS.size, 1, BUFFERS, deadline)
        size, handle = _BUFFERS.unpack(data)
        if handle:
            fields = json.loads(self._receive(handle, BUFFERS, deadline))
            return _from_handle(fields, self._transport.device)
        if not descriptors:
            return torch.empty(0, dtype=torch.uint8)
        (descriptor,) = descriptors
        try:
            return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        finally:
            os.close(descriptor)

    def wait_until_ready(self, bucket: int, what: str, deadline: Deadline) -> int:
        """Waits, until `deadline` at most, for the owner to announce a bucket; returns the bucket's byte offset in the
        owner's buffers.

        Args:
            bucket: Number of the expected bucket: the next one in the owner's order.
            what: Description of the tensors, for errors.
            deadline: The end of the run's time.

        Raises:
            TransportError: The owner left, did not answer before the deadline, or announced another bucket.
        """
        received, at = _READY.unpack(self._receive(_READY.size, what, deadline))
        if received != bucket:
            raise self._failed(what, f"it announced bucket {received}, not {bucket}", deadline)
        return int(at)

    def read(self, bucket: int, what: str, deadline: Deadline) -> None:
        """Confirms to the owner that this process has read the bucket with this number, so that the buffer is free.

        Args:
            bucket: Number of the bucket.
            what: Description of the tensors, for errors.
            deadline: The end of the run's time.

        Raises:
            TransportError: The owner left, or did not take the message before the deadline.
        """
        self._send(_DONE.pack(bucket), what, deadline)


class SharedBuffers:
    """A process's buffers for all runs: `flat`, uint8 [count · size], on the transport's device.

    Args:
        size: Minimum bytes of a buffer.
        count: Number of buffers.
        device: Device of the memory.
        shared: True to share the memory with device peers.
    """

    def __init__(self, size: int, count: int, device: torch.device, shared: bool) -> None:
        self.size, self.count = -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT, count
        self.descriptor = -1
        total = self.size * count
        self._pool: object = None
        if shared and device.type == "cpu" and total:
            self.descriptor = os.memfd_create("weights")
            os.ftruncate(self.descriptor, total)
            self.flat = torch.frombuffer(mmap.mmap(self.descriptor, total), dtype=torch.uint8)
        elif shared and total:
            self.flat, self._pool = _shareable_memory(total, device)
        else:
            self.flat = torch.empty(total, dtype=torch.uint8, device=device)

    def slot(self, number: int) -> Tensor:
        """Returns buffer `number` as a view of `flat`, uint8 [size]."""
        return self.flat[number * self.size : (number + 1) * self.size]

    def handle(self) -> bytes:
        """Returns a JSON handle for opening the memory on a GPU from another process; empty on a CPU, where
        `descriptor` is shared instead, and for buffers of no bytes."""
        if self.flat.device.type == "cpu" or not self.flat.numel():
            return b""
        fields = self.flat.untyped_storage()._share_cuda_()
        at = self.flat.storage_offset()
        return json.dumps([at, self.flat.numel(), *(f.hex() if isinstance(f, bytes) else f for f in fields)]).encode()

    def close(self) -> None:
        """Releases this process's access to the memory, and empties `flat`; device peers keep access until their own
        release. Closing twice is harmless."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.flat = torch.empty(0, dtype=torch.uint8)
        self._pool = None


def _shareable_memory(size: int, device: torch.device) -> tuple[Tensor, object]:
    """Allocates [size] bytes by cudaMalloc for other processes to open, and an object to keep alive with them.

    CUDA IPC cannot open memory of `expandable_segments`. The setting is therefore off meanwhile, and a separate pool
    keeps the allocator from reusing cached memory.
    """
    current = torch.cuda.memory._snapshot()["allocator_settings"]  # torch 2.11 has no other way to read them
    settings, expand = current["PYTORCH_CUDA_ALLOC_CONF"], current["expandable_segments"]
    pool = torch.cuda.MemPool()
    if expand:  # settings left out would be reset to torch's defaults
        torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")
    try:
        with torch.cuda.use_mem_pool(pool, device.index):  # None means the current device
            return torch.empty(size, dtype=torch.uint8, device=device), pool
    finally:
        if expand:
            torch._C._accelerator_setAllocatorSettings(settings)


def _from_handle(fields: list[Any], device: torch.device) -> Tensor:
    """Opens another process's memory on this GPU; `fields` come from `_share_cuda_`, bytes as hexadecimal."""
    at, size, _, memory, storage_bytes, offset, counter, counter_at, event, synchronise = fields
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device() if device.index is None else device.index,  # the owner may number GPUs otherwise
        bytes.fromhex(memory),
        storage_bytes,
        offset,
        bytes.fromhex(counter),
        counter_at,
        bytes.fromhex(event),
        synchronise,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, at, (size,), (1,))


def connect(
    transport: Transport, owners: dict[int, int], buffers: SharedBuffers
) -> tuple[dict[int, ToPeer], ToOwner | None]:
    """Connects this process with the other processes on its device: an owner with its peers, which get access to
    `buffers`, or a peer with its owner.

    A collective of all processes of a device.

    Args:
        transport: The joined group.
        owners: Result of `device_owners`.
        buffers: The buffers of this process; an owner shares them.

    Returns:
        Process → connection to the device peer, {} without peers; and the connection to the owner, None for an owner,
        also for a process alone on its device.

    Raises:
        TransportError: A process of the device did not connect within the transport's `timeout_s`.
    """
    deadline = Deadline(transport.timeout_s)
    me = transport.rank
    peers = [process for process, owner in owners.items() if owner == me and process != me]
    if peers:
        return _accept_peers(transport, peers, buffers, deadline), None
    if owners.get(me, me) != me:
        return {}, _connect_to_owner(transport, owners[me], deadline)
    return {}, None


def _accept_peers(
    transport: Transport, peers: list[int], buffers: SharedBuffers, deadline: Deadline
) -> dict[int, ToPeer]:
    store = transport.store
    assert store is not None
    folder = tempfile.mkdtemp(prefix="weights-")  # accessible to this user only
    connected: dict[int, ToPeer] = {}
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/door")
            listener.listen(len(peers))
            store.set(f"door/{transport.rank}", f"{folder}/door")
            while missing := [peer for peer in peers if peer not in connected]:
                listener.settimeout(deadline.left())
                try:
                    connection, _ = listener.accept()
                    connection.settimeout(deadline.left())
                    (peer,) = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
                except (OSError, struct.error) as error:
                    raise transport.failed(missing[0], "its device's channel", str(error), timed_out=True) from None
                if peer in missing:
                    connected[peer] = ToPeer(connection, transport, peer, buffers, deadline)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return connected


def _connect_to_owner(transport: Transport, owner: int, deadline: Deadline) -> ToOwner:
    store = transport.store
    assert store is not None
    while not store.check([f"door/{owner}"]):
        if deadline.passed:
            raise transport.failed(owner, "its device's channel", "", timed_out=True, deadline=deadline)
        time.sleep(0.01)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(deadline.left())
    try:
        connection.connect(store.get(f"door/{owner}").decode())
        connection.sendall(_HELLO.pack(transport.rank))
    except OSError as error:
        raise transport.failed(owner, "its device's channel", str(error), timed_out=False) from None
    return ToOwner(connection, transport, owner, deadline)
