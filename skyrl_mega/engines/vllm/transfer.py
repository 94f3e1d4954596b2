"""The engine's end of a weight sync: each vLLM worker receives its own shard, straight from the policy ranks that
hold it.

Registered with vLLM's `WeightTransferEngineFactory` under `plugin.BACKEND`; vLLM makes one per worker and calls
it in the order init, then start, update, finish for every sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from skyrl_mega.cluster import numa
from skyrl_mega.engines.vllm.params import LoadTimeParameters, default_cache_scales
from skyrl_mega.engines.vllm.routes import RouteRecorder
from skyrl_mega.engines.vllm.seeds import draw_ahead
from skyrl_mega.engines.vllm.sleep import CudaMemory, HostMemory, Parts, trim
from skyrl_mega.engines.vllm.steps import StepCounter
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.parallel.box import Shard
from skyrl_mega.telemetry.memory import MemoryMeter
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.exchange.exchange import Exchange


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What one engine's workers need to join; the same for all of them."""

    connection: dict[str, Any]
    """Fields of `connection.Connection`."""
    place: int
    """Which of the engines that take part this is."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One sync."""

    checksums: bool
    """Whether every part is proved."""


class ShardTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives this worker's shard. `report` tells of the last sync, in seconds and bytes."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # the plan is made for one model

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.vllm_config.load_config.load_format == "dummy":
            default_cache_scales(self.model)
        self.exchange: Exchange | None = None
        self.report: dict[str, float] = {}
        self.parameters = LoadTimeParameters(self.model, self.device, self.model_config.dtype)
        if self.device.type == "cuda":  # the engine's process stays near to all of its GPUs, a worker to its own
            numa.bind(numa.visible()[self.device.index : self.device.index + 1])

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the policy's ranks and the other workers."""
        self.shutdown()
        connection, parallel = Connection(**init_info.connection), self.parallel_config
        within = parallel.data_parallel_index * parallel.tensor_parallel_size + parallel.rank
        self.exchange = connection.join(self.device, target=init_info.place * connection.workers + within)

    def start_weight_update(self) -> None:
        """Opens the parameters for writing."""
        self.parameters.open()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives every box of this worker's shard; a layer goes to work with its weights when it has all of them."""
        self.report = asdict(self._receive(update_info.checksums))

    def _receive(self, checksums: bool) -> Any:
        if self.exchange is None:
            raise RuntimeError("weights are received after init_weight_transfer_engine only")
        return self.exchange.run(target=self.parameters, checksums=checksums, loaded=self.parameters.written)

    def finish_weight_update(self) -> None:
        """Sees that every layer works with what was written."""
        start, dropped = time.perf_counter(), self.parameters.undefined
        self.parameters.close()
        if dropped and self.device.type == "cpu":
            trim()  # of what was written aside
        self.report["load_s"] += time.perf_counter() - start

    def compare(self) -> dict[str, Any]:
        """Receives this worker's shard once more, and compares it with the weights in place."""
        self.parameters.open(check=True)
        report = self._receive(checksums=True)
        different = self.parameters.close()
        return {"parameters": len(self.parameters), "bytes": report.received + report.local, "different": different}

    def abandon(self) -> None:
        """Leaves in the middle of an update. The weights are of no use until another update has ended."""
        self.shutdown()
        self.parameters.abandon()

    def shutdown(self) -> None:
        """Leaves the group."""
        if self.exchange is not None:
            self.exchange.close()
        self.exchange = None


