"""Tests of a member's order of work: device peers read a bucket while the member packs the next one."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
import torch

from skyrl_mega.weights.exchange.executor import ExchangeReport, ExchangeRun, Member
from skyrl_mega.weights.exchange.rank_program import ProgramStep, RankBucket
from skyrl_mega.weights.transports.group import Deadline
from skyrl_mega.weights.transports.ipc import SharedBuffers, ToPeer

BUCKETS, BUFFERS = 6, 3


class Transport:
    on_streams = False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def exchange(self, receive: Any, send: Any, round_number: int, prepare: Any) -> tuple[int | None, int | None]:
        prepare()
        return (round_number if receive else None), (round_number if send else None)

    def wait(self, ticket: int, deadline: Deadline) -> None:
        self.log.append(f"arrived {ticket}")


class Peer:
    """Reads each announced bucket at once."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def ready(self, bucket: int, at: int, what: str, deadline: Deadline) -> None:
        self.log.append(f"ready {bucket}")

    def wait_until_read(self, bucket: int, what: str, deadline: Deadline) -> None:
        self.log.append(f"read {bucket}")


class Run(ExchangeRun):
    def pack(self, bucket: RankBucket, flat: torch.Tensor) -> None:
        cast(Any, self.transport).log.append(f"pack {bucket.number}")


def work(packed: list[bool]) -> list[str]:
    """Returns the order of work of a member that packs or receives each bucket for a device peer."""
    log: list[str] = []
    steps = []
    for number, here in enumerate(packed):
        bucket = RankBucket(number, 0, here, [], f"tensor {number}", 8, 8, 1, False, (1,), [], Counter())
        one = ProgramStep(number, new=[bucket], finished=[bucket])
        if here:
            one.send = bucket
        else:
            one.receive, one.sender = bucket, 2
        steps.append(one)
    unused = cast(Any, None)
    run = Run(cast(Any, Transport(log)), Deadline(60.0), ExchangeReport(), False, unused, unused, Counter(), unused)
    buffers = SharedBuffers(8, BUFFERS, torch.device("cpu"), False)
    Member(run, steps, buffers, {1: cast(ToPeer, Peer(log))}, BUFFERS).run_steps()
    return log


def test_a_peer_reads_a_packed_bucket_while_the_next_one_is_packed() -> None:
    log = work([True] * BUCKETS)
    for number in range(BUCKETS - 2):
        assert log.index(f"pack {number + 1}") < log.index(f"ready {number}") < log.index(f"pack {number + 2}")
        if number + BUFFERS < BUCKETS:  # only a lack of buffers makes the member wait for a peer
            assert log.index(f"read {number}") > log.index(f"ready {number + 1}")


def test_messages_on_the_way_are_awaited_after_later_ones_have_started() -> None:
    log = work([False] * BUCKETS)
    assert log[0] == "arrived 0" and [entry for entry in log if entry.startswith("ready")] == [
        f"ready {number}" for number in range(BUCKETS)
    ]


@pytest.mark.parametrize("packed", [[False, True, True, False, True], [True, False, True, True, False]])
def test_a_peer_reads_in_the_order_of_steps(packed: list[bool]) -> None:
    log = work(packed)
    assert [entry for entry in log if entry.startswith("ready")] == [f"ready {n}" for n in range(len(packed))]
    assert [entry for entry in log if entry.startswith("read ")] == [f"read {n}" for n in range(len(packed))]
