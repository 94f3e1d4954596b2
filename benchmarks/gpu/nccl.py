"""Proof 4: assumptions of `weights.transports.group` about ProcessGroupNCCL, as far as a single GPU can show."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu import limits, parts
from benchmarks.gpu.processes import Job, together
from benchmarks.gpu.proof import Bench
from skyrl_mega.config.schema.cluster import ClusterConfig
from skyrl_mega.weights.transports.group import Deadline, Message, Transport, TransportError, host_store, join

REFUSAL = "Duplicate GPU"
"""NCCL's error text for two processes on one device."""


def prove(bench: Bench) -> None:
    store = host_store("127.0.0.1", parts.TIMEOUT_S)
    before = _free(bench)
    start = time.perf_counter()
    transport = _join(bench, store, "first")
    bench.figure("joining a group of one", time.perf_counter() - start, "s")
    if bench.cuda:
        _to_itself(bench, transport)
        bench.figure("memory of a group of one, used once", (before - _free(bench)) / 2**20, "MiB",
                     limit=ClusterConfig().gpu_reserve_gib * 2**10, limit_of="the reserve for all groups")  # fmt: skip
    else:
        bench.left_out("messages to itself: gloo has none; between two processes instead")
        answers = together(*(Job(_pair, (rank, store.port, "cpu")) for rank in range(2)), timeout_s=60)
        bench.holds("two processes got each other's bytes", answers == ["right", "right"], answers)
    start = time.perf_counter()
    transport.close()
    bench.figure("leaving it (abort)", time.perf_counter() - start, "s", at_most=10.0)
    second = _join(bench, store, "second")
    if bench.cuda:
        _to_itself(bench, second)
    second.close()
    bench.holds("a second group works after the first was aborted", True)
    if not bench.cuda:
        bench.left_out("two ranks on one device: gloo does not refuse them")
        return
    said = together(*(Job(_pair, (rank, store.port, "cuda")) for rank in range(2)), timeout_s=90)
    bench.note("two ranks on one device", said[0])
    bench.holds("two ranks on one device are refused by name", all(REFUSAL in words for words in said), said)


def _free(bench: Bench) -> int:
    """Returns the GPU's free bytes, after torch's allocator released the cache."""
    if not bench.cuda:
        return 0
    torch.cuda.set_device(bench.device)
    bench.synchronise()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _join(bench: Bench, store: object, group: str) -> Transport:
    if bench.cuda:
        torch.cuda.set_device(bench.device)
    tcp_store: Any = store
    return join(tcp_store, 0, 1, "policy rank 0", device=bench.device, timeout_s=parts.TIMEOUT_S, group=group)


def _to_itself(bench: Bench, transport: Transport) -> None:
    """Sends and receives in a single NCCL group call, as a round of a sync does."""
    sent = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device=bench.device)
    received = torch.zeros_like(sent)

    def once() -> None:
        tickets = transport.exchange(Message(received, 0, "a bucket"), Message(sent, 0, "a bucket"), 1)
        for ticket in tickets:
            assert ticket is not None
            transport.wait(ticket, Deadline(parts.TIMEOUT_S))

    once()
    bench.synchronise()
    bench.holds("a message to itself arrives", torch.equal(sent, received))
    bench.figure("messages of 64 MiB to itself", sent.nbytes / bench.seconds(once) / 1e9, "GB/s",
                 limit=limits.copy_gb_s(bench), limit_of="a copy within memory")  # fmt: skip


def _pair(rank: int, port: int, device: str) -> str:
    """Joins a group of two processes on the same device. Returns the error, or "right" or "wrong" for the received
    bytes."""
    own_device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    try:
        transport = join(("127.0.0.1", port), rank, 2, f"process {rank}", device=own_device, timeout_s=20, group="two")
    except TransportError as error:
        return str(error)
    sent = torch.full((1000,), rank, dtype=torch.uint8, device=own_device)
    received = torch.full_like(sent, 7)
    tickets = transport.exchange(Message(received, 1 - rank, "bytes"), Message(sent, 1 - rank, "bytes"), 1)
    for ticket in tickets:
        assert ticket is not None
        transport.wait(ticket, Deadline(20))
    return "right" if bool((received == 1 - rank).all()) else "wrong"