class WorkerExtension:
    """Methods that every vLLM worker has beside its own (`worker_extension_cls`), for `collective_rpc`."""

    weight_transfer_engine: ShardTransferEngine
    rank: int
    cache_config: Any
    available_kv_cache_memory_bytes: float
    _weight_update_active: bool
    model_runner: Any
    synchronize_device: Callable[[], None]
    recorder: RouteRecorder | None = None
    """Of routes, in the first worker of an engine that records them."""
    meters: tuple[MemoryMeter, StepCounter] | None = None
    parts: Parts | None = None
    """Of its memory, once one has been dropped."""

    def transfer_report(self) -> dict[str, float]:
        """Seconds and bytes of the last sync, by the names of `executor.Report`."""
        return self.weight_transfer_engine.report

    def measured(self) -> tuple[dict[str, Any], dict[int, int]]:
        """Fields of a `Reading` of its memory, and its steps by their tokens, since the last time."""
        if self.meters is None:
            device = self.weight_transfer_engine.device.type
            self.meters = MemoryMeter(device), StepCounter(self.model_runner)
        memory, steps = self.meters
        return asdict(memory.read()), steps.take()

    def draw_seeds_ahead(self) -> None:
        """See `seeds.draw_ahead`."""
        draw_ahead(self.model_runner)

    def cache_bytes(self) -> int:
        """Bytes of this worker's KV cache: what it was given, or else what it measured."""
        given: int | None = self.cache_config.kv_cache_memory_bytes
        return int(given or self.available_kv_cache_memory_bytes)

    def drop(self, parts: list[str]) -> None:
        """Gives back the memory of these parts (`config.residency`); nothing may be under way."""
        self.parts = self.parts or self._parts()
        for part in parts:
            self.parts.drop(part)

    def bring_back(self, parts: list[str]) -> None:
        """Takes their memory again; see `sleep.Parts.bring_back`."""
        assert self.parts is not None, "drop comes first"
        for part in parts:
            self.parts.bring_back(part)
        self.synchronize_device()  # an update writes on a stream of its own

    def _parts(self) -> Parts:
        engine = self.weight_transfer_engine
        if engine.device.type == "cuda":
            from vllm.device_allocator import get_mem_allocator_instance

            memory: CudaMemory | HostMemory = CudaMemory(get_mem_allocator_instance())
        else:
            memory = HostMemory(engine.model)
        return Parts(engine.model, engine.parameters, self.model_runner.kv_caches, memory)

    def check_weights(self) -> dict[str, Any]:
        """See `ShardTransferEngine.compare`."""
        return self.weight_transfer_engine.compare()

    def abandon_update(self) -> None:
        """Takes back the start of an update, wherever it has come to."""
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False  # vLLM clears it itself only in a worker whose own part failed

    def record_routes(self) -> None:
        """Records routes from now on; all workers route alike, and the first one answers for them."""
        config = self.weight_transfer_engine.model_config.hf_config.to_dict()
        shape = RouteShape.of(architecture(config).describe(config))
        if self.rank == 0 and shape is not None:
            self.recorder = RouteRecorder(self.model_runner, shape)

    def routes_version(self, version: int) -> None:
        """The weights are of this version from now on."""
        if self.recorder is not None:
            self.recorder.version = version

    def forget_routes(self) -> None:
        """Drops the routes of requests whose completions nobody took."""
        if self.recorder is not None:
            self.recorder.forget()

    def take_routes(self, names: list[str]) -> list[list[bytes] | None]:
        """What each of these requests was routed to (`routes.Read.packed`); None where nothing is known."""
        assert self.recorder is not None or self.rank, "record_routes comes first"
        found = [self.recorder.take(name) for name in names] if self.recorder is not None else []
        return [None if read is None else read.packed() for read in found]

    def own_shard(self) -> Shard:
        """This worker's shard, from the model's config.json."""
        config = self.weight_transfer_engine.model_config.hf_config.to_dict()
        parallel = self.weight_transfer_engine.parallel_config
        return architecture(config).engine_shard(
            config, parallel.tensor_parallel_size, parallel.rank, parallel.enable_expert_parallel
        )

    def load_files(self, path: str) -> None:
        """Loads this worker's shard from a Hugging Face directory, by the same way as a sync."""
        from skyrl_mega.hf_checkpoint import load

        engine = self.weight_transfer_engine
        engine.start_weight_update()
        load.load(Path(path), self.own_shard(), engine.parameters)
        engine.parameters.close()
