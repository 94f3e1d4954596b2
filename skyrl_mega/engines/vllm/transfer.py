"""The engine's end of a weight sync: each vLLM worker receives its own shard directly from policy ranks.

Registered with vLLM's `WeightTransferEngineFactory` under `plugin.BACKEND`. vLLM creates an instance per worker and
calls init first, then start, update and finish for every sync.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from skyrl_mega.cluster import numa
from skyrl_mega.engines.vllm import delivery
from skyrl_mega.engines.vllm.cache_groups import room
from skyrl_mega.engines.vllm.cpu_sampler import reduce_work
from skyrl_mega.engines.vllm.draft_weights import read_draft_weights
from skyrl_mega.engines.vllm.drafts import Suppressor
from skyrl_mega.engines.vllm.params import LoadTimeParameters, default_cache_scales
from skyrl_mega.engines.vllm.routes import RouteRecorder
from skyrl_mega.engines.vllm.sleep import CudaMemory, MemoryParts, ProcessMemory, trim
from skyrl_mega.engines.vllm.steps import StepCounter
from skyrl_mega.hf_checkpoint.index import of_files
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.parallel.box import Shard
from skyrl_mega.telemetry.memory import MemoryMeter
from skyrl_mega.weights.connection import Connection
from skyrl_mega.weights.exchange.exchange import Exchange, ExchangeReport
from skyrl_mega.weights.files.download import Download
from skyrl_mega.weights.files.source import Source


def worker_index(parallel: Any) -> int:
    """Returns the number of a worker in its engine, the workers of replica 0 first.

    Args:
        parallel: vLLM's `ParallelConfig` of the worker; `rank` counts inside the replica.
    """
    return int(parallel.data_parallel_index * parallel.tensor_parallel_size + parallel.rank)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Information for the workers of an engine to join; the same for all workers."""

    connection: dict[str, Any]
    """Fields of `connection.Connection`."""
    engine_index: int
    """Index of this engine among the participating engines."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Parameters of a sync."""

    checksums: bool
    """True to verify every part."""


class ShardTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The receiver of this worker's shard. `report` describes the last sync, in seconds and bytes.

    Raises:
        NotImplementedError: Weights of a layer cannot be synchronised (`LoadTimeParameters`); names the layer and the
            option to set.
        UserError: The model's `model_type` is not supported.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # the plan is made for one model

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.vllm_config.load_config.load_format == "dummy":
            default_cache_scales(self.model)
        self.exchange: Exchange | None = None
        self.download: Download | None = None
        """The shard's weights from a store of weight files; None before the first fetch."""
        self.report: dict[str, float] = {}
        float32 = architecture(self.hf).describe(self.hf).float32_parameters
        self.parameters = LoadTimeParameters(self.model, self.device, self.model_config.dtype, float32)
        if self.device.type == "cuda":  # the engine's process stays near all of its GPUs, a worker near its own
            numa.bind(numa.visible_devices()[self.device.index : self.device.index + 1])

    @cached_property
    def hf(self) -> dict[str, Any]:
        """The model's config.json as vLLM reads it, with the form of the files in the model's directory, if any."""
        return of_files(Path(self.model_config.model), self.model_config.hf_config.to_dict())

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the process group of the policy's ranks and all engine workers; leaves a former group first. Waits for
        the others.

        Args:
            init_info: The connection, and this engine's index in the group.

        Raises:
            RuntimeError: Updates would not fill all parameters (`own_shard`).
            UserError: The model is not supported, or cannot be split over the engine's workers.
            TransportError: A process did not join within the connection's `timeout_s`, or the group was called off;
                names the missing ranks or the cause.
        """
        self.shutdown()
        self.own_shard()
        self.download = None  # of a former run, which read files
        connection, index = Connection(**init_info.connection), worker_index(self.parallel_config)
        self.exchange = connection.join(self.device, target=init_info.engine_index * connection.workers + index)

    def own_shard(self) -> Shard:
        """Returns the boxes of all tensors that this worker holds, computed from the model's config.json and the
        worker's rank.

        Raises:
            RuntimeError: The boxes do not fill all parameters of the model (`delivery.check`).
            UserError: The model is not supported, or cannot be split over the engine's workers.
        """
        parallel = self.parallel_config
        # vLLM treats the replicas of a model without experts as engines of their own: the size is then 1.
        cut = parallel.tensor_parallel_size, parallel.enable_expert_parallel, parallel.data_parallel_size
        tensor, whole_experts, data = cut
        index = worker_index(parallel) if data > 1 else parallel.rank
        shard = architecture(self.hf).engine_shard(self.hf, tensor, index, whole_experts, data)
        delivery.check(self.parameters, shard)
        return shard

    def start_weight_update(self) -> None:
        """Begins an update: all parameters of this worker count as not written."""
        self.parameters.open()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives all parts of this worker's weights, or takes the downloaded weights, and sets `report`; a layer is
        installed when complete. To be called after `start_weight_update`; `finish_weight_update` or, after an error,
        `abandon` must follow.

        Raises:
            RuntimeError: Neither `init_transfer_engine` nor `WorkerExtension.start_fetch` was called before, or the
                download has not ended.
            TransportError: A peer left, or did not answer within the connection's `timeout_s`.
            ChecksumError: A part differs from the data sent (only with `update_info.checksums`).
            StoreError, DamagedFiles, Incomplete, UserError: The download failed.
        """
        self.report = asdict(self._receive(update_info.checksums))

    def _receive(self, checksums: bool) -> ExchangeReport:
        if self.download is not None:
            return self.download.install(self.parameters, self.parameters.mark_written)
        if self.exchange is None:
            raise RuntimeError("weights cannot be received yet; call init_weight_transfer_engine before")
        return self.exchange.run(target=self.parameters, checksums=checksums, loaded=self.parameters.mark_written)

    def finish_weight_update(self) -> None:
        """Ends an update: completes the layers that received only a part of their weights, and computes derived
        tensors. In such a layer the other weights keep their values, if the layer allows this.

        Adds its seconds to `report`. Call after `receive_weights`.

        Raises:
            RuntimeError: A layer needs all of its weights and did not receive all; names the missing parameters.
        """
        start, dropped = time.perf_counter(), self.parameters.undefined
        self.parameters.close()
        if dropped and self.device.type == "cpu":
            trim()  # frees tensors written aside
        self.report["load_s"] += time.perf_counter() - start

    def compare(self) -> dict[str, Any]:
        """Receives this worker's weights again, or takes the weights last downloaded, for comparison with the weights
        in place, which stay. Needs no `start_weight_update`. A difference raises nothing.

        Returns:
            Number of `parameters`, `bytes` received, and the names of `different` parameters, [] if all are equal.

        Raises:
            RuntimeError: Neither `init_transfer_engine` nor `WorkerExtension.start_fetch` was called before, the
                download has not ended, or the policy did not send all weights.
            StoreError, DamagedFiles, Incomplete, UserError: The download failed.
            TransportError: A peer left, or did not answer within the connection's `timeout_s`.
            ChecksumError: A part was changed on the way.
        """
        self.parameters.open(check=True)
        report = self._receive(checksums=True)
        different = self.parameters.close()
        return {"parameters": len(self.parameters), "bytes": report.received + report.local, "different": different}

    def abandon(self) -> None:
        """Leaves the group in the middle of an update. The weights are unusable until the end of another update, which
        needs `init_transfer_engine` or `WorkerExtension.start_fetch` first."""
        self.shutdown()
        self.parameters.abandon()

    def shutdown(self) -> None:
        """Leaves the process group and frees the buffers; does nothing outside of a group."""
        if self.exchange is not None:
            self.exchange.close()
        self.exchange = None


