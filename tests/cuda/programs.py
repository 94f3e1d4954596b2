"""Starter of ranks with Transformer Engine, each in a separate process, because changes to modules are permanent."""

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
    """Work of a rank."""

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
    """Runs a program on each rank and returns the answers of each rank by policy. `python -m tests.cuda.<module>` reads
    its case from standard input and writes a list of answers to the named file.

    Args:
        module: The program.
        folder: Folder with `model`; gets the logs.
        parallel: Layout of the ranks.
        policies: Policies by name.
        capability: Compute capability of the simulated device.
    """
    variables = {name: value for policy in policies.values() for name, value in environment(policy.precision).items()}
    variables |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    variables["TORCHDYNAMO_DISABLE"] = "1"  # a CPU compiles no kernels
    address, started = f"127.0.0.1:{free_port()}", []
    for rank in range(parallel.ranks):
        case = Case(rank, address, folder / "model", parallel, tuple(policies.values()), capability)
        case_file, log, out = (folder / f"{rank}.{end}" for end in ("case", "log", "out"))
        case_file.write_bytes(pickle.dumps(case))
        command = [sys.executable, "-W", "ignore", "-m", f"tests.cuda.{module}", str(out)]
        with case_file.open("rb") as file, log.open("wb") as log_file:
            environ = os.environ | variables
            process = subprocess.Popen(command, stdin=file, stderr=log_file, stdout=log_file, cwd=ROOT, env=environ)
        started.append((process, log, out))
    for process, log, _ in started:
        assert process.wait(timeout=LIMIT_S) == 0, log.read_text()[-3000:]
    ranks = [pickle.loads(out.read_bytes()) for _, _, out in started]
    return {name: [answers[i] for answers in ranks] for i, name in enumerate(policies)}


def join(case: Case) -> None:
    """Joins the ranks' group on gloo, with the CPU as the device."""
    import torch.distributed as dist

    from skyrl_mega.megatron import layer_spec, model
    from tests.cuda.as_cpu import CudaAsCpu
    from tests.megatron.layouts import CPU

    layer_spec.varlen_attn = None  # a kernel of the local spec without a replacement
    exchanges()
    (host, port), ranks = case.address.split(":"), case.parallel.ranks
    store = dist.TCPStore(host, int(port), ranks, is_master=case.rank == 0, timeout=timedelta(seconds=120))
    with CudaAsCpu():
        model.join(case.rank, case.parallel, store, CPU, 120)


class Request:
    """A gloo request with NCCL's behaviour: a second `wait` returns at once. gloo's own request would wait for another
    message."""

    def __init__(self, request: Any) -> None:
        self.own = request

    def wait(self) -> None:
        """Waits until the request is complete."""
        if self.own is not None:
            self.own.wait()
        self.own = None


def exchanges() -> None:
    """Makes gloo send and receive as NCCL does, permanently for this process."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as own

    batch = dist.batch_isend_irecv

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: Request(function(*args, **kwargs))

    def unmapped(operations: Any) -> Any:  # the function asks the group for a CUDA backend, and gloo has none
        with torch._C.DisableTorchFunction():
            return batch(operations)

    send, receive = again(own.isend), again(own.irecv)
    for module in (dist, own):
        both: Any = module
        both.isend, both.irecv, both.batch_isend_irecv = send, receive, unmapped
