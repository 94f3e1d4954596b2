"""One rank of a policy or critic without Ray: Megatron's model, optimizer and schedules.

Every method is a collective: all ranks of the model call the method with the same arguments, except for the
micro-batches, which belong to the rank's data-parallel group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from skyrl_mega.common.limits import OPTIMIZER_PIECE
from skyrl_mega.config.derived import logit_chunk, overlaps, shares_prefixes
from skyrl_mega.config.precision import row_multiple
from skyrl_mega.config.residency import POLICY
from skyrl_mega.config.schema import OptimizerConfig, PolicyConfig
from skyrl_mega.hf_checkpoint import load as files
from skyrl_mega.megatron import activation_offload, checkpoint, fp8_parameters
from skyrl_mega.megatron.emulated_fp8 import EmulatedFp8
from skyrl_mega.megatron.expert_balance import ExpertBalance
from skyrl_mega.megatron.fp8_parameters import MasterWeights
from skyrl_mega.megatron.heads import logprobs_of, values_of
from skyrl_mega.megatron.model import build_model, finish_gather, wrap_ddp
from skyrl_mega.megatron.objectives import Objective, ValueObjective, inputs_of, value_inputs
from skyrl_mega.megatron.optimizer import NoGradient, NotFinite, build_optimizer, build_schedule
from skyrl_mega.megatron.packing import MicroBatch, pack
from skyrl_mega.megatron.precision import drop_fp8_copies
from skyrl_mega.megatron.reference import Reference
from skyrl_mega.megatron.residency import Resident, expand_critic, gradients, optimizer_state
from skyrl_mega.megatron.router_replay import RouterReplay
from skyrl_mega.megatron.streamed_optimizer import StreamedOptimizer
from skyrl_mega.megatron.sums import scalars, summed
from skyrl_mega.models.blocks.value_head import VALUE
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.models.registry import HeadKind, architecture
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences

Finish = Callable[[Any, MicroBatch, int, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""A function (model chunk, micro-batch, number of tokens, hidden states) → a loss, and tensors to keep."""