class WorkerExtension:
    """Additional methods of every vLLM worker (`worker_extension_cls`), for `collective_rpc`."""

    weight_transfer_engine: ShardTransferEngine
    rank: int
    cache_config: Any
    vllm_config: Any
    available_kv_cache_memory_bytes: float
    _weight_update_active: bool
    model_runner: Any
    synchronize_device: Callable[[], None]
    suppressor: Suppressor
    recorder: RouteRecorder | None = None
    """Recorder of routes, in the first worker of an engine recording routes."""
    meters: tuple[MemoryMeter, StepCounter] | None = None
    parts: MemoryParts | None = None
    """The worker's memory in parts; None before the first drop."""

    def transfer_report(self) -> dict[str, float]:
        """Returns seconds and bytes of this worker's last sync, by the field names of
        `weights.exchange.executor.ExchangeReport`; {} before the first."""
        return self.weight_transfer_engine.report

    def measured(self) -> tuple[dict[str, Any], dict[int, int]]:
        """Returns the fields of a `MemoryReading`, and tokens in a model step → number of such steps; both since the
        previous call. The first call starts the counting, and returns {} for the steps."""
        if self.meters is None:
            device = self.weight_transfer_engine.device.type
            self.meters = MemoryMeter(device), StepCounter(self.model_runner)
        memory, steps = self.meters
        return asdict(memory.read()), steps.take()

    def reduce_sampler_work(self) -> None:
        """Makes the sampler of a CPU do less; see `cpu_sampler.reduce_work`."""
        reduce_work(self.model_runner)

    def suppress_drafts(self) -> None:
        """Makes the worker leave out draft tokens that the scheduler would drop, and count them; to be called once."""
        self.suppressor = Suppressor(self.model_runner)

    def draft_steps(self) -> tuple[int, int]:
        """Returns the number of steps, and the number of these steps without draft tokens, since the previous call.
        Raises AttributeError before `suppress_drafts`."""
        return self.suppressor.take()

    def cache_bytes(self) -> int:
        """Returns the bytes of this worker's KV cache: as given in the settings, else as vLLM measured at start."""
        given: int | None = self.cache_config.kv_cache_memory_bytes
        return int(given or self.available_kv_cache_memory_bytes)

    def cache_room(self) -> tuple[int, int]:
        """Returns the size of this worker's cache, and the part taken by a sequence of any length besides its tokens,
        both in tokens (`cache_groups.room`); (0, 0) for a model without full attention."""
        return room(self.model_runner.kv_cache_config, self.vllm_config)

    def drop(self, parts: list[str]) -> None:
        """Frees the device memory of these parts, "engine_weights" or "kv_cache", except parts already dropped. No
        request may be computing. Raises OSError if the system refuses on a CPU, because the memory is locked."""
        self.parts = self.parts or self._parts()
        for part in parts:
            self.parts.drop(part)

    def bring_back(self, parts: list[str]) -> None:
        """Allocates the memory of these parts again: the cache is empty, and the weights are undefined until an update.
        Parts that are present stay. Raises AssertionError before the first `drop`."""
        assert self.parts is not None, "drop comes first"
        for part in parts:
            self.parts.bring_back(part)
        self.synchronize_device()  # an update writes on a stream of its own

    def _parts(self) -> MemoryParts:
        engine = self.weight_transfer_engine
        if engine.device.type == "cuda":
            from vllm.device_allocator import get_mem_allocator_instance

            memory: CudaMemory | ProcessMemory = CudaMemory(get_mem_allocator_instance())
        else:
            memory = ProcessMemory(engine.model)
        return MemoryParts(engine.model, engine.parameters, self.model_runner.kv_caches, memory)

    def check_weights(self) -> dict[str, Any]:
        """Receives this worker's weights again, or takes the weights last downloaded, for comparison with the weights
        in place, which stay. A difference raises nothing.

        Returns:
            Number of `parameters`, `bytes` received, and the names of `different` parameters, [] if all are equal.

        Raises:
            Exception: The errors of `ShardTransferEngine.compare`.
        """
        return self.weight_transfer_engine.compare()

    def start_fetch(self, source: dict[str, Any]) -> None:
        """Starts to download this worker's shard of a publication, and returns at once; `fetched` tells the end.
        Replaces an earlier download still running.

        Args:
            source: Fields of `weights.files.source.Source`.

        Raises:
            RuntimeError: The shard would not fill all parameters (`own_shard`).
            UserError: The model is not supported, or cannot be split over the engine's workers.
        """
        engine = self.weight_transfer_engine
        if engine.download is None:
            tensors, number = architecture(engine.hf).tensors(engine.hf), worker_index(engine.parallel_config)
            engine.download = Download(engine.own_shard(), tensors, number)
        engine.download.start(Source(**source))

    def fetched(self) -> bool:
        """Returns True if the download begun by `start_fetch` is complete, False while it is running.

        Raises:
            AssertionError: `start_fetch` was not called.
            StoreError, DamagedFiles, Incomplete, UserError: The download failed, as in
                `weights.files.fetch.Reader.fetch`.
        """
        assert self.weight_transfer_engine.download is not None, "start_fetch comes first"
        return self.weight_transfer_engine.download.ended

    def abandon_update(self) -> None:
        """Leaves the process group and discards an update at any stage; the weights are unusable until another
        update."""
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False  # vLLM resets it only in a worker whose own part failed

    def record_routes(self) -> None:
        """Starts recording routes in the worker of rank 0. Does nothing in others, because all workers of an engine
        route alike, and for a model without experts.

        Raises:
            WrongRoutes: The model's routers cannot be captured (`RouteRecorder`).
            UserError: The model's `model_type` is not supported.
        """
        hf = self.weight_transfer_engine.hf
        shape = RouteShape.of(architecture(hf).describe(hf))
        if self.rank == 0 and shape is not None:
            self.recorder = RouteRecorder(self.model_runner, shape)

    def routes_version(self, version: int) -> None:
        """Sets the weight version recorded with later routes; does nothing in a worker that records none."""
        if self.recorder is not None:
            self.recorder.version = version

    def forget_routes(self) -> None:
        """Drops the recorded routes of all requests; does nothing in a worker that records none. No request may be
        under way."""
        if self.recorder is not None:
            self.recorder.forget()

    def take_routes(self, names: list[str]) -> list[list[bytes] | None]:
        """Returns the recorded routes of the requests with these names (`Request.id`), in this order, and forgets the
        requests. Each entry is the result of `routes.TokenRoutes.packed`, or None for an unknown request. [] from a
        worker other than rank 0.

        Raises:
            AssertionError: In rank 0, `record_routes` was not called, or the model is without experts.
        """
        assert self.recorder is not None or self.rank, "record_routes comes first"
        taken = [self.recorder.take(name) for name in names] if self.recorder is not None else []
        return [None if read is None else read.packed() for read in taken]

    def check_parameters(self) -> None:
        """Raises an error unless updates fill all parameters of this worker's model.

        Raises:
            RuntimeError: A parameter would not be filled (`delivery.check`).
            UserError: The model is not supported, or cannot be split over the engine's workers.
        """
        self.weight_transfer_engine.own_shard()

    def load_files(self, path: str) -> None:
        """Loads this worker's shard from the Hugging Face directory `path`, in the same way as a sync, a layer at a
        time. Needs no process group. After an error the weights are partly replaced.

        Raises:
            UserError: A tensor is missing or misshapen, or a file cannot be read or is damaged.
            RuntimeError: The files would not fill all parameters (`own_shard`); no weights are replaced.
            OSError: A file cannot be opened or read.
        """
        from skyrl_mega.hf_checkpoint import load

        engine = self.weight_transfer_engine
        shard = engine.own_shard()
        engine.start_weight_update()
        load.load(Path(path), shard, engine.parameters, written=engine.parameters.mark_written)
        engine.parameters.close()


read_draft_weights()  # here, because vLLM imports this module in every worker just before the worker loads the model
