"""Ranks of a rehearsal with Transformer Engine, each a process of its own: what it changes is for good."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from skyrl_mega.config.precision import environment
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import te
from tests.support.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300


@dataclass(frozen=True)
class Case:
    """What one rank is to do."""

    rank: int
    address: str
    model: Path
    parallel: ParallelDims
    policies: tuple[PolicyConfig, ...]
    capability: tuple[int, int]


def run(
    module: str,
    folder: Path,
    parallel: ParallelDims,
    policies: Mapping[str, PolicyConfig],
    capability: tuple[int, int] = te.HOPPER,
) -> dict[str, list[Any]]:
    """What each rank answers of each policy: `python -m tests.cuda.<module>` reads its case from standard input, and
    writes a list of answers to the file that is named.

    Args:
        module: The program.
        folder: With `model`. Logs are there.
        parallel: Of the ranks.
        policies: By name.
        capability: Compute capability of the device that is apparently there.
    """
    variables = {name: value for policy in policies.values() for name, value in environment(policy.precision).items()}
    variables |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    # No kernel is compiled on a CPU. What makes scales of magnitudes is Transformer Engine's Python, not its kernel.
    variables |= {"TORCHDYNAMO_DISABLE": "1", "NVTE_UNFUSED_FP8_UPDATE": "1"}
    address, started = f"127.0.0.1:{free_port()}", []
    for rank in range(parallel.ranks):
        case = Case(rank, address, folder / "model", parallel, tuple(policies.values()), capability)
        given, log, out = (folder / f"{rank}.{end}" for end in ("case", "log", "out"))
        given.write_bytes(pickle.dumps(case))
        command = [sys.executable, "-W", "ignore", "-m", f"tests.cuda.{module}", str(out)]
        with given.open("rb") as file, log.open("wb") as said:
            environ = os.environ | variables
            process = subprocess.Popen(command, stdin=file, stderr=said, stdout=said, cwd=ROOT, env=environ)
        started.append((process, log, out))
    for process, log, _ in started:
        assert process.wait(timeout=LIMIT_S) == 0, log.read_text()[-3000:]
    ranks = [pickle.loads(out.read_bytes()) for _, _, out in started]
    return {name: [answers[i] for answers in ranks] for i, name in enumerate(policies)}


def join(case: Case) -> None:
    """Has this process join the others, on gloo, on a CPU that is taken for a device."""
    import torch.distributed as dist

    from skyrl_mega.megatron import layer_spec, model
    from tests.cuda.as_cpu import CudaAsCpu
    from tests.megatron.layouts import CPU

    layer_spec.varlen_attn = None  # a kernel of the local spec, which no stand-in computes
    exchanges()
    (host, port), ranks = case.address.split(":"), case.parallel.ranks
    store = dist.TCPStore(host, int(port), ranks, is_master=case.rank == 0, timeout=timedelta(seconds=120))
    with CudaAsCpu():
        model.join(case.rank, case.parallel, store, CPU, 120)


class Request:
    """One of gloo's, which may be waited for again, as NCCL's may: gloo itself would wait for another message."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def wait(self) -> None:
        """Until it is over."""
        if self.own is not None:
            self.own.wait()
        self.own = None


def exchanges() -> None:
    """Has gloo send and receive as NCCL does, in this process, for good."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as own

    batch = dist.batch_isend_irecv

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: Request(function(*args, **kwargs))

    def unmapped(operations: Any) -> Any:  # it asks the group for CUDA's part, which gloo has none of
        with torch._C.DisableTorchFunction():
            return batch(operations)

    send, receive = again(own.isend), again(own.irecv)
    for module in (dist, own):
        both: Any = module
        both.isend, both.irecv, both.batch_isend_irecv = send, receive, unmapped
