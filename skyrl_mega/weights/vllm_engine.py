"""The engine's end of a weight sync: each vLLM worker receives its own shard, straight from the policy ranks that
hold it.

Registered with vLLM's `WeightTransferEngineFactory` under `vllm_plugin.BACKEND`; vLLM makes one per worker and calls
it in the order init, then start, update, finish for every sync.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from skyrl_mega.layout.box import Shard
from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.sync import Target, connect_target
from skyrl_mega.weights.vllm_params import LoadTimeParameters


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What one engine's workers need to join; the same for all of them."""

    connection: dict[str, Any]
    """See `sync.Connection`."""
    engine: int
    """Which engine this is."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One sync."""

    version: int


class ShardTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives this worker's shard. `report` tells of the last sync, in seconds and bytes."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # the plan is made for one model

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.target: Target | None = None
        self.tensors: dict[str, torch.Tensor] | None = None
        self.report: dict[str, float] = {}
        self.parameters = LoadTimeParameters(self.model, self.device, self.model_config.dtype)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the group of policy ranks and workers, and makes the transfer plan."""
        worker = init_info.engine * self.parallel_config.tensor_parallel_size + self.parallel_config.rank
        self.target = connect_target(init_info.connection, worker, self.device)

    def start_weight_update(self) -> None:
        """Opens the parameters for writing."""
        start = time.perf_counter()
        self.tensors = self.parameters.open()
        self.report = {"open": time.perf_counter() - start}

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives every box of this worker's shard."""
        if self.target is None or self.tensors is None:
            raise RuntimeError("weights are received after init_weight_transfer_engine and start_weight_update only")
        start = time.perf_counter()
        received = self.target.receive(self.tensors)
        self.report |= {"wire": time.perf_counter() - start, "bytes": float(received)}

    def finish_weight_update(self) -> None:
        """Lets the layers process what was written."""
        start = time.perf_counter()
        self.parameters.close()
        self.tensors = None
        self.report["load"] = time.perf_counter() - start

    def shutdown(self) -> None:
        """Leaves the group."""
        self.target = None


class WorkerExtension:
    """Methods that every vLLM worker has beside its own (`worker_extension_cls`), for `collective_rpc`."""

    weight_transfer_engine: ShardTransferEngine
    rank: int

    def transfer_report(self) -> dict[str, float]:
        """Seconds and bytes of the last sync."""
        return self.weight_transfer_engine.report

    def own_shard(self) -> Shard:
        """This worker's shard, from the model's config.json."""
        config = self.weight_transfer_engine.model_config.hf_config.to_dict()
        parallel = self.weight_transfer_engine.parallel_config
        return architecture(config).engine_shard(
            config, parallel.tensor_parallel_size, parallel.rank, parallel.enable_expert_parallel
        )

    def load_files(self, path: str) -> None:
        """Loads this worker's shard from a Hugging Face directory, by the same way as a sync."""
        from skyrl_mega.weights import files

        engine = self.weight_transfer_engine
        engine.start_weight_update()
        assert engine.tensors is not None
        files.load(Path(path), self.own_shard(), engine.tensors)
        engine.finish_weight_update()
