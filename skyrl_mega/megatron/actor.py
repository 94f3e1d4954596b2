"""The Ray actor around one rank of a Megatron model, with the rank's part of a weight sync."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import record_function

from skyrl_mega.algorithms.losses import Figures
from skyrl_mega.batch.samples import Samples, read_samples
from skyrl_mega.config import allocator
from skyrl_mega.config.precision import check_gpu
from skyrl_mega.config.schema import AlgorithmConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import cpu, objectives
from skyrl_mega.megatron.role import POLICY, ModelRole
from skyrl_mega.megatron.without_wandb import without_wandb
from skyrl_mega.models.megatron import layer_spec, require_transformer_engine
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.telemetry.memory import MemoryMeter, MemoryReading
from skyrl_mega.trajectories.sequences import Sequences

if TYPE_CHECKING:
    from skyrl_mega.megatron.profile import RankProfiler
    from skyrl_mega.telemetry.trace import Span
    from skyrl_mega.weights.exchange.exchange import Exchange, ExchangeReport
    from skyrl_mega.weights.files.publish import Publisher, PublishReport


class MegatronActor:
    """One rank of a Megatron model in a process of its own. Ray runs the methods one at a time, in one thread.

    Args:
        rank: Number of the rank in the model.
        parallel: The model's grid of ranks.
        hf: The model's config.json.
        policy: Settings of layers, optimizer and micro-batches.
        algorithm: Settings of the loss (`set_algorithm`).
        dtype: Name of the parameters' type in torch, such as `bfloat16`.
        device: `cpu` or `cuda`.
        role: Role of the model, which decides head and training.
        value_clip: Largest change of a critic's values in the loss; None for no limit.
        deterministic: True to allow only deterministic operations of torch in this process.
    """

    def __init__(
        self,
        rank: int,
        parallel: ParallelDims,
        hf: dict[str, Any],
        policy: PolicyConfig,
        algorithm: AlgorithmConfig,
        *,
        dtype: str,
        device: str,
        role: ModelRole = POLICY,
        value_clip: float | None = None,
        deterministic: bool = False,
    ) -> None:
        self.index, self.parallel = rank, parallel
        self.hf, self.config, self.algorithm = hf, policy, algorithm
        self.dtype = getattr(torch, dtype)
        self.role, self.value_clip = role, value_clip
        self.exchange: Exchange | None = None
        self.publisher: Publisher | None = None
        self.minis: list[list[Sequences]] = []
        self.memory = MemoryMeter(device)
        self.profiler: RankProfiler | None = None
        if deterministic:
            torch.use_deterministic_algorithms(True)
        if device == "cpu":
            torch.set_num_threads(policy.threads)
            with without_wandb():
                cpu.stand_in()
            self.device = torch.device("cpu")
        else:
            # Set here, not by `spawn`, so that settings of the node survive. torch reads the variables at the first
            # allocation.
            os.environ.update(allocator.variables(os.environ))
            if layer_spec(policy.spec, device) == "te":
                require_transformer_engine()
                check_gpu(policy.precision, torch.cuda.get_device_capability(0))
            self.device = torch.device("cuda", 0)
            torch.cuda.set_device(self.device)

    def open_store(self, host: str, timeout_s: float) -> int:
        """Opens the rendezvous store of the model's process group, on a port picked by the system, and returns the
        port.

        Call on rank 0 only, before `join`. Does not wait for other ranks.

        Args:
            host: Address of this node, to be reached by all ranks.
            timeout_s: Time limit in seconds of operations on the store.
        """
        self.store = dist.TCPStore(
            host, 0, self.parallel.ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        return self.store.port

    def join(self, host: str, port: int, timeout_s: float) -> None:
        """Joins the model's process group and builds the model, without weights.

        Args:
            host, port: Address of the store opened by rank 0 (`open_store`).
            timeout_s: Seconds for joining, and the time limit of collectives.

        Raises:
            RuntimeError: Not all ranks joined within `timeout_s`.
            UserError: The settings or config.json are not supported, or a package is missing (`model.build_model`).
        """
        with without_wandb():
            from skyrl_mega.megatron import model
            from skyrl_mega.megatron.worker import ModelWorker

        if self.index:
            self.store = dist.TCPStore(
                host, port, self.parallel.ranks, is_master=False, timeout=timedelta(seconds=timeout_s)
            )
        model.join(self.index, self.parallel, self.store, self.device, timeout_s)
        self.rank = ModelWorker(
            self.hf,
            self.config,
            self.parallel,
            dtype=self.dtype,
            device=self.device,
            trainable=self.role.trainable,
            head=self.role.head,
        )

    def load(self, path: str) -> None:
        """Loads the model's weights, and the optimizer's master weights, from a Hugging Face directory; Adam's moments
        and the schedule stay. A collective of all ranks.

        Raises:
            UserError: A tensor is missing or has another shape, or a file is truncated.
            Damaged: A file is corrupted.
        """
        self.rank.load(Path(path))

    def keep_reference(self, path: str) -> None:
        """Keeps the weights of a Hugging Face directory in host memory as reference, in place of an earlier reference.
        The policy's weights stay unchanged. A collective of all ranks.

        Raises:
            UserError: A tensor is missing or has another shape, or a file is truncated; an earlier reference stays.
            Damaged: The content of a file is corrupted; an earlier reference stays.
        """
        self.rank.keep_reference(Path(path))

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replaces optimizer and learning-rate schedule by new objects with these settings and zero moments (after the
        supervised warm-up). No weight changes; an offloaded optimizer stays offloaded. A collective of all ranks.

        Raises:
            UserError: megatron-core refuses `options` of the settings.
        """
        self.rank.reset_optimizer(optimizer)

    def set_algorithm(self, algorithm: AlgorithmConfig) -> None:
        """Sets the settings that later calls of `train` and `measure` pass to the loss."""
        self.algorithm = algorithm

    @record_function("hold")
    def hold(self, minis: list[list[Samples | Sequences]]) -> None:
        """Stores this rank's micro-batches of each mini-batch of an RL step, in place of the previous step's.

        The tokens of samples are read from the object store.

        Args:
            minis: For each mini-batch its micro-batches: `Samples` in the object store, or `Sequences` already read.

        Raises:
            RayError: A trajectory in the object store is lost; the previous micro-batches stay.
        """
        micros = iter(read_samples(list(chain(*minis))))
        self.minis = [[next(micros) for _ in mini] for mini in minis]

    def add(self, minis: list[list[np.ndarray]], name: str, per_sample: bool = False) -> None:
        """Adds a column `name` to the stored micro-batches, or replaces it.

        Args:
            minis: For each micro-batch of each mini-batch an array with a value per token, [T].
            name: Name of the column.
            per_sample: True if the arrays hold a value per sequence, to be repeated for all tokens.

        Raises:
            ValueError: The number of arrays, or of values, differs from the stored micro-batches.
        """
        for micro, values in zip(chain(*self.minis), chain(*minis), strict=True):
            column = torch.tensor(values)
            micro[name] = micro.per_token(column) if per_sample else column

    @record_function("keep_logprobs")
    def keep_logprobs(
        self, name: str, temperature: float, reference: bool, entropy: str | None = None, squares: str | None = None
    ) -> None:
        """Adds log-probs of the stored micro-batches in nats as columns, float32 [T], 0 for tokens that do not count;
        on ranks of the last pipeline stage only. All ranks must call this.

        Args:
            name: Name of the column.
            temperature: Divides the logits.
            reference: True to use the weights of `keep_reference`, which must have been called.
            entropy: Name of a further column for the entropy of each token's distribution, in nats; None adds none.
            squares: Name of a further column for the sum of the squared probabilities; None adds none.

        Raises:
            NotOnDevice: The parameters are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
        """
        micros = list(chain(*self.minis))
        with_squares = squares is not None
        results = self.rank.logprobs(micros, temperature=temperature, reference=reference, squares=with_squares)
        names = (name, entropy, squares)[: 2 + with_squares]
        for micro, values in zip(micros, results or (), strict=results is not None):
            for column, column_values in zip(names, values, strict=True):
                if column is not None:
                    micro[column] = column_values

    def logprobs(self, temperature: float) -> list[np.ndarray] | None:
        """Returns log-probs in nats of the stored micro-batches of all mini-batches in order, float32 [T] each, 0 for
        tokens that do not count; None on all pipeline stages but the last. Adds no column. All ranks must call this.

        Args:
            temperature: Divides the logits.

        Raises:
            NotOnDevice: The parameters are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
        """
        results = self.rank.logprobs(list(chain(*self.minis)), temperature=temperature)
        return None if results is None else [values.numpy() for values, *_ in results]

    def column(self, name: str) -> list[np.ndarray] | None:
        """Returns a column of the stored micro-batches of all mini-batches in order, [T] each; None if a micro-batch on
        this rank lacks the column, as on all pipeline stages but the last. [] without stored micro-batches."""
        micros = list(chain(*self.minis))
        return [micro[name].numpy() for micro in micros] if all(name in micro for micro in micros) else None

    @record_function("keep_values")
    def keep_values(self, name: str) -> None:
        """Adds a critic's values of the states before the tokens as a column of the stored micro-batches, on ranks of
        the last pipeline stage. All ranks must call this.

        Args:
            name: Name of the column.

        Raises:
            NotOnDevice: The parameters are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
        """
        micros = list(chain(*self.minis))
        results = self.rank.values(micros)
        for micro, values in zip(micros, results or (), strict=results is not None):
            micro[name] = values

    @record_function("train")
    def train(
        self, mini: int, temperature: float, loss: str, figures: Figures | None = None, forward_only: int = 0
    ) -> dict[str, float]:
        """Takes one optimizer step on a mini-batch stored by `hold`.

        All ranks must call `train`. A gradient of exactly 0 raises no error: no weight moves, and `grad_norm` is 0.

        Args:
            mini: Index of the mini-batch in the argument of `hold`.
            temperature: Divides the logits; unused by a critic.
            loss: `algorithm.loss`, "supervised", or `objectives.VALUE` for a critic.
            figures: Figures of the run for the loss; None takes the defaults.
            forward_only: Number of micro-batches at the end of the mini-batch with a gradient of exactly 0, equal on
                all ranks. For these only a forward pass runs, and their metrics count.

        Returns:
            Name → metric: `grad_norm` before clipping and `lr`; on the last pipeline stage also the loss's metrics.

        Raises:
            FloatingPointError: The gradient or the loss is NaN or infinite.
            NotOnDevice: Parameters, gradients or optimizer state are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
            UserError: The loss cannot be found or imported.
            KeyError, ValueError: A column that the loss needs is missing.
        """
        objective = self._objective(loss, figures)
        return self.rank.train(self.minis[mini], objective, temperature=temperature, forward_only=forward_only)

    @record_function("measure")
    def measure(self, mini: int, temperature: float, loss: str, figures: Figures | None = None) -> dict[str, float]:
        """Returns name → metric of `train` without an optimizer step: the loss's metrics without `grad_norm`, `lr` and
        `expert_balance`; {} on all pipeline stages but the last. Changes no weight. A loss of NaN raises no error. All
        ranks must call `measure`.

        Args:
            mini, temperature, loss, figures: As for `train`.

        Raises:
            NotOnDevice: The parameters are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
            UserError: The loss cannot be found or imported.
            KeyError, ValueError: A column that the loss needs is missing.
        """
        return self.rank.measure(self.minis[mini], self._objective(loss, figures), temperature=temperature)

    def _objective(self, loss: str, figures: Figures | None) -> Any:
        """Returns an `Objective`, or a `ValueObjective` for a critic."""
        if loss == objectives.VALUE:
            return objectives.value_objective(self.value_clip)
        return objectives.objective(loss, self.algorithm, figures)

    def offload(self, parts: Sequence[str]) -> int:
        """Moves parts of the rank's state off the device, and returns the bytes copied to host memory. Parts already
        off the device stay; gradients are dropped, not copied. A reference has parameters only. A collective if
        "parameters" leave the device.

        Args:
            parts: "parameters", "gradients", "optimizer"; "critic" means all three of a critic.

        Raises:
            KeyError: A part has another name.
        """
        return self.rank.offload(parts)

    def onload(self, parts: Sequence[str]) -> int:
        """Moves parts of the rank's state back to the device, and returns the bytes copied. Parts on the device stay;
        gradients return as zeros.

        Args:
            parts: "parameters", "gradients", "optimizer"; "critic" means all three of a critic.

        Raises:
            KeyError: A part has another name.
        """
        return self.rank.onload(parts)

    def empty_cache(self) -> None:
        """Returns unused GPU memory cached by torch to the device. No tensor is freed; without CUDA nothing happens."""
        torch.cuda.empty_cache()

    def save(self, folder: str) -> None:
        """Writes this rank's part of a checkpoint (weights, optimizer, schedule) into an existing, empty folder, the
        same on all ranks; rank 0 completes the checkpoint. A collective of all ranks.

        Raises:
            RuntimeError: A rank could not write; names the rank and the reason. The folder is then incomplete.
        """
        self.rank.save(Path(folder))

    def restore(self, folder: str) -> None:
        """Reads this rank's part of a checkpoint, saved in any layout, into model, optimizer and schedule. Offloaded
        parts are offloaded again. A collective of all ranks.

        Raises:
            UserError: The checkpoint belongs to another model or has another format; raised on every rank.
            Damaged: The checkpoint is incomplete or corrupted; raised on every rank.
            RuntimeError: A rank could not read; names the rank and the reason.
        """
        self.rank.restore(Path(folder))

    def export(self, path: str, source: str) -> None:
        """Writes the weights as a Hugging Face directory `path`, with configuration and tokenizer from the directory
        `source`; replaces an earlier export. A collective of all ranks.

        Raises:
            UserError: `path` contains anything not written by an export, or `source` cannot be read.
            RuntimeError: A rank could not write; names the rank and the reason.
            TransportError: A rank left, or the exchange of a file's tensors took too long.
        """
        self.rank.export(Path(path), Path(source))

    # ---- figures ---------------------------------------------------------------------------------------------------

    def measured(self) -> MemoryReading:
        """Returns this rank's memory use since the previous call of this method. The first call counts from the actor's
        start."""
        return self.memory.read()

    def start_profile(self) -> None:
        """Starts recording a profile of this rank. `stop_profile` comes before the next recording."""
        from skyrl_mega.megatron.profile import RankProfiler

        self.profiler = RankProfiler(self.index, self.device.type == "cuda")

    def stop_profile(self, file: str, step: Span) -> dict[str, float]:
        """Ends the recording of `start_profile` and writes the profile into `file`.

        Args:
            file: The file to write; an existing file is replaced, missing folders are created.
            step: The recorded step; times in the profile count from its start.

        Returns:
            On a GPU the numbers of CUDA calls that started kernels (`launches`) and that waited for the GPU
            (`host_syncs`); {} without CUDA calls.

        Raises:
            AssertionError: `start_profile` was not called before.
            ValueError: torch wrote another format than torch 2.13's.
            OSError: The file cannot be written.
        """
        assert self.profiler is not None, "start_profile comes first"
        profiler, self.profiler = self.profiler, None
        return profiler.stop(Path(file), step)

    # ---- weight sync -----------------------------------------------------------------------------------------------

    def connect_weights(self, info: dict[str, Any]) -> None:
        """Joins the weight-sync group of policy ranks and engine workers, after leaving the previous group, if any.
        Returns after all processes joined.

        Args:
            info: The fields of `weights.connection.Connection`.

        Raises:
            TransportError: A process did not join within `Connection.timeout_s`, or the group was called off; names the
                missing ranks or the cause.
            UserError: The model cannot be split into a layout.
            AssertionError: The role is not synced, as a critic's.
        """
        from skyrl_mega.weights.connection import Connection

        assert self.role.synced, f"no engine has the weights of a {self.role.name}"
        self.disconnect_weights()
        self.exchange = Connection(**info).join(self.device, source=self.index)

    def disconnect_weights(self) -> None:
        """Leaves the weight-sync group, if joined, else does nothing. Does not wait for the other processes, so works
        after one of them died."""
        if self.exchange is not None:
            self.exchange.close()
        self.exchange = None

    @record_function("send_weights")
    def send_weights(self, checksums: bool) -> ExchangeReport:
        """Sends this rank's part of the weights to the engines, and returns a report on the transfer.

        A collective of all processes of the weight-sync group.

        Args:
            checksums: True to verify every part after arrival; the same value in all processes.

        Raises:
            AssertionError: `connect_weights` was not called before.
            TransportError: A process left or did not answer in time; join again before the next sync.
            ChecksumError: A part was changed on the way; join again before the next sync.
            NotOnDevice: The parameters are offloaded.
        """
        assert self.exchange is not None
        return self.exchange.run(source=self.rank.weights(), checksums=checksums)

    @record_function("publish_weights")
    def publish_weights(self, publication: dict[str, Any], name: str, base: str) -> PublishReport:
        """Writes this rank's part of the weights, which must be on the device, to a store of weight files, and returns
        a report. A collective of all ranks.

        Args:
            publication: The fields of `weights.files.publish.Publication`.
            name: Name of the publication.
            base: Name of the publication that readers have; "" for a full image.

        Raises:
            StoreError: The store failed, after several attempts.
            UserError: fsspec lacks a package for the store, or the model cannot be split into a layout.
            NotOnDevice: The parameters are offloaded.
            AssertionError: The role is not synced, as a critic's.
        """
        from skyrl_mega.weights.files.publish import Publication, Publisher
        from skyrl_mega.weights.fp8.scales import largest_of_all

        assert self.role.synced, f"no engine has the weights of a {self.role.name}"
        shared = Publication(**publication)
        if self.publisher is None or self.publisher.publication != shared:
            self.publisher = Publisher(shared, self.index, self.device, largest_of_all)
        return self.publisher.publish(self.rank.weights(), name, base)
