"""Routed experts instead of a dense feed-forward part (arXiv:2101.03961), with or without a shared expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

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
    indivisible,
    share,
    without_fp8,
)
from skyrl_mega.models.blocks.gated_mlp import GATED, NORM, check_keys, gated_args, gated_pieces, gated_tensors
from skyrl_mega.models.blocks.routing import ExpertRouter
from skyrl_mega.models.config_json import Hf, integer
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims

COUNT = ("num_experts", "num_local_experts")
"""Keys for the number of experts: transformers 4 writes the first, transformers 5 the second."""
MEGATRON_ROUTER = "mlp.router.weight"
"""Suffix of a router's Megatron name."""
MEGATRON_ROUTER_BIAS = "mlp.router.bias"
"""Suffix of the Megatron name of a router's bias, which is trained as the router's weight."""
MEGATRON_BIAS = "mlp.router.expert_bias"
"""Suffix of a correction bias's Megatron name."""
MEGATRON_EXPERTS = ".mlp.experts."
"""Part of every expert's Megatron name."""


@dataclass(frozen=True)
class ExpertNames:
    """The names of the tensors of a layer with experts, on disk and in vLLM, below the layer's name."""

    part: str = "mlp"
    """Name of the feed-forward part; its router is `<part>.gate`, its experts are `<part>.experts.<index>`."""
    bias: str = "mlp.gate.e_score_correction_bias"
    """Name of the router's correction bias (`ExpertRouter.bias`); unused for a router without a correction bias."""
    matrices: tuple[str, str, str] = GATED
    """Names of the gate, up and down matrices of an expert, below the expert's name."""


@dataclass(frozen=True)
class SharedExpert:
    """A gated MLP that every token uses, added to the routed experts' result."""

    width: int
    """Intermediate size."""
    name: str = "mlp.shared_experts"
    """Name below the layer's."""
    gate: str | None = None
    """Name of a [1, hidden] weight: the sigmoid of its product with the token multiplies the result. None: no gate."""
    engine_whole: bool = False
    """True if vLLM 0.32 keeps the expert whole in every worker of an engine with several replicas of several workers
    and with expert parallelism (`ParallelConfig.use_sequence_parallel_moe`)."""

    def engine_parts(self, cut: EngineCut) -> int:
        """Returns the number of parts into which an engine's workers split the columns; 1 if each holds all."""
        whole = self.engine_whole and cut.data > 1 and cut.expert_parallel
        return 1 if whole else cut.tensor


