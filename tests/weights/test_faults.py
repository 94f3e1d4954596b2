"""Faults during a weight sync: killed or stopped processes and corrupted bytes."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from skyrl_mega.weights.exchange import executor
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.group import Transport, TransportError, call_off, host_store, join
from tests.support.ranks import MEGATRON_SERVER, run_ranks
from tests.weights.grids import LAYOUTS, MODELS, cut, empty, global_tensors
from tests.weights.meeting import Case, exchange

MOE = MODELS["qwen3_moe"]
APART = Case(
    MOE, LAYOUTS["ep2"], engine=2, engines=2, topology=Topology((0, 1), (8, 9, 10, 11), Links(8, 8)), bucket_bytes=20000
)
SHARED = Case(MOE, LAYOUTS["ep2"], engine=2, topology=Topology.shared(2, 2, Links(2, 2)), bucket_bytes=20000)


def sync_until_it_fails(pipe: Connection, rank: int, address: str, case: Case) -> None:
    """Repeats syncs until an error, then reports the time, peer, tensor and message of the error."""
    source, target = case.layouts()
    built, _, _kept = exchange(rank, address, case, source, target, Wire(case.dtype), hosted=True)
    ranks = case.parallel.ranks
    is_source = rank < ranks
    params = empty((source.shards if is_source else target.shards)[rank if is_source else rank - ranks], case.dtype)
    pipe.send("ready")
    try:
        while True:
            built.run(source=params) if is_source else built.run(target=params)
    except TransportError as error:
        pipe.send((time.monotonic(), error.peer, error.what, str(error)))
    pipe.recv()  # keeps this process alive, so others see only the effect of the transport


def stores() -> tuple[Any, str]:
    """Hosts the rendezvous store and the store with its port in this process. It outlives the ranks, like a driver."""
    lobby = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = host_store("127.0.0.1", 60)
    lobby.set("port", str(store.port))
    return (lobby, store), f"127.0.0.1:{lobby.port}"


def strike(case: Case, victim: int, how: signal.Signals, delay: float) -> tuple[float, list[Any]]:
    """Sends a signal to a process; returns the time of the signal and the reports of the other processes."""
    _kept, address = stores()
    pipes, processes = [], []
    for rank in range(case.size):
        ours, theirs = Pipe()
        processes.append(MEGATRON_SERVER.start(sync_until_it_fails, (theirs, rank, address, case)))
        theirs.close()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(180) and pipe.recv() == "ready"
        time.sleep(delay)
        struck = time.monotonic()
        os.kill(processes[victim].pid, how)
        reports = []
        for rank, pipe in enumerate(pipes):
            if rank != victim:
                assert pipe.poll(case.timeout_s + 30), f"process {rank} hangs"
                reports.append(pipe.recv())
        return struck, reports
    finally:
        for process in processes:
            process.kill()
            process.join()


MOMENTS = random.Random(7)


@pytest.mark.parametrize(
    "case, victim",
    [(APART, 0), (APART, 2), (APART, 5), (SHARED, 0), (SHARED, 3)],
    ids=["a source", "an engine worker", "the last one", "a host", "a guest"],
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_is_named_in_time(case: Case, victim: int, how: signal.Signals) -> None:
    """Kills or stops a process during a sync. After a kill, every peer names the victim at once.

    After a stop, each peer waits no longer than the timeout. A peer may name another waiting peer; the only named
    process without a report is the victim.
    """
    case = replace(case, timeout_s=60 if how == signal.SIGKILL else 6)
    struck, reports = strike(case, victim, how, MOMENTS.uniform(0.05, 0.5))
    silent = {peer for _, peer, _, _ in reports} - {f"process {p}" for p in range(case.size) if p != victim}
    assert silent == {f"process {victim}"}, reports
    for when, peer, what, message in reports:
        assert peer == f"process {victim}" or how == signal.SIGSTOP, reports
        assert ".weight" in what and what in message and "\n" not in message
        assert when - struck < (20 if how == signal.SIGKILL else 2 * case.timeout_s)
        assert ("did not answer within 6 s" if how == signal.SIGSTOP else "went away") in message


class SlowStore:
    """A store as a peer sees it: a value is visible only after the store answered a later request."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.seen: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.sent.append((key, value))

    def check(self, keys: list[str]) -> bool:
        self.seen.update((key, value.encode()) for key, value in self.sent)
        self.sent.clear()
        return all(key in self.seen for key in keys)

    def get(self, key: str) -> bytes:
        return self.seen[key]


def transport(rank: int, store: Any) -> Transport:
    return Transport(None, rank, 3, ("policy 0", "policy 1", "engine 2"), torch.device("cpu"), 3, store)


