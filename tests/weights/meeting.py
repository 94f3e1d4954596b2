"""Real processes for tests of weight transfer: rendezvous, exchange over gloo, bit-exact comparison of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Layout
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.exchange import Exchange
from skyrl_mega.weights.fp8.format import Wire
from skyrl_mega.weights.plan.plan import Plan, plan
from skyrl_mega.weights.plan.topology import Topology
from skyrl_mega.weights.transports.group import Transport, host_store, join
from skyrl_mega.weights.transports.ipc import device_owners

CPU = torch.device("cpu")


def meet(
    rank: int,
    address: str,
    size: int,
    timeout_s: float = 120,
    device_peers: Any = (),
    hosted: bool = False,
    device: torch.device = CPU,
) -> tuple[Transport, Any]:
    """Joins the process group. Rank 0 hosts the store unless `hosted`; a second store at `address` holds the port."""
    host, port = address.split(":")
    lobby = dist.TCPStore(host, int(port), is_master=rank == 0 and not hosted, wait_for_workers=False)
    name = f"process {rank}"
    if rank == 0 and not hosted:
        store = host_store(host, timeout_s)
        lobby.set("port", str(store.port))
        return join(store, rank, size, name, device=device, timeout_s=timeout_s, device_peers=device_peers), (
            lobby,
            store,
        )
    where = (host, int(lobby.get("port")))
    return join(where, rank, size, name, device=device, timeout_s=timeout_s, device_peers=device_peers), lobby


@dataclass(frozen=True)
class Case:
    """A policy, the engines and the settings of the transfer between both."""

    hf: dict[str, Any]
    parallel: ParallelDims
    engine: int = 1
    engines: int = 1
    expert_parallel: bool = False
    topology: Topology | None = None
    dtype: torch.dtype = torch.bfloat16
    bucket_bytes: int = 4096
    in_flight: int = 3
    timeout_s: float = 120
    device: torch.device = CPU

    @property
    def size(self) -> int:
        return self.parallel.ranks + self.engine * self.engines

    def layouts(self) -> tuple[Layout, Layout]:
        arch = architecture(self.hf)
        return (
            arch.megatron_layout(self.hf, self.parallel, "local"),
            arch.engine_layout(self.hf, self.engine, self.engines, self.expert_parallel),
        )


def exchange(
    rank: int, address: str, case: Case, source: Layout, target: Layout, wire: Wire, hosted: bool = False
) -> tuple[Exchange, Plan, Any]:
    """Returns this process's exchange, the plan, and the stores to keep alive. Policy ranks come first."""
    transfer_plan = plan(source, target, case.topology, wire.itemsize)
    ranks = len(source.shards)
    owners = device_owners(transfer_plan.topology, ranks)
    device_peers = [p for p, owner in owners.items() if p != owner]
    transport, kept = meet(rank, address, case.size, case.timeout_s, device_peers, hosted, case.device)
    is_source = rank < ranks
    agree = maximum(rank, ranks, address) if is_source and wire.quantised else None
    new_exchange = Exchange(
        transfer_plan,
        transport,
        wire,
        source=rank if is_source else None,
        source_layout=source,
        target=None if is_source else rank - ranks,
        target_layout=target,
        bucket_bytes=case.bucket_bytes,
        in_flight=case.in_flight,
        target_base=ranks,
        agree=agree,
    )
    return new_exchange, transfer_plan, kept


def maximum(rank: int, ranks: int, address: str) -> Callable[[Tensor], None]:
    """Returns a maximum over the first `ranks` processes. These processes form a separate group at the common store."""
    host, port = address.split(":")
    met = (host, int(dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False).get("port")))
    transport = join(met, rank, ranks, f"process {rank}", device=CPU, timeout_s=120, group="agree")

    def agree(amax: Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        transport.group.allreduce([amax], options).wait()

    return agree


class Staged(dict[str, Tensor]):
    """Parameters that exist from the first to the last received part, like an engine's staging of a layer."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        super().__init__(dict.fromkeys(params))  # type: ignore[arg-type]
        self.params, self.order = params, []

    def __getitem__(self, name: str) -> Tensor:
        assert name not in self.order, "it is complete"
        if super().__getitem__(name) is None:
            self[name] = torch.full_like(self.params[name], float("nan"))
        return super().__getitem__(name)

    def finish(self, name: str) -> None:
        staging = self[name]
        self.order.append(name)
        self.params[name].copy_(staging)
        del self[name]
        alive = weakref.ref(staging)
        del staging
        assert alive() is None, "the exchange still holds it"


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Returns True if both dictionaries hold the same bits, padding (NaN) included."""
    return found.keys() == wanted.keys() and all(
        torch.equal(found[k].isnan(), wanted[k].isnan())
        and torch.equal(found[k].nan_to_num().double(), wanted[k].nan_to_num().double())
        for k in wanted
    )
