"""One rank of the policy: Megatron's model, optimizer and schedules, without Ray.

Every method is a collective: all ranks of the policy call it with the same arguments, except for the micro-batches,
which are those of the rank's data-parallel group.
"""

from __future__ import annotations

import math
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
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from skyrl_mega.config.derived import overlaps
from skyrl_mega.config.schema import OptimizerConfig, PolicyConfig
from skyrl_mega.hf_checkpoint import load as files
from skyrl_mega.megatron import checkpoint
from skyrl_mega.megatron.model import build_model, gathered, head_weight, wrap_ddp
from skyrl_mega.megatron.objectives import Objective, inputs_of
from skyrl_mega.megatron.optimizer import build_optimizer, build_schedule
from skyrl_mega.megatron.packing import MicroBatch, pack
from skyrl_mega.megatron.reference import Reference
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.megatron.vocab_parallel import vocab_parallel_logprobs
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims


class ModelWorker:
    """A rank after `model.join`: holds its shard of the model, trains it and gives log-probs."""

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
    ) -> None:
        self.hf, self.policy, self.parallel = hf, policy, parallel
        self.dtype, self.device = dtype, device
        self.spec = layer_spec(policy.spec, device.type)
        chunks = build_model(hf, policy, parallel, dtype, device)
        self.vocab = int(hf["vocab_size"])
        self.params: dict[str, Tensor] = {
            f"{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()
        }
        self.shard: Shard = architecture(hf).megatron_shard(hf, parallel, dist.get_rank(), self.spec)
        self._reference: Reference | None = None
        if not trainable:
            self.chunks: list[Any] = list(chunks)
            return
        if policy.moe.freeze_router:
            for name, p in self.params.items():
                if name.endswith("mlp.router.weight"):
                    p.requires_grad_(False)
        self.chunks = list(wrap_ddp(chunks, overlaps(policy, device.type), policy.ddp_options))
        self.reset_optimizer(policy.optimizer)

    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """A new optimizer and schedule; moments start at zero and master weights are taken from the model."""
        if hasattr(self, "optimizer"):
            del self.optimizer, self.schedule  # there is no room for two
        self.optimizer = build_optimizer(config, self.chunks, self.dtype)
        self.schedule = build_schedule(config, self.optimizer)
        self.from_zero = config.warmup_from_zero

    def load(self, path: Path) -> None:
        """Reads this rank's boxes from a Hugging Face directory. Raises UserError for missing or misshapen tensors."""
        with torch.no_grad():
            files.load(path, self.shard, self.weights())
        if hasattr(self, "optimizer"):
            self.optimizer.reload_model_params()

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters by local name, without gradients. A collective after an optimizer step."""
        self._own()
        gathered(self.chunks)
        return self._parameters()

    def keep_reference(self, path: Path) -> None:
        """Keeps other weights in host memory, for `logprobs(reference=True)`."""
        self._own()
        gathered(self.chunks)
        reference = Reference(self.params.values())
        with torch.no_grad(), reference.swapped():
            files.load(path, self.shard, self._parameters())
        self._reference = reference

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.data for name, p in self.params.items()}

    def _own(self) -> None:
        """Whatever reads or changes the policy's weights begins with this: an exchange with the reference that was
        broken off, and could not be undone then, is undone now."""
        if self._reference is not None:
            self._reference.put_back()

    def _weights(self, reference: bool) -> AbstractContextManager[None]:
        """The model computes with the reference's weights inside."""
        if not reference:
            return nullcontext()
        assert self._reference is not None, "keep_reference comes first"
        gathered(self.chunks)  # a gather under way would write the policy's weights over the reference
        return self._reference.swapped()

    # ---- forward and backward --------------------------------------------------------------------------------------

    def logprobs(
        self, micros: Sequence[Sequences], *, temperature: float = 1.0, reference: bool = False
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Log-prob and entropy of every token given those before it, float32 [T] each in host memory.

        A first token has 0, and so have those that do not count: with weight 0, or outside the column `mask`.
        One pair per micro-batch on the last pipeline stage; None on the others.
        """
        self._own()
        for chunk in self.chunks:
            chunk.eval()

        def report(
            logprobs: Tensor, entropy: Tensor, micro: MicroBatch, tokens: int
        ) -> tuple[Tensor, dict[str, Tensor]]:
            both = torch.zeros(2, tokens, device=self.device)
            known = micro.source >= 0
            both[:, micro.source[known]] = torch.stack([logprobs, entropy])[:, known]
            return logprobs.new_zeros(()), {"both": both}

        with torch.no_grad(), self._weights(reference):
            outputs = self._run(micros, report, temperature, forward_only=True)
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            return None
        pairs = []
        for out in outputs:
            both = out["both"]
            if self.parallel.context > 1:
                dist.all_reduce(both, group=mpu.get_context_parallel_group())
            pairs.append((both[0].cpu(), both[1].cpu()))
        return pairs

    def train(self, micros: Sequence[Sequences], objective: Objective, *, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step on the micro-batches' summed objective.

        The objective's weights are final (`1 / tokens of the whole mini-batch` and the like), so nothing is rescaled
        here and the result does not depend on how the mini-batch was cut. Returns the metrics summed over all ranks,
        `grad_norm` before clipping, and `lr`.
        """
        self._own()
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        group = mpu.get_context_parallel_group() if self.parallel.context > 1 else None

        def compute(logprobs: Tensor, entropy: Tensor, micro: MicroBatch, _: int) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = objective(inputs_of(logprobs, entropy, micro, group))
            return loss, {"loss": loss.detach(), **metrics}

        outputs = self._run(micros, compute, temperature, forward_only=False)
        metrics = self._reduce(outputs)
        if not self.from_zero:
            self.schedule.step(1)
        lr = float(max(group["lr"] for group in self.optimizer.param_groups))
        updated, grad_norm, _ = self.optimizer.step()
        if not updated or not math.isfinite(grad_norm):
            raise FloatingPointError(f"policy: gradient norm is {grad_norm}; loss sums of this step: {metrics}")
        if self.from_zero:
            self.schedule.step(1)
        return {**metrics, "grad_norm": float(grad_norm), "lr": lr}

    def _run(
        self, micros: Sequence[Sequences], finish: Callable[..., Any], temperature: float, *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """Runs Megatron's schedule for this layout; `finish` turns log-probs into a loss and what is kept of it."""
        packed = [
            pack(
                m,
                context=self.parallel.context,
                context_rank=mpu.get_context_parallel_rank(),
                tensor=self.parallel.tensor,
            ).to(self.device)
            for m in micros
        ]
        sizes = [len(m.tokens) for m in micros]

        def loss(
            model: Any, micro: MicroBatch, tokens: int, hidden: Tensor
        ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs, entropy = self._head(model, hidden, micro, temperature)
            value, kept = finish(logprobs, entropy, micro, tokens)
            return value, torch.zeros((), dtype=torch.int, device=self.device), kept

        def step(data: Iterator[tuple[MicroBatch, int]], model: Any) -> tuple[Tensor, Any]:
            micro, tokens = next(data)
            hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.row)
            return hidden, partial(loss, model, micro, tokens)

        feeds = [iter(list(zip(packed, sizes, strict=True))) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(packed),
            seq_length=max(m.tokens.shape[1] for m in packed) * self.parallel.context,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _head(self, model: Any, hidden: Tensor, micro: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Hidden states [L/tp, 1, H] → log-probs and entropy [L], 0 for tokens that nobody asks for.

        Prompts and observations are most of an agent's tokens, and the head is most of a small model's work.
        """
        weight = head_weight(model)
        if self.parallel.tensor > 1:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        wanted = micro.source >= 0
        for name in ("mask", "weights"):
            if name in micro.columns:
                wanted = wanted & (micro.columns[name] != 0)
        at = wanted.nonzero()[:, 0]
        values = vocab_parallel_logprobs(
            hidden[at, 0].to(weight.dtype),
            weight,
            micro.targets[at],
            vocab=self.vocab,
            temperature=temperature,
            chunk=self.policy.logit_chunk,
            group=mpu.get_tensor_model_parallel_group(),
        )
        logprobs, entropy = (v.new_zeros(len(micro.targets)).index_copy(0, at, v) for v in values)
        return logprobs, entropy

    def _reduce(self, outputs: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums (or maxima) over micro-batches and over data and context ranks; empty on all but the last stage."""
        if not outputs:
            return {}
        names = sorted(outputs[0])
        table = torch.stack([torch.stack([o[n].float() for n in names]) for o in outputs])
        peaks = torch.tensor([n.endswith("_max") for n in names], device=table.device)
        sums, tops = table.sum(0), table.amax(0)
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(tops, dist.ReduceOp.MAX, group=group)
        return dict(zip(names, tops.where(peaks, sums).tolist(), strict=True))

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Writes this rank's part of weights, optimizer and schedule; all ranks together write a checkpoint."""
        self._own()
        gathered(self.chunks)
        checkpoint.save(folder, self._trained())

    def restore(self, folder: Path) -> None:
        """Reads this rank's part of a checkpoint, saved in this layout or another."""
        self._own()
        gathered(self.chunks)
        checkpoint.load(folder, self._trained())

    def _trained(self) -> checkpoint.Trained:
        decoder = architecture(self.hf).describe(self.hf)
        rank, optimizer = dist.get_rank(), self.optimizer
        return checkpoint.Trained(
            decoder,
            self.parallel,
            rank,
            self.shard,
            self.params,
            chunks=self.chunks,
            optimizer=optimizer,
            schedule=self.schedule,
        )

    def export(self, path: Path, source: Path) -> None:
        """Writes the weights as a Hugging Face directory, with configuration and tokenizer from `source`."""
        layout = architecture(self.hf).megatron_layout(self.hf, self.parallel, self.spec)
        files.save(path, source, layout, self.weights())
