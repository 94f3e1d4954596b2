"""Routed experts instead of a dense feed-forward part (arXiv:2101.03961), with softmax routing, no shared experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.blocks.base import (
    Block,
    Cut,
    EngineCut,
    MegatronPlace,
    MegatronSettings,
    Messages,
    Tensors,
    TokenFlops,
    Work,
    share,
)
from skyrl_mega.models.blocks.gated_mlp import NORM, check_keys, gated_args, gated_pieces, gated_tensors
from skyrl_mega.models.config_json import Hf, flag, integer
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims

COUNT = ("num_experts", "num_local_experts")
"""Keys for the number of experts: transformers 4 writes the first, transformers 5 the second."""
ROUTER = ".mlp.gate.weight"
"""Suffix of a router's Hugging Face name."""
MEGATRON_ROUTER = "mlp.router.weight"
"""Suffix of a router's Megatron name."""
MEGATRON_EXPERTS = ".mlp.experts."
"""Part of every expert's Megatron name."""


@dataclass(frozen=True)
class Experts(Block):
    """Gated MLPs of equal width; every token uses a few of them."""

    hidden: int
    count: int
    per_token: int
    width: int
    """Intermediate size of an expert."""
    renormalize: bool
    """True if the chosen experts' probabilities are divided by their sum."""

    @classmethod
    def read(cls, hf: Hf) -> Experts:
        """Reads config.json."""
        check_keys(hf)
        count = integer(hf, next((key for key in COUNT if key in hf), COUNT[0]))
        per_token = integer(hf, "num_experts_per_tok")
        if per_token > count:
            raise UserError(
                f"num_experts_per_tok {per_token} is above the {count} experts; lower it", key="config.json"
            )
        return cls(
            hidden=integer(hf, "hidden_size"),
            count=count,
            per_token=per_token,
            width=integer(hf, "moe_intermediate_size"),
            renormalize=flag(hf, "norm_topk_prob"),
        )

    def facts(self) -> Mapping[str, int]:
        return {"experts": self.count, "experts_per_token": self.per_token}

    def hf_tensors(self, source: str) -> Tensors:
        shapes: Tensors = {f"{source}.{NORM}": (self.hidden,), source + ROUTER: (self.count, self.hidden)}
        for expert in range(self.count):
            shapes |= gated_tensors(f"{source}.mlp.experts.{expert}", self.width, self.hidden)
        return shapes

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        transformer = {
            "num_moe_experts": self.count,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.width,
            # A softmax over all experts, renormalised over the chosen ones, is the softmax of the chosen logits.
            "moe_router_pre_softmax": not self.renormalize,
            "moe_layer_freq": [int(has_experts) for has_experts in layers],
        }
        return MegatronSettings(transformer | gated_args())

    def megatron_cuts(self) -> Sequence[Cut]:
        return (
            Cut("expert", "experts", self.count, "experts"),
            Cut("expert_tensor", "columns of an expert (moe_intermediate_size)", self.width, "columns"),
        )

    def megatron_widths(self) -> Sequence[Cut]:
        return (Cut("expert_tensor", "columns of an expert (moe_intermediate_size)", self.width),)

    def check_megatron(self, parallel: ParallelDims, key: str) -> None:
        if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
            # Without expert parallelism megatron-core 0.16 gives experts the data-parallel groups of the dense layers
            # (`allreduce` in tensor_parallel/layers.py). With fewer tensor ranks than those, it never sums gradients
            # of replicated experts; with more, it sums those of different columns and gathers them over one another.
            side = "below" if parallel.expert_tensor < parallel.tensor else "above"
            raise UserError(
                f"{parallel.expert_tensor} {side} tensor {parallel.tensor} with expert 1 trains "
                "wrong in megatron-core 0.16"
                f"; give expert_tensor {parallel.tensor} or expert above 1",
                key=f"{key}.expert_tensor",
            )
        if self.per_token == 1 and self.renormalize:
            raise UserError(
                "num_experts_per_tok 1 with norm_topk_prob gives the router no gradient; choose another model",
                key="config.json",
            )

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        b.whole(f"{target}.pre_mlp_layernorm.weight", f"{source}.{NORM}")
        b.whole(f"{target}.{MEGATRON_ROUTER}", f"{source}{ROUTER}")
        parallel, coords = place.parallel, place.coords
        count, width = self.count // parallel.expert, self.width // parallel.expert_tensor
        prefix = f"{target}.mlp.experts"
        if place.spec == "te":
            names = [(f"{prefix}.linear_fc1.weight{i}", f"{prefix}.linear_fc2.weight{i}") for i in range(count)]
            for fc1, _ in names:  # a grouped layer holds all experts' weights, before the next grouped layer
                b.param(fc1, 2 * width, self.hidden)
        else:
            prefixes = (f"{prefix}.local_experts.{i}" for i in range(count))
            names = [(f"{p}.linear_fc1.weight", f"{p}.linear_fc2.weight") for p in prefixes]
        for local, (fc1, fc2) in enumerate(names):
            b.param(fc1, 2 * width, self.hidden)
            b.param(fc2, self.hidden, width)
            expert = f"{source}.mlp.experts.{coords.ep * count + local}"
            gated_pieces(b, (fc1, fc2), expert, coords.etp * width, width)

    def check_engine(self, cut: EngineCut, key: str) -> None:
        if cut.workers > self.count:
            raise UserError(f"{cut.workers} workers are above the model's {self.count} experts; lower it", key=key)
        if not cut.expert_parallel and self.width % cut.workers:
            raise UserError(
                f"{cut.workers} workers do not divide the model's {self.width} columns of an "
                "expert (moe_intermediate_size)"
                f"; choose a divisor of {self.width}",
                key=key,
            )

    def engine_columns(self, cut: EngineCut) -> Mapping[str, int]:
        return {"columns of an expert": self.width // (1 if cut.expert_parallel else cut.workers)}

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Declares w13 [experts, gate rows then up rows, hidden] and w2 [experts, hidden, columns]."""
        b.whole(f"{source}.{NORM}", f"{source}.{NORM}")
        b.whole(source + ROUTER, source + ROUTER)
        held, columns = self._worker_part(cut, worker)
        width, prefix = len(columns), f"{source}.mlp.experts.routed_experts"
        w13 = b.param(f"{prefix}.w13_weight", len(held), 2 * width, self.hidden)
        w2 = b.param(f"{prefix}.w2_weight", len(held), self.hidden, width)
        for local, expert in enumerate(held):
            gated_pieces(b, (w13, w2), f"{source}.mlp.experts.{expert}", columns.start, width, stack=(local,))

    def engine_row(self, cut: EngineCut, worker: int) -> Mapping[str, str]:
        if cut.expert_parallel:
            held, _ = self._worker_part(cut, worker)
            return {"experts": f"{held.start}-{held.stop - 1}", "columns": share(self.width, 1, 0)}
        return {"experts": share(self.count, 1, 0), "columns": share(self.width, cut.workers, worker)}

    def _worker_part(self, cut: EngineCut, worker: int) -> tuple[range, range]:
        """Returns the experts and columns of a worker: whole experts in contiguous runs, or columns of each expert."""
        if not cut.expert_parallel:
            width = self.width // cut.workers
            return range(self.count), range(worker * width, (worker + 1) * width)
        base, remainder = divmod(self.count, cut.workers)
        first = worker * base + min(worker, remainder)
        return range(first, first + base + (worker < remainder)), range(self.width)

    def flops(self) -> TokenFlops:
        return TokenFlops(2 * (3 * self.hidden * self.width * self.per_token + self.hidden * self.count))

    def saved_bytes(self, work: Work) -> float:
        s, b = work.tokens / work.parallel.tensor, work.itemsize
        norm = 2 * s * self.hidden * b  # input and output
        # Each expert's input; gate and up; the product times the router's probability. Unfused also silu, a second copy
        # of up, and the product before the probability.
        kept = 2 + self._activation_widths(work)
        experts = self._routed(work) * (b * (self.hidden + kept * self.width / work.parallel.expert_tensor) + 4)
        # Logits, probabilities and masks over all experts, in float32 and bool.
        return norm + experts + s * self.count * 24

    def kept_bytes(self, work: Work, recompute: str) -> float:
        """Returns the bytes kept: with "moe" the norm's input and output; with "selective" not the norm's output, and
        only the inputs of the activation."""
        norm = work.tokens / work.parallel.tensor * self.hidden * work.itemsize
        if recompute == "moe":
            return 2 * norm
        if recompute == "selective":
            dropped = (
                self._activation_widths(work)
                * self._routed(work)
                * self.width
                / work.parallel.expert_tensor
                * work.itemsize
            )
            return self.saved_bytes(work) - norm - dropped
        return self.saved_bytes(work)

    def gradient_bytes(self, work: Work) -> float:
        width = self.width / work.parallel.expert_tensor
        weights = self.count / work.parallel.expert * 3 * self.hidden * width
        # Gradients of gate, up and the product; unfused also of the product in float32.
        kept = 3 if "swiglu" in work.fused else 5
        return work.itemsize * (self._routed(work) * (2 * self.hidden + kept * width) + weights)

    @staticmethod
    def _activation_widths(work: Work) -> int:
        """Returns the number of expert widths kept by the activation function, besides gate and up."""
        return 1 if "swiglu" in work.fused else 4

    def _routed(self, work: Work) -> float:
        """Returns the copies of tokens processed by the busiest rank's experts."""
        even = work.tokens / work.parallel.tensor * self.per_token * work.parallel.expert_tensor
        return even * (work.imbalance if work.parallel.expert > 1 else 1.0)

    def messages(self, parallel: ParallelDims) -> Messages:
        return Messages(experts=self.per_token * self.hidden)

    def engine_width(self, cut: EngineCut) -> float:
        """Returns the elements of the two work spaces of the fused MoE kernel."""
        inner = self.width if cut.expert_parallel else self.width / cut.workers
        return self.per_token * (max(2 * inner, self.hidden) + max(inner, self.hidden))

    def engine_sparse(self, cut: EngineCut) -> tuple[float, float]:
        held = self.count / cut.workers if cut.expert_parallel else self.count
        width = self.width if cut.expert_parallel else self.width / cut.workers
        return 3 * self.hidden * width * held, self.per_token / self.count
