"""Gloo groups on one thread: same results, one thread, and a lost peer fails every group with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from skyrl_mega.megatron import cpu
from skyrl_mega.megatron.model import join
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.transports.shared_gloo import share_gloo_threads
from tests.support.ranks import run_ranks

RANKS = 3
SUM = float(sum(range(RANKS)))


def gloo_threads() -> int:
    """Returns the number of this process's threads that wait for messages of gloo."""
    names = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def many_groups(rank: int, address: str, shared: bool) -> int:
    """Sums in ten groups of all ranks one by one, and in all groups at the same time; returns the threads."""
    if shared:
        share_gloo_threads()
        share_gloo_threads()
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=RANKS)
    groups = [dist.new_group(list(range(RANKS))) for _ in range(10)]
    for size in (1, 100_003):
        for group in groups:
            one = torch.full((size,), float(rank))
            dist.all_reduce(one, group=group)
            assert (one == SUM).all()
        tensors = [torch.full((size,), float(rank + i)) for i in range(len(groups))]
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
        for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            assert (tensor == SUM + RANKS * i).all()
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, rank, group=groups[3])
    assert gathered == list(range(RANKS))
    threads = gloo_threads()
    dist.barrier()
    dist.destroy_process_group()
    return threads


def test_groups_share_a_thread() -> None:
    assert run_ranks(RANKS, many_groups, True) == [1] * RANKS
    assert run_ranks(RANKS, many_groups, False) == [11] * RANKS, "torch's groups have a thread each"


def megatron_groups(rank: int, address: str) -> int:
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), 2, is_master=rank == 0)
    join(rank, ParallelDims(2, tensor=2), store, torch.device("cpu"), 60)
    threads = gloo_threads()
    dist.barrier()
    dist.destroy_process_group()
    return threads


def test_all_of_megatrons_groups_share_a_thread() -> None:
    assert run_ranks(2, megatron_groups) == [1, 1]


def lose_a_peer(rank: int, address: str) -> list[str]:
    """Ends the last rank, and sums on rank 0 in two groups with it, then in one without it."""
    share_gloo_threads()
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=RANKS)
    pairs = [dist.new_group([0, RANKS - 1]) for _ in range(2)]
    left = dist.new_group([0, 1])
    errors = []
    if rank != 1:
        for group in pairs:
            dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        for group in pairs:
            with pytest.raises(RuntimeError) as raised:
                dist.all_reduce(torch.ones(1), group=group)
            errors.append(str(raised.value))
    if rank < 2:
        value = torch.ones(1)
        dist.all_reduce(value, group=left)
        assert value == 2
    return errors


def test_a_lost_peer_fails_its_groups_alone() -> None:
    """A group with a lost peer fails at once; torch's time limit is half an hour."""
    errors, *others = run_ranks(RANKS, lose_a_peer)
    assert others == [[], []] and len(errors) == 2
    assert all("closed" in error.lower() or "reset" in error.lower() for error in errors), errors


def on_named_interface(rank: int, address: str) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
    share_gloo_threads()
    with pytest.raises(RuntimeError) as raised:
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=1)
    return str(raised.value)


def test_the_interface_is_the_one_that_the_user_names() -> None:
    assert "no-such-interface" in run_ranks(1, on_named_interface)[0]
