"""Starter of ranks with Transformer Engine, forked from servers of their own, because changes to modules are
permanent."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from skyrl_mega.config.precision import environment
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import te
from tests.support.ranks import Server, run_ranks

LIMIT_S = 600


@dataclass(frozen=True)
class Case:
    """Work of a rank."""

    model: Path
    parallel: ParallelDims
    policies: tuple[PolicyConfig, ...]
    rank: int = 0
    address: str = ""


@functools.cache
def _server(capability: tuple[int, int], variables: tuple[tuple[str, str], ...]) -> Server:
    # A CPU compiles no kernels.
    known = {"SKYRL_MEGA_REHEARSED_CAPABILITY": f"{capability[0]}.{capability[1]}", "TORCHDYNAMO_DISABLE": "1"}
    return Server("tests.cuda.rehearsal", OMP_NUM_THREADS="1", **known, **dict(variables))


def server(variables: Mapping[str, str], capability: tuple[int, int] = te.HOPPER) -> Server:
    """Returns the fork server of ranks with Transformer Engine, with these environment variables. Transformer Engine
    reads its variables at its import."""
    return _server(capability, tuple(sorted(variables.items())))


def run(
    module: str,
    folder: Path,
    parallel: ParallelDims,
    policies: Mapping[str, PolicyConfig],
    capability: tuple[int, int] = te.HOPPER,
) -> dict[str, list[Any]]:
    """Runs `go` of `tests.cuda.<module>` on each rank and returns the answers of each rank by policy.

    Args:
        module: The module.
        folder: Folder with `model`.
        parallel: Layout of the ranks.
        policies: Policies by name.
        capability: Compute capability of the simulated device.
    """
    variables = {name: value for policy in policies.values() for name, value in environment(policy.precision).items()}
    case = Case(folder / "model", parallel, tuple(policies.values()))
    ranks = run_ranks(parallel.ranks, _go, module, case, timeout=LIMIT_S, server=server(variables, capability))
    return {name: [answers[i] for answers in ranks] for i, name in enumerate(policies)}


def _go(rank: int, address: str, module: str, case: Case) -> Any:
    from tests.cuda import rehearsal

    rehearsal.simulate()
    return importlib.import_module(f"tests.cuda.{module}").go(
        replace(case, rank=rank, address=address), rehearsal.WAITS
    )


def join(case: Case) -> None:
    """Joins the ranks' group on gloo, with the CPU as the device."""
    import torch.distributed as dist

    from skyrl_mega.megatron import model, packed_attention
    from tests.cuda.as_cpu import CudaAsCpu
    from tests.megatron.layouts import CPU

    packed_attention.varlen_attn = None  # a kernel of the local spec without a replacement
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
