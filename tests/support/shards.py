"""Policy ranks without Megatron, with a checkpoint's shards to synchronize to engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.engines.base import Request
from skyrl_mega.hf_checkpoint import load as files
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.exchange.exchange import ExchangeReport
from skyrl_mega.weights.files.publish import Publication, Publisher, PublishReport

REQUESTS = [Request(str(i), [5, 20 + i, 40 + 3 * i, 60, 7], 24, seed=i) for i in range(3)]
"""Requests to engines after a sync."""


class ShardHolder:
    """A policy rank without Megatron: the shards of a checkpoint, and the methods used by a sync."""

    def __init__(self, rank: int, parallel: ParallelDims, hf: dict[str, Any]) -> None:
        self.rank = rank
        self.shard = architecture(hf).megatron_shard(hf, parallel, rank, "local")
        self.publisher: Publisher | None = None
        self.params = {name: torch.full(shape, torch.nan) for name, shape in self.shard.params.items()}

    def load(self, path: Path) -> None:
        files.load(path, self.shard, self.params)

    def change(self, part: str) -> None:
        """Adds 0.5 to the last element of every parameter with `part` in its name."""
        for name, tensor in self.params.items():
            if part in name:
                tensor.view(-1)[-1] += 0.5

    def connect_weights(self, info: dict[str, Any]) -> None:
        self.exchange = Connection(**info).join(torch.device("cpu"), source=self.rank)

    def disconnect_weights(self) -> None:
        del self.exchange

    def publish_weights(self, publication: dict[str, Any], name: str, base: str) -> PublishReport:
        shared = Publication(**publication)
        if self.publisher is None or self.publisher.publication != shared:
            self.publisher = Publisher(shared, self.rank, torch.device("cpu"))
        return self.publisher.publish(self.params, name, base)

    def send_weights(self, checksums: bool) -> ExchangeReport:
        return self.exchange.run(source=self.params, checksums=checksums)


def cut(config: Config, parallel: ParallelDims) -> Config:
    """Returns the settings with the policy in this layout, on a CPU."""
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    layout = LayoutConfig(**{name: getattr(parallel, name) for name in names})
    policy = replace(config.policy, ranks=parallel.ranks, layout=layout)
    return replace(config, policy=policy, cluster=replace(config.cluster, device="cpu"))


def holders(parallel: ParallelDims, hf: dict[str, Any], logs: Path) -> ActorGroup:
    """Starts policy ranks without Megatron."""
    arguments = [{"rank": rank, "parallel": parallel, "hf": hf} for rank in range(parallel.ranks)]
    return ActorGroup.spawn("policy", ShardHolder, arguments, timeout=180, env={"OMP_NUM_THREADS": "1"}, logs=logs)
