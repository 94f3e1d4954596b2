"""The operations between replicas that vLLM lacks on a CPU, by the same operations on whole tensors."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from skyrl_mega.engines.vllm.cpu_experts import _all_gatherv, _reduce_scatterv
from tests.support.ranks import run_ranks

SIZES = [3, 0, 5]
ROWS = torch.arange(24.0).view(8, 3)


def test_rows_of_all_replicas_come_together_and_go_back() -> None:
    run_ranks(len(SIZES), exchange)


def exchange(rank: int, address: str) -> None:
    dist.init_process_group("gloo", f"tcp://{address}", rank=rank, world_size=len(SIZES))
    communicator = SimpleNamespace(world_size=len(SIZES), rank_in_group=rank, device_group=dist.group.WORLD)
    own = ROWS.split(SIZES)[rank]
    whole, ids = _all_gatherv(communicator, [own, own[:, :1].long()], 0, SIZES)
    assert torch.equal(whole, ROWS) and torch.equal(ids, ROWS[:, :1].long())
    part = ROWS * (rank + 1)
    assert torch.equal(_reduce_scatterv(communicator, part, 0, SIZES), 6 * own)
    assert torch.equal(part, ROWS * (rank + 1)), "the input stays"
    equal = _all_gatherv(communicator, ROWS[rank : rank + 1])
    assert torch.equal(equal, ROWS[:3])
    assert torch.equal(_reduce_scatterv(communicator, ROWS[:6], 0), 3 * ROWS[2 * rank : 2 * rank + 2])
    dist.destroy_process_group()
