"""Weight sync, every step: each engine worker's shard comes straight from the policy ranks that hold it.

Three parties: `WeightSync` in the driver says when; a `Source` in every policy rank sends; a `Target` in every vLLM
worker receives. Source and target get the same `Connection`, of plain values, and compute the same transfer plan from
it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skyrl_mega.config.schema import Config
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.megatron import Spec, layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.execute import Exchange
from skyrl_mega.weights.plan import Plan, plan
from skyrl_mega.weights.transport import host_store, join

if TYPE_CHECKING:
    from skyrl_mega.cluster.group import ActorGroup

MARGIN_S = 15.0
"""The driver waits so much longer than the transports do: their errors name rank and tensor."""


@dataclass(frozen=True)
class Connection:
    """What every party must agree on. Plain values only: it travels as JSON would."""

    host: str
    port: int
    """Where the store is that all meet at."""
    hf: dict[str, Any]
    """config.json."""
    parallel: dict[str, Any]
    """Fields of the policy's `Parallel`."""
    spec: Spec
    """Layer spec of the policy, which names its parameters."""
    engines: int
    tensor: int
    """Tensor parallel size of one engine."""
    expert_parallel: bool
    dtype: str
    """Type on the wire."""
    bucket_bytes: int
    timeout_s: float

    @property
    def size(self) -> int:
        """Processes in the group: policy ranks first, then the workers of engine 0, of engine 1, …"""
        return int(self.parallel["ranks"]) + self.engines * self.tensor

    def plan(self) -> Plan:
        """From the policy's layout to that of all engine workers."""
        arch = architecture(self.hf)
        return plan(
            arch.megatron_layout(self.hf, Parallel(**self.parallel), self.spec),
            arch.engine_layout(self.hf, self.tensor, self.engines, self.expert_parallel),
        )

    def exchange(self, device: torch.device, *, source: int | None = None, target: int | None = None) -> Exchange:
        """Joins the group as policy rank `source` or as engine worker `target`. Returns when all have joined."""
        ranks = self.parallel["ranks"]
        if source is not None:
            rank, name = source, f"policy rank {source}"
        else:
            assert target is not None
            rank, name = ranks + target, f"engine {target // self.tensor} worker {target % self.tensor}"
        moves = self.plan()  # before the meeting, so that nobody waits for it in there
        transport = join((self.host, self.port), rank, self.size, name, device=device, timeout_s=self.timeout_s)
        return Exchange(
            moves,
            transport,
            source=source,
            target=target,
            dtype=getattr(torch, self.dtype),
            bucket_bytes=self.bucket_bytes,
            target_base=ranks,
        )


class Source:
    """A policy rank's end."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def send(self, params: Mapping[str, Tensor]) -> int:
        """Sends this rank's part; returns bytes sent. Raises TransportError, which names the peer."""
        return self.exchange.run(source=params)[0]


class Target:
    """An engine worker's end."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def receive(self, params: Mapping[str, Tensor]) -> int:
        """Fills this worker's load-time parameters; returns bytes received. Raises TransportError."""
        return self.exchange.run(target=params)[1]


def connect_source(info: dict[str, Any], rank: int, device: torch.device) -> Source:
    """Joins as policy rank `rank`; `info` is a `Connection` as a dict."""
    return Source(Connection(**info).exchange(device, source=rank))


def connect_target(info: dict[str, Any], worker: int, device: torch.device) -> Target:
    """Joins as worker `worker`, counted over all engines; `info` is a `Connection` as a dict."""
    return Target(Connection(**info).exchange(device, target=worker))


class WeightSync:
    """Brings the policy's weights to the engines.

    Args:
        policy: Actors with `connect_weights(info)` and `send_weights(version) -> {seconds, bytes}`.
        engines: `rollout.engine.Engine` actors.
        hf: config.json.
        parallel: The policy's layout.
        config: The run's settings.
        device: `cpu` or `cuda`.
    """

    def __init__(
        self,
        policy: ActorGroup,
        engines: ActorGroup,
        hf: dict[str, Any],
        parallel: Parallel,
        config: Config,
        *,
        device: str,
    ) -> None:
        self.policy, self.engines = policy, engines
        self.hf, self.parallel, self.config, self.device = hf, parallel, config, device

    def connect(self, timeout_s: float) -> None:
        """Brings all parties together; once, before the first sync.

        Raises:
            ActorFailed: Somebody did not come; the transport's error says who.
        """
        import ray

        from skyrl_mega.cluster.group import gather

        start = time.perf_counter()
        settings = self.config.weights
        host = ray.util.get_node_ip_address()
        self.store = host_store(host, timeout_s)  # lives as long as the group: nobody else listens at that port
        connection = Connection(
            host=host,
            port=self.store.port,
            hf=self.hf,
            parallel=asdict(self.parallel),
            spec=layer_spec(self.device),
            engines=len(self.engines),
            tensor=self.config.rollout.tensor,
            expert_parallel=bool(self.config.rollout.options.get("enable_expert_parallel")),
            dtype=self.config.model.dtype,
            bucket_bytes=int(settings.bucket_mib * 2**20),
            timeout_s=settings.timeout_s,
        )
        info = asdict(connection)
        calls = self.policy.submit_all("connect_weights", info)
        calls += self.engines.submit_all(
            "connect_weights", per_rank=[({"connection": info, "engine": e},) for e in range(len(self.engines))]
        )
        moves = connection.plan()
        itemsize = getattr(torch, self.config.model.dtype).itemsize
        self.ideal = max(moves.bytes_in(itemsize))
        gather(calls, timeout_s + MARGIN_S)
        self.plan_seconds = time.perf_counter() - start

    def sync(self, version: int) -> dict[str, float]:
        """One sync, after which the engines compute with the policy's present weights, as `version`.

        Returns:
            Metrics: `time/sync/*` in seconds and `sync/bytes_*`, the largest over ranks.

        Raises:
            ActorFailed: The first cause; the transport's error names rank, peer and tensor.
        """
        from skyrl_mega.cluster.group import gather

        limit = self.config.weights.timeout_s + MARGIN_S
        start = time.perf_counter()
        gather(self.engines.submit_all("begin_update"), limit)
        paused = time.perf_counter()
        sends = self.policy.submit_all("send_weights", version)
        receives = self.engines.submit_all("update_weights", version)
        answers = gather([*sends, *receives], limit)
        wired = time.perf_counter()
        reports = [r for workers in gather(self.engines.submit_all("end_update", version), limit) for r in workers]
        return {
            "time/sync/pause": paused - start,
            "time/sync/wire": wired - paused,
            "time/sync/load": time.perf_counter() - wired,
            "sync/bytes_out_max": max(sent["bytes"] for sent in answers[: len(sends)]),
            "sync/bytes_in_max": max(report["bytes"] for report in reports),
            "sync/bytes_in_ideal": float(self.ideal),
        }