class ModelWorker:
    """A rank after `model.join`: holds and trains a shard of the model, and computes log-probs or values.

    Args:
        hf: The model's config.json.
        policy: Settings of layers, optimizer and micro-batches.
        parallel: The grid of ranks.
        dtype: Type of the parameters.
        device: Device of this rank.
        trainable: False for a model without gradients and optimizer.
        head: "vocab" for log-probs, "value" for values.
    """

    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    from_zero: bool
    """`policy.optimizer.warmup_from_zero`."""

    def __init__(
        self,
        hf: dict[str, Any],
        policy: PolicyConfig,
        parallel: ParallelDims,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trainable: bool = True,
        head: HeadKind = "vocab",
    ) -> None:
        self.hf, self.policy, self.parallel, self.head = hf, policy, parallel, head
        self.architecture = architecture(hf, head)
        self.dtype, self.device = dtype, device
        self.spec = layer_spec(policy.spec, device.type)
        chunks = build_model(hf, policy, parallel, dtype, device, head=head)
        self.vocab = self.architecture.describe(hf).vocab
        self.params: dict[str, Tensor] = {
            f"{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()
        }
        self.shard: Shard = self.architecture.megatron_shard(hf, parallel, dist.get_rank(), self.spec)
        fp8_parameters.merge_storages(self.params.values())
        self._reference: Reference | None = None
        self.fp8: EmulatedFp8 | None = None
        if policy.precision.recipe != "model" and not chunks[0].config.fp8:
            layout = self.architecture.megatron_layout(hf, parallel, self.spec)
            self.fp8 = EmulatedFp8(chunks, policy.precision, self.params, layout, dist.get_rank())
        self.resident = Resident(
            self.name,
            device,
            {
                "parameters": lambda: fp8_parameters.storage_tensors(self.params.values()),
                "gradients": lambda: gradients(self.chunks if trainable else ()),
                "optimizer": lambda: (
                    optimizer_state(self.optimizer) if trainable and not self.resident.streamed else ()
                ),
            },
        )
        self.balance: ExpertBalance | None = None
        self.replay: RouterReplay | None = None
        if not trainable:
            self.chunks: list[Any] = list(chunks)
            return
        activation_offload.offload([chunk.decoder.layers for chunk in chunks], policy.offload_layers, device)
        if policy.moe.aux_loss and chunks[0].config.num_moe_experts:
            self.balance = ExpertBalance(chunks, policy.moe.aux_loss)
        shape = RouteShape.of(self.architecture.describe(hf))
        if policy.moe.replay != "off" and shape is not None:
            self.replay = RouterReplay(chunks, shape, parallel.tensor)
        if policy.moe.freeze_router:
            for name, p in self.params.items():
                if name.endswith(("mlp.router.weight", "mlp.router.bias")):
                    p.requires_grad_(False)
        self.chunks = list(wrap_ddp(chunks, overlaps(policy, device.type), policy.ddp_options))
        self.reset_optimizer(policy.optimizer)

    @property
    def name(self) -> str:
        """Name of the model in errors: `critic` with a value head, else `policy`."""
        return "critic" if self.head == "value" else "policy"

    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Creates a new optimizer and schedule, with zero moments, in place of the previous. Master weights come from
        the model; masters of FP8 parameters, which are rounded, come from the previous optimizer. An offloaded
        optimizer stays offloaded.

        Raises:
            UserError: megatron-core refuses `options` of the settings.
        """
        offloaded = self.resident.offloaded & {"optimizer"}
        fp8_masters = (
            MasterWeights(self.optimizer, self.params, self.resident.readable).copies()
            if hasattr(self, "optimizer")
            else {}
        )
        self.resident.forget("optimizer")
        if self.resident.streamed:
            self.resident.streamed.close()
            self.resident.streamed = None
        if hasattr(self, "optimizer"):
            del self.optimizer, self.schedule  # memory does not fit two
        with self.resident.onloaded("parameters"):
            self.optimizer = build_optimizer(config, self.chunks, self.dtype, f"{self.name}.optimizer")
            MasterWeights(self.optimizer, self.params).restore(fp8_masters)
            if config.streamed:
                self.resident.streamed = StreamedOptimizer(self.optimizer, self.device, OPTIMIZER_PIECE)
        self.schedule = build_schedule(config, self.optimizer)
        self.from_zero = config.warmup_from_zero
        if offloaded:
            self.resident.offload(offloaded)

    def load(self, path: Path) -> None:
        """Fills this rank's weights, and the optimizer's master weights, from a Hugging Face directory. A collective of
        all ranks.

        A critic's value head stays unchanged if the directory lacks a value head, as a policy's directory does. Moments
        and schedule stay unchanged; offloaded parts are onloaded for the call, and offloaded again.

        Raises:
            UserError: A tensor is missing or has another shape, or a file is truncated.
            Damaged: A file is corrupted.
        """
        with torch.no_grad(), self.resident.onloaded("parameters", "optimizer"):
            self._gather_policy_weights()
            fp8_parameters.load(
                path,
                self.shard,
                self.params,
                optional={VALUE: self.architecture.tensors(self.hf)[VALUE]} if self.head == "value" else None,
                optimizer=getattr(self, "optimizer", None),
                chunks=self.chunks,
            )

    def weights(self) -> dict[str, Tensor]:
        """Returns local name → parameter of this rank for the weight sync, without copying (FP8 parameters as in
        `fp8_parameters.sync_tensors`).

        A collective after an optimizer step, as a gather may be pending.

        Raises:
            NotOnDevice: The parameters are offloaded.
        """
        self._gather_policy_weights()
        return fp8_parameters.sync_tensors(self.params)

    def keep_reference(self, path: Path) -> None:
        """Keeps the weights of a Hugging Face directory in host memory as reference, for `logprobs(reference=True)`, in
        place of an earlier reference. The model's own weights stay unchanged, and on or off the device as before. A
        collective of all ranks.

        Raises:
            UserError: A tensor is missing or has another shape, or a file is truncated; an earlier reference stays.
            Damaged: The content of a file is corrupted; an earlier reference stays.
        """
        with self.resident.onloaded("parameters"):
            self._gather_policy_weights()
            reference = Reference(fp8_parameters.storage_tensors(self.params.values(), fp8_parameters.FORWARD))
            with torch.no_grad(), reference.swapped():
                fp8_parameters.load(path, self.shard, self.params)
            self._reference = reference

    def offload(self, parts: Sequence[str]) -> int:
        """Moves parts to host memory and frees torch's cached device memory. Gradients are dropped, not copied.

        Parts already off the device stay. A collective if "parameters" leave the device.

        Args:
            parts: "parameters", "gradients", "optimizer"; "critic" means all three of a critic.

        Returns:
            The bytes copied to host memory.

        Raises:
            KeyError: A part has another name.
        """
        parts = expand_critic(parts)
        leaving = {*parts} - self.resident.offloaded
        if "parameters" in leaving:
            self._gather_policy_weights()
        if "gradients" in leaving:
            self.optimizer.zero_grad()  # the optimizer's shards view or copy the gradients
        return self.resident.offload(parts)  # including half-loaded parts

    def onload(self, parts: Sequence[str]) -> int:
        """Moves parts back to the device: gradients as zeros, other parts bit by bit. Parts on the device stay.

        Args:
            parts: "parameters", "gradients", "optimizer"; "critic" means all three of a critic.

        Returns:
            The bytes copied to the device.

        Raises:
            KeyError: A part has another name.
        """
        return self.resident.onload(expand_critic(parts))

    def _restore_policy_weights(self) -> None:
        """Restores the policy's weights after an interrupted swap. Call before reading or writing weights.

        Raises:
            NotOnDevice: The weights are not on the device.
        """
        self.resident.require("parameters")
        if self._reference is not None:
            self._reference.restore_policy()

    def _gather_policy_weights(self) -> None:
        """Restores the policy's weights and finishes a pending gather. A collective after an optimizer step."""
        self._restore_policy_weights()
        finish_gather(self.chunks)

    def _begin_evaluation(self) -> None:
        """Restores the policy's weights as `_restore_policy_weights`, and puts the model into evaluation mode."""
        self._restore_policy_weights()
        for chunk in self.chunks:
            chunk.eval()

    def _active_weights(self, reference: bool) -> AbstractContextManager[None]:
        """Returns a context for computing with the reference's weights, or with the policy's."""
        if not reference:
            return nullcontext()
        assert self._reference is not None, "keep_reference comes first"
        finish_gather(self.chunks)  # a pending gather would overwrite the reference with the policy's weights
        return self._reference.swapped()

    # ---- forward and backward --------------------------------------------------------------------------------------

    def logprobs(
        self, micros: Sequence[Sequences], *, temperature: float = 1.0, reference: bool = False, squares: bool = False
    ) -> list[tuple[Tensor, ...]] | None:
        """Returns log-prob and entropy of every token given the previous tokens, float32 [T] each in host memory; with
        `squares` also Σ_v p(v)² of each distribution. A collective of all ranks.

        First tokens and tokens that do not count (with weight 0, or outside the column `mask`) get 0. The last pipeline
        stage returns a tuple per micro-batch, other stages None. With `policy.moe.replay: policy` the routes of this
        rank's routers are added to the micro-batches for later passes; a reference routes by itself.

        Args:
            micros: This rank's micro-batches, at least one.
            temperature: Divides the logits.
            reference: True to compute with the weights of `keep_reference`, which must have been called.
            squares: True to compute Σ_v p(v)² too.

        Raises:
            NotOnDevice: The parameters are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
        """
        self._begin_evaluation()

        def read(model: Any, hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
            return self._logprobs(model, hidden, micro, temperature, squares=squares)

        recording = self.policy.moe.replay == "policy"
        mode = self.replay.mode(off=reference, recording=recording) if self.replay else nullcontext()
        with self._active_weights(reference), mode:
            return self._per_token(micros, read)

    def values(self, micros: Sequence[Sequences]) -> list[Tensor] | None:
        """Returns a critic's value of the state before every token, float32 [T] each in host memory; 0 for the tokens
        with 0 in `logprobs`. The last pipeline stage returns a tensor per micro-batch, other stages None. A collective
        of all ranks.

        Args:
            micros: This rank's micro-batches, at least one.

        Raises:
            NotOnDevice: The parameters are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
        """
        self._begin_evaluation()
        results = self._per_token(micros, lambda *arguments: (values_of(*arguments),))
        return None if results is None else [values for (values,) in results]

    def _per_token(
        self, micros: Sequence[Sequences], read: Callable[[Any, Tensor, MicroBatch], tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]] | None:
        """Returns the results of `read` ([L] each), for each micro-batch as float32 [T] in host memory; None before the
        last stage."""

        def report(model: Any, micro: MicroBatch, tokens: int, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            results = torch.stack(read(model, hidden, micro))
            placed = torch.zeros(len(results), tokens, device=self.device)
            predicted = micro.source >= 0
            placed[:, micro.source[predicted]] = results[:, predicted]
            return placed.new_zeros(()), {"placed": placed}

        with torch.no_grad():
            outputs = self._run(micros, report, forward_only=True)
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            return None
        if self.parallel.context > 1:
            for out in outputs:
                dist.all_reduce(out["placed"], group=mpu.get_context_parallel_group())
        return [tuple(out["placed"].cpu()) for out in outputs]

    def train(
        self,
        micros: Sequence[Sequences],
        objective: Objective | ValueObjective,
        *,
        temperature: float = 1.0,
        forward_only: int = 0,
    ) -> dict[str, float]:
        """Takes one optimizer step on the micro-batches' summed objective, and one step of the learning-rate schedule.
        A collective of all ranks.

        The objective's weights are final: they contain the divisor of the whole mini-batch's mean. So nothing is
        rescaled here, and the result does not depend on the cut of the mini-batch. With a gradient of exactly 0 neither
        weights nor schedule move, and `grad_norm` is 0.

        Args:
            micros: This rank's micro-batches, at least one.
            objective: The loss of a micro-batch.
            temperature: Divides the logits; unused by a critic.
            forward_only: Number of micro-batches at the end with a gradient of exactly 0, equal on all ranks; only a
                forward pass is run for these, for the metrics.

        Returns:
            `grad_norm` before clipping and `lr`; on the last pipeline stage also the objective's metrics, summed over
            micro-batches and ranks (`sums.summed`), and with a load-balancing loss `expert_balance`.

        Raises:
            FloatingPointError: The gradient or the loss is NaN or infinite; the message has the loss sums.
            NotOnDevice: Parameters, gradients or optimizer state are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
        """
        self.resident.require(*POLICY)
        self._restore_policy_weights()
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.balance:
            with torch.no_grad(), self.balance.counting_choices(self.chunks[0].config.num_moe_experts, self.device):
                self._run(micros, _no_loss, forward_only=True)
        metrics = self._objective_sums(micros, self._compute(objective, temperature), forward_only)
        if self.balance:
            balance = self.balance.value()
            metrics |= {"expert_balance": balance} if metrics else {}
        if not self.from_zero:
            self.schedule.step(1)
        lr = float(max(group["lr"] for group in self.optimizer.param_groups))
        try:
            updated, grad_norm, _ = self.optimizer.step()
        except NoGradient:
            if not self.from_zero:
                self.schedule.step(-1)  # as for a mini-batch that is only measured
            return {**metrics, "grad_norm": 0.0, "lr": lr}
        except NotFinite as error:
            raise self._not_finite(error, metrics) from error
        if not updated:
            raise self._not_finite("a gradient is not finite", metrics)
        if self.from_zero:
            self.schedule.step(1)
        return {**metrics, "grad_norm": float(grad_norm), "lr": lr}

    def measure(
        self, micros: Sequence[Sequences], objective: Objective | ValueObjective, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """Returns the metrics of `train` that need no backward pass (all but `grad_norm`, `lr` and `expert_balance`),
        from a forward pass in evaluation mode; {} on all pipeline stages but the last. Changes no weight. A loss of NaN
        is not an error. A collective of all ranks.

        Args:
            micros, objective, temperature: As for `train`.

        Raises:
            NotOnDevice: The parameters are offloaded.
            WrongRoutes: A token was sent to other experts than the replay requires.
        """
        self._begin_evaluation()
        with torch.no_grad():
            return self._objective_sums(micros, self._compute(objective, temperature), len(micros))

    def _require_finite(self, metrics: dict[str, float]) -> None:
        """Raises FloatingPointError if the loss of any rank is NaN or infinite. A collective of all ranks.

        Without a backward pass no gradient shows it.
        """
        wrong = torch.tensor(int(not math.isfinite(metrics.get("loss", 0.0))), device=self.device)
        dist.all_reduce(wrong)
        if wrong:
            raise self._not_finite("the loss is not finite", metrics)

    def _not_finite(self, problem: object, metrics: dict[str, float]) -> FloatingPointError:
        """Returns the error for a loss or gradient of NaN or infinity."""
        return FloatingPointError(
            f"{self.name}: {problem}; loss sums of this step: {scalars(metrics)}; this optimizer step moved no "
            f"weight: resume from the newest checkpoint with a lower {self.name}.optimizer.lr, or correct the loss"
        )

    def _objective_sums(self, micros: Sequence[Sequences], compute: Finish, forward_only: int) -> dict[str, float]:
        """Returns the summed metrics of an objective. The last `forward_only` micro-batches take no backward pass."""
        trained = len(micros) - forward_only
        outputs: list[dict[str, Tensor]] = []
        replayed: Counter[str] = Counter()
        for part, with_backward in ((micros[:trained], True), (micros[trained:], False)):
            if not part:
                continue
            with nullcontext() if with_backward else torch.no_grad():
                outputs += self._run(part, compute, forward_only=not with_backward, whole=micros)
            if self.replay:
                replayed.update(self.replay.metrics())
        metrics = summed(outputs)
        if 0 < forward_only < len(micros):
            self._require_finite(metrics)
        return {**metrics, **replayed} if metrics else {}

    def _compute(self, objective: Any, temperature: float) -> Finish:
        """Returns a function for a micro-batch's objective: an `Objective`, or a `ValueObjective` for a critic."""
        group = mpu.get_context_parallel_group() if self.parallel.context > 1 else None

        def finish(model: Any, micro: MicroBatch, _: int, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            if self.head == "value":
                loss, metrics = objective(value_inputs(values_of(model, hidden, micro), micro))
            else:
                logprobs, entropy = self._logprobs(model, hidden, micro, temperature)
                loss, metrics = objective(inputs_of(logprobs, entropy, micro, group))
            return loss, {"loss": loss.detach(), **metrics}

        return finish

    def _run(
        self,
        micros: Sequence[Sequences],
        finish: Finish,
        *,
        forward_only: bool,
        whole: Sequence[Sequences] | None = None,
    ) -> list[dict[str, Tensor]]:
        """Runs Megatron's schedule for this layout. `whole`: all micro-batches, if these are a part of them."""
        if self.replay:
            self.replay.begin(whole or micros, self.device)
        if self.fp8:
            finish_gather(self.chunks)
            self.fp8.begin()
        packed = [self._pack(m) for m in micros]
        sizes = [len(m.tokens) for m in micros]

        def loss(
            model: Any, micro: MicroBatch, tokens: int, hidden: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            value, reported = finish(model, micro, tokens, hidden)
            return value, torch.zeros((), dtype=torch.int, device=self.device), reported

        def step(data: Iterator[tuple[MicroBatch, int]], model: Any) -> tuple[Tensor, Any]:
            micro, tokens = next(data)
            padding = self._padding(micro, model) if self.balance else None
            hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.row, padding_mask=padding)
            return hidden, partial(loss, model, micro, tokens)

        feeds = [iter(list(zip(packed, sizes, strict=True))) for _ in self.chunks]
        outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(packed),
            seq_length=max(m.tokens.shape[1] for m in packed) * self.parallel.context,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if self.fp8:
            self.fp8.end()
        drop_fp8_copies(self.chunks)
        if self.replay:
            self.replay.end(micros, packed)
        return outputs

    def _pack(self, micro: Sequences) -> MicroBatch:
        """Returns a micro-batch packed for this rank."""
        packed = pack(
            micro,
            context=self.parallel.context,
            context_rank=mpu.get_context_parallel_rank(),
            tensor=self.parallel.tensor,
            rows=row_multiple(self.policy.precision, self.spec),
            share=shares_prefixes(self.policy, self.parallel.context),
        )
        if self.replay:
            self.replay.prepare(micro, packed)
        return packed.to(self.device)

    def _padding(self, micro: MicroBatch, model: Any) -> Tensor:
        """Returns a mask of padding among the tokens seen by this rank's routers, bool."""
        if self.parallel.tensor == 1 or unwrap_model(model).pre_process:
            return micro.padding  # the embedding splits it for sequence parallelism
        return micro.padding.chunk(self.parallel.tensor, dim=1)[mpu.get_tensor_model_parallel_rank()]

    def _logprobs(
        self, model: Any, hidden: Tensor, micro: MicroBatch, temperature: float, *, squares: bool = False
    ) -> tuple[Tensor, ...]:
        """Returns log-probs and entropy of a micro-batch's tokens, [L] each; see `logprobs_of`."""
        chunk, vocab = logit_chunk(self.policy, self.device.type), self.vocab
        return logprobs_of(model, hidden, micro, vocab=vocab, temperature=temperature, chunk=chunk, squares=squares)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes this rank's part of a checkpoint: weights, optimizer, schedule. Reads offloaded state from host
        memory. Only for a trainable model. Returns after rank 0 has completed the checkpoint. A collective of all
        ranks.

        Args:
            folder: An empty directory, the same on all ranks.

        Raises:
            RuntimeError: A rank could not write; names the rank and the reason.
        """
        if "parameters" not in self.resident.offloaded:
            self._gather_policy_weights()
        checkpoint.save(folder, self._trained())
        self.resident.release_pages()

    def restore(self, folder: Path) -> None:
        """Reads this rank's part of a checkpoint, saved in any layout: weights, optimizer, schedule. Offloaded parts
        are onloaded for the call, and offloaded again. Only for a trainable model. A collective of all ranks.

        Raises:
            UserError: The checkpoint belongs to another model or has another format; raised on every rank.
            Damaged: The checkpoint is incomplete or corrupted; raised on every rank.
            RuntimeError: A rank could not read; names the rank and the reason.
        """
        with self.resident.onloaded("parameters", "optimizer"):
            self._gather_policy_weights()
            checkpoint.load(folder, self._trained())
        self.resident.release_pages()

    def _trained(self) -> checkpoint.RankState:
        return checkpoint.RankState(
            self.architecture.describe(self.hf),
            self.parallel,
            dist.get_rank(),
            self.shard,
            self.params,
            chunks=self.chunks,
            optimizer=self.optimizer,
            schedule=self.schedule,
            readable=self.resident.readable,
        )

    def export(self, path: Path, source: Path) -> None:
        """Writes the weights as a Hugging Face directory `path`, with configuration and tokenizer from `source`;
        replaces an earlier export. Offloaded parameters are onloaded for the call, and offloaded again. A collective of
        all ranks.

        Raises:
            UserError: `path` contains anything not written by an export, or `source` cannot be read.
            RuntimeError: A rank could not write; names the rank and the reason.
            TransportError: A rank left, or the exchange of a file's tensors took too long.
        """
        layout = self.architecture.megatron_layout(self.hf, self.parallel, self.spec)
        with self.resident.onloaded("parameters"):
            self._gather_policy_weights()
            files.save(path, source, layout, fp8_parameters.dequantised_values(self.params))


def _no_loss(model: Any, micro: MicroBatch, tokens: int, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Finishes a forward pass without a loss, run only for side effects of the layers."""
    return hidden.new_zeros(()), {}
