"""An end of a data exchange between two nodes: `…preflight.exchange FD HOST PORT DEVICE MIB SECONDS`.

Runs as a separate process, because a hanging collective can only be killed.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

ROUNDS = 5
"""Number of measured messages; the fastest counts."""


def main(fd: int, host: str, port: int, device: str, mib: int, timeout_s: float) -> None:
    """Exchanges messages with the other end and prints the JSON {"gb_s": …}: 10⁹ bytes sent by each end per second, in
    the fastest of `ROUNDS` rounds.

    Args:
        fd: File descriptor of rank 0's listening socket; -1 for rank 1.
        host: Address of rank 0.
        port: Port of rank 0.
        device: `cuda` or `cpu`.
        mib: Size of a message in MiB.
        timeout_s: Time limit of each connection and each collective, in seconds.

    Raises:
        RuntimeError: The other end does not answer within `timeout_s` (torch's `DistError`), or the received bytes
            differ from the sent bytes.
    """
    import torch
    import torch.distributed as dist

    rank, limit = int(fd < 0), timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, 2, is_master=rank == 0, timeout=limit, master_listen_fd=fd if rank == 0 else None)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=2,
        timeout=limit,
    )
    sent = torch.full((mib << 20,), rank, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    operations = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if not bool((received == 1 - rank).all()):
        raise RuntimeError("the received data differ from the sent data: the network or a device corrupts data")
    dist.barrier()
    print(json.dumps({"gb_s": (mib << 20) / min(seconds[1:]) / 1e9}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), float(sys.argv[6]))
