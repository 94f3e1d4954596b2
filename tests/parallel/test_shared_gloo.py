"""Gloo groups of a single member on one network thread; other groups as torch creates them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from skyrl_mega.megatron import cpu
from skyrl_mega.megatron.model import join
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.parallel.shared_gloo import share_gloo_threads
from tests.support.gloo import settled_gloo_threads
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
LIMIT = timedelta(seconds=77)


def use_groups(rank: int, address: str, shared: bool) -> int:
    """Computes in a group of two ranks and in ten groups with this rank alone; returns the number of network
    threads."""
    if shared:
        share_gloo_threads()
        share_gloo_threads()
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    groups = [dist.new_group([member], timeout=LIMIT) for _ in range(10) for member in range(2)][rank::2]
    for group in groups:
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert (tensor == rank).all()
        gathered = [None]
        dist.all_gather_object(gathered, rank, group=group)
        assert gathered == [rank]
        backend = group._get_backend(CPU)
        assert isinstance(backend, dist.ProcessGroupGloo) and backend.options._timeout == LIMIT
        distributed_c10d._set_pg_timeout(timedelta(seconds=7), group)
        assert backend.options._timeout == timedelta(seconds=7)
    threads = settled_gloo_threads(2 if shared else 11)
    dist.destroy_process_group(groups.pop())
    dist.barrier(groups[0])
    both = torch.full((1000,), float(rank))
    dist.all_reduce(both)
    assert (both == 1).all()
    dist.barrier()
    dist.destroy_process_group()
    return threads


def test_groups_of_a_single_member_share_a_thread() -> None:
    assert run_ranks(2, use_groups, True) == [2, 2], "one for the group of two ranks, one for the others"
    assert run_ranks(2, use_groups, False) == [11, 11], "torch's groups have a thread each"


def megatron_groups(rank: int, address: str) -> int:
    """Joins two data-parallel ranks as a run does; returns the number of network threads."""
    cpu.stand_in()
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), 2, is_master=rank == 0)
    join(rank, ParallelDims(2), store, CPU, 60)
    groups = [*distributed_c10d._world.pg_map]
    alone = sum(group.size() == 1 for group in groups)
    expected = len(groups) - alone + 1
    threads = settled_gloo_threads(expected)
    assert alone > 5 and threads == expected, (threads, alone, len(groups))
    dist.barrier()
    dist.destroy_process_group()
    return threads


def test_megatrons_groups_of_a_single_member_share_a_thread() -> None:
    run_ranks(2, megatron_groups)