@dataclass(frozen=True)
class Experts(Block):
    """Gated MLPs of equal width; every token uses a few of them."""

    hidden: int
    count: int
    """Number of experts of a layer."""
    per_token: int
    """Number of experts of a token."""
    width: int
    """Intermediate size of an expert."""
    router: ExpertRouter
    shared: SharedExpert | None = None
    names: ExpertNames = ExpertNames()
    engine_float32_router: bool = False
    """True if vLLM keeps the router's weight in float32."""
    engine_reads_router_dtype: bool = False
    """True if vLLM's layer of a softmax router reads `moe_router_dtype`, as its layers of DeepSeek do."""

    @classmethod
    def read(
        cls,
        hf: Hf,
        router: ExpertRouter,
        shared: SharedExpert | None = None,
        *,
        names: ExpertNames = ExpertNames(),
        engine_float32_router: bool = False,
        count: Sequence[str] = COUNT,
        width: str = "moe_intermediate_size",
    ) -> Self:
        """Returns the experts described by config.json.

        Args:
            hf: Content of config.json.
            router: The router.
            shared: The shared expert; None for a model without.
            names: Names on disk and in vLLM.
            engine_float32_router: True if vLLM keeps the router's weight in float32.
            count: Possible keys for the number of experts; the first present key is read.
            width: Key for the intermediate size of an expert.

        Raises:
            UserError: A key is missing, a value is not supported, a token has more experts than there are, or the
                router's groups do not divide the experts.
        """
        check_keys(hf)
        experts = integer(hf, next((key for key in count if key in hf), count[0]))
        per_token = integer(hf, "num_experts_per_tok")
        if per_token > experts:
            raise UserError(
                f"num_experts_per_tok {per_token} is above the {experts} experts; lower it", key="config.json"
            )
        if experts % router.groups:
            raise UserError(
                f"n_group {router.groups} does not divide the {experts} experts; choose another model",
                key="config.json",
            )
        return cls(
            hidden=integer(hf, "hidden_size"),
            count=experts,
            per_token=per_token,
            width=integer(hf, width),
            router=router,
            shared=shared,
            names=names,
            engine_float32_router=engine_float32_router,
        )

    def facts(self) -> Mapping[str, int]:
        return {"experts": self.count, "experts_per_token": self.per_token}

    def hf_tensors(self, source: str) -> Tensors:
        shapes: Tensors = {f"{source}.{NORM}": (self.hidden,), self._router(source): (self.count, self.hidden)}
        shapes |= dict.fromkeys(self.float32_tensors(source), (self.count,))
        shapes |= self._expert_tensors(source)
        if self.shared:
            shapes |= gated_tensors(f"{source}.{self.shared.name}", self.shared.width, self.hidden)
            if self.shared.gate:
                shapes[f"{source}.{self.shared.gate}"] = (1, self.hidden)
        return shapes

    def _expert_tensors(self, source: str) -> Tensors:
        """Returns name → shape of the tensors of all experts."""
        shapes: Tensors = {}
        for expert in range(self.count):
            shapes |= gated_tensors(self._expert(source, expert), self.width, self.hidden, self.names.matrices)
        return shapes

    def float32_tensors(self, source: str) -> Sequence[str]:
        return (f"{source}.{self.names.bias}",) if self.router.bias else ()

    def _router(self, source: str) -> str:
        return f"{source}.{self.names.part}.gate.weight"

    def _expert(self, source: str, expert: int) -> str:
        return f"{source}.{self.names.part}.experts.{expert}"

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        transformer = {
            "num_moe_experts": self.count,
            "moe_router_topk": self.per_token,
            "moe_ffn_hidden_size": self.width,
            "moe_layer_freq": [int(has_experts) for has_experts in layers],
            **self.router.megatron_args(),
        }
        if self.shared:
            transformer |= {
                "moe_shared_expert_intermediate_size": self.shared.width,
                "moe_shared_expert_gate": self.shared.gate is not None,
            }
        return MegatronSettings(transformer | gated_args())

    def megatron_cuts(self) -> Sequence[Cut]:
        return (
            Cut("expert", "experts", self.count, "experts"),
            Cut("expert_tensor", "columns of an expert (moe_intermediate_size)", self.width, "columns"),
            *self._shared_cuts(),
        )

    def megatron_widths(self) -> Sequence[Cut]:
        return (Cut("expert_tensor", "columns of an expert (moe_intermediate_size)", self.width), *self._shared_cuts())

    def _shared_cuts(self) -> tuple[Cut, ...]:
        return (Cut("tensor", "columns of the shared expert", self.shared.width),) if self.shared else ()

    def check_fp8(self, key: str) -> None:
        if self.router.score != "softmax" or self.shared or self.names != ExpertNames():
            raise without_fp8("FP8 has been tested with Qwen3's experts only (softmax router, no shared expert)", key)

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
        if self.per_token == 1 and self.router.renormalize:
            raise UserError(
                "num_experts_per_tok 1 with norm_topk_prob gives the router no gradient; choose another model",
                key="config.json",
            )

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        b.whole(f"{target}.pre_mlp_layernorm.weight", f"{source}.{NORM}")
        b.whole(f"{target}.{MEGATRON_ROUTER}", self._router(source))
        for bias in self.float32_tensors(source):
            b.whole(f"{target}.{MEGATRON_BIAS}", bias)
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
            columns = range(coords.etp * width, (coords.etp + 1) * width)
            self._expert_pieces(b, (fc1, fc2), source, coords.ep * count + local, columns)
        if self.shared:
            self._shared_pieces(b, place, f"{target}.mlp.shared_experts", source, self.shared)

    def _expert_pieces(
        self, b: ShardBuilder, params: tuple[str, str], source: str, expert: int, columns: range
    ) -> None:
        """Adds both weights of an expert on a policy rank, called `params`, with these columns of the expert."""
        width = len(columns)
        b.param(params[0], 2 * width, self.hidden)
        b.param(params[1], self.hidden, width)
        name = self._expert(source, expert)
        gated_pieces(b, params, name, columns.start, width, matrices=self.names.matrices)

    def _shared_pieces(
        self, b: ShardBuilder, place: MegatronPlace, target: str, source: str, shared: SharedExpert
    ) -> None:
        width = shared.width // place.parallel.tensor
        if shared.gate:
            b.whole(f"{target}.gate_weight", f"{source}.{shared.gate}")
        fc1 = b.param(f"{target}.linear_fc1.weight", 2 * width, self.hidden)
        fc2 = b.param(f"{target}.linear_fc2.weight", self.hidden, width)
        gated_pieces(b, (fc1, fc2), f"{source}.{shared.name}", place.coords.tp * width, width)

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        if self.shared is None or self.shared.engine_parts(cut) == 1:
            return ()
        return (("columns of the shared expert", self.shared.width),)

    def check_engine(self, cut: EngineCut, key: str) -> None:
        if cut.workers > self.count:
            raise UserError(f"{cut.workers} workers are above the model's {self.count} experts; lower it", key=key)
        if not cut.expert_parallel and self.width % cut.workers:
            what = "columns of an expert (moe_intermediate_size)"
            raise indivisible(f"{cut.workers} workers do not divide", self.width, what, key)

    def engine_columns(self, cut: EngineCut) -> Mapping[str, int]:
        return {"columns of an expert": self.width // (1 if cut.expert_parallel else cut.workers)}

    def engine_arguments(self, device: str) -> Mapping[str, Any]:
        """Returns the vLLM argument `hf_overrides` for router logits in float32 as in megatron-core, instead of the
        model's type, on any device; {} for a softmax router whose layer in vLLM does not read the argument
        (`engine_reads_router_dtype`)."""
        float32 = self.router.score == "sigmoid" or self.engine_reads_router_dtype
        return {"hf_overrides": {"moe_router_dtype": "float32"}} if float32 else {}

    def engine_float32(self, source: str) -> Sequence[str]:
        router = (self._router(source),) if self.engine_float32_router else ()
        return (*router, *self.float32_tensors(source))

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Adds an engine worker's load-time parameters to `b`, with their pieces: w13 [experts, gate rows then up rows,
        hidden], w2 [experts, hidden, columns], the router, the tensors of `float32_tensors`, the norm, and the shared
        expert with its gate, if any. The worker has whole experts in contiguous runs, or columns of every expert."""
        b.whole(f"{source}.{NORM}", f"{source}.{NORM}")
        for name in (self._router(source), *self.float32_tensors(source)):
            b.whole(name, name)
        held, columns = self._worker_part(cut, worker)
        width, prefix = len(columns), f"{source}.{self.names.part}.experts.routed_experts"
        w13 = b.param(f"{prefix}.w13_weight", len(held), 2 * width, self.hidden)
        w2 = b.param(f"{prefix}.w2_weight", len(held), self.hidden, width)
        self._engine_experts(b, (w13, w2), source, held, columns)
        if self.shared:
            parts = self.shared.engine_parts(cut)
            name, width = f"{source}.{self.shared.name}", self.shared.width // parts
            gate_up = b.param(f"{name}.gate_up_proj.weight", 2 * width, self.hidden)
            down = b.param(f"{name}.down_proj.weight", self.hidden, width)
            gated_pieces(b, (gate_up, down), name, worker % parts * width, width)
            if self.shared.gate:
                b.whole(f"{source}.{self.shared.gate}", f"{source}.{self.shared.gate}")

    def _engine_experts(
        self, b: ShardBuilder, params: tuple[str, str], source: str, held: range, columns: range
    ) -> None:
        """Adds the pieces of an engine worker's experts `held`, with these columns, to w13 and w2 (`params`)."""
        for local, expert in enumerate(held):
            name, matrices = self._expert(source, expert), self.names.matrices
            gated_pieces(b, params, name, columns.start, len(columns), stack=(local,), matrices=matrices)

    def engine_row(self, cut: EngineCut, worker: int) -> Mapping[str, str]:
        if cut.expert_parallel:
            held, _ = self._worker_part(cut, worker)
            experts = f"{held.start}-{held.stop - 1}" if len(held) > 1 else str(held.start)
            return {"experts": experts, "columns": share(self.width, 1, 0)}
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
        shared = self.shared.width if self.shared else 0
        return TokenFlops(2 * self.hidden * (3 * (self.width * self.per_token + shared) + self.count))

    def saved_bytes(self, work: Work) -> float:
        s, b = work.tokens / work.parallel.tensor, work.itemsize
        norm = 2 * s * self.hidden * b  # input and output
        # Each expert's input; gate and up; the product times the router's probability. Unfused also silu, a second copy
        # of up, and the product before the probability.
        kept = 2 + self._activation_widths(work)
        experts = self._routed(work) * (b * (self.hidden + kept * self.width / work.parallel.expert_tensor) + 4)
        # Logits, probabilities and masks over all experts, in float32 and bool.
        return norm + experts + s * self.count * 24 + self._shared_bytes(work)

    def _shared_bytes(self, work: Work) -> float:
        """Returns the bytes kept for the shared expert: gate, up and the product, unfused also silu and a copy of up;
        with a gate the result and the score."""
        if not self.shared:
            return 0.0
        inner = (3 if "swiglu" in work.fused else 5) * self.shared.width / work.parallel.tensor  # as in `GatedMlp`
        gate = work.tokens / work.parallel.tensor * (self.hidden + 1) if self.shared.gate else 0
        return work.itemsize * (work.tokens * inner + gate)

    def kept_bytes(self, work: Work, recompute: str) -> float:
        """Returns the bytes kept on a rank for the backward pass, for one micro-batch and one layer: with "moe" only
        the norm's input and output; with "selective" no output of the norm, and of the routed experts' activation only
        the inputs; with "none" all of `saved_bytes`."""
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
            # Only the routed experts' activation is computed again.
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
        return Messages(tensor=self.hidden if self.shared else 0.0, experts=self.per_token * self.hidden)

    def engine_width(self, cut: EngineCut) -> float:
        """Returns the elements per token held by an engine worker, besides hidden states: the sum of vLLM's two work
        spaces for the fused MoE kernel and the shared expert's intermediate results, if any."""
        inner = self.width if cut.expert_parallel else self.width / cut.workers
        shared = 3 * self.shared.width / cut.tensor if self.shared else 0.0
        return self.per_token * (max(2 * inner, self.hidden) + max(inner, self.hidden)) + shared

    def engine_sparse(self, cut: EngineCut) -> tuple[float, float]:
        held = self.count / cut.workers if cut.expert_parallel else self.count
        width = self.width if cut.expert_parallel else self.width / cut.workers
        return 3 * self.hidden * width * held, self.per_token / self.count