def test_what_is_told_has_arrived_when_the_connection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the order of failure handling: the cause is in the store before the connection closes."""
    store, arrived = SlowStore(), set()
    monkeypatch.setattr(Transport, "close", lambda _: arrived.update(store.seen))
    transport(1, store).failed(2, "a.weight", "", timed_out=True)
    assert arrived == {"lost/1", "lost/any"}
    message = str(transport(0, store).failed(1, "b.weight", "[file.cc] closed", timed_out=False))
    assert message == "policy 0: engine 2 did not answer within 3 s while a.weight was under way (noticed by policy 1)"


def test_who_has_just_left_has_time_to_tell_why() -> None:
    """Lets gloo's connections close before the peer that timed out can report the cause."""
    store = SlowStore()
    with ThreadPoolExecutor(1) as pool:
        noticed = pool.submit(transport(0, store).failed, 1, "b.weight", "[file.cc] closed", timed_out=False)
        time.sleep(0.1)
        transport(1, store).failed(2, "a.weight", "", timed_out=True)
    assert "engine 2 did not answer within 3 s while a.weight" in str(noticed.result(60))


@pytest.mark.parametrize("timed_out", [True, False])
def test_who_left_because_he_had_waited_too_long_did_not_go_away(timed_out: bool) -> None:
    """Lets two peers wait for each other, with slightly different timeouts."""
    store = SlowStore()
    transport(1, store).failed(0, "a.weight", "closed", timed_out=timed_out)
    message = str(transport(0, store).failed(1, "a.weight", "[file.cc] closed", timed_out=False))
    verdict, cause = ("did not answer within 3 s", "") if timed_out else ("went away", ": closed")
    assert message == f"policy 0: policy 1 {verdict} while a.weight was under way{cause}"


def corrupt(rank: int, _: str, address: str, case: Case, how: str) -> str:
    """Corrupts a transfer: process 0 sends a wrong part, or the last process unpacks a part to a wrong place."""
    source, target = case.layouts()
    built, _, _kept = exchange(rank, address, case, source, target, Wire(case.dtype), hosted=True)
    ranks = case.parallel.ranks
    last = case.size - 1
    ends_unpack, run_pack = executor.BucketViews.unpack, executor.ExchangeRun.pack
    if how == "on the wire" and rank == 0:

        def pack(self: Any, bucket: Any, flat: torch.Tensor) -> None:
            run_pack(self, bucket, flat)
            flat[bucket.items[-1].offset] ^= 1

        executor.ExchangeRun.pack = pack  # type: ignore[method-assign]
    if how == "wrong place" and rank == last:

        def unpack(self: Any, params: list[torch.Tensor], flat: torch.Tensor) -> None:
            ends_unpack(self, params, flat)
            local = self.views[0].local(params)
            local.copy_(local.roll(1, -1))

        executor.BucketViews.unpack = unpack  # type: ignore[method-assign]
    tensors = global_tensors(source.tensors)
    try:
        if rank < ranks:
            built.run(source=cut(source.shards[rank], tensors), checksums=True)
        else:
            built.run(target=empty(target.shards[rank - ranks], case.dtype), checksums=True)
    except executor.ChecksumError as error:
        named = all(str(part) in str(error) for part in (error.source, error.target, error.tensor, error.box))
        return f"{error.source} → {error.target}" if named else f"not named in {error}"
    except TransportError as error:
        return error.peer
    return ""


@pytest.mark.parametrize("case", [APART, SHARED], ids=["apart", "shared devices"])
@pytest.mark.parametrize("how", ["on the wire", "wrong place"])
def test_a_wrong_byte_is_found_and_named(case: Case, how: str) -> None:
    _kept, address = stores()
    reports = run_ranks(case.size, corrupt, address, case, how)
    wrong = [message for message in reports if "→" in message]
    assert wrong
    for message in wrong:
        source, _, target = message.partition(" → ")
        assert source == "process 0" if how == "on the wire" else target == f"process {case.size - 1}"
    # A process waiting for a peer with wrong bytes learns the peer's name.
    finders = {message.partition(" → ")[2] for message in wrong}
    assert {message for message in reports if message and "→" not in message} <= finders


def test_a_meeting_that_is_called_off_keeps_nobody_waiting() -> None:
    store = host_store("127.0.0.1", 60)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            join, ("127.0.0.1", store.port), 0, 2, "policy rank 0", device=torch.device("cpu"), timeout_s=60, group="g"
        )
        time.sleep(0.3)
        start = time.monotonic()
        call_off(store, "g", "engine-0 died")
        with pytest.raises(TransportError, match=r"policy rank 0: joining was cancelled: engine-0 died"):
            joining.result(50)
    assert time.monotonic() - start < 40
