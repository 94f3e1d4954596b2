"""Experts of gpt-oss (arXiv:2508.10925): a tensor on disk for all experts, biases, and a clamped activation.

A token's result is the sum over its experts of p · (down((up + 1) · gate · sigmoid(1.702 · gate)) + bias), with gate at
most 7 and up between -7 and 7. Each expert is stored transposed, with gate and up in turn ([hidden, 2 · width]). The
global tensors have vLLM's order instead, [experts, width, gate and up, hidden] and [experts, hidden, width].

Legend: E experts, F width of an expert, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.blocks.base import (
    Cut,
    EngineCut,
    MegatronPlace,
    MegatronSettings,
    Tensors,
    Work,
    indivisible,
    without_fp8,
)
from skyrl_mega.models.blocks.experts import MEGATRON_ROUTER, MEGATRON_ROUTER_BIAS, Experts
from skyrl_mega.models.blocks.gated_mlp import NORM
from skyrl_mega.models.blocks.routing import ExpertRouter
from skyrl_mega.models.config_json import Hf, integer, require, unsupported
from skyrl_mega.models.disk_form import DiskForm
from skyrl_mega.models.quantization import MXFP4_BLOCK, mxfp4
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims

WIDTH = "intermediate_size"
"""Key of config.json for the width of an expert."""
LIMIT = 7.0
"""Bound of gate and up; vLLM and megatron-core's kernels know no other slope than 1.702."""
PARAMS = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
"""Megatron's names of the parameters of an expert, without the number of the expert."""


@dataclass(frozen=True)
class FusedExperts(Experts):
    """Gated MLPs with biases; every token uses a few of them."""

    @classmethod
    def of(cls, hf: Hf) -> FusedExperts:
        """Returns the experts described by config.json.

        Raises:
            UserError: A key is missing, or a value is not supported.
        """
        require(hf, "swiglu_limit", LIMIT)
        require(hf, "swiglu_alpha", 1.702)
        experts = cls.read(hf, ExpertRouter("softmax", renormalize=True), count=("num_local_experts",), width=WIDTH)
        for key in ("hidden_size", WIDTH):
            if mxfp4(hf) and integer(hf, key) % MXFP4_BLOCK:
                raise unsupported(hf, key, f"a multiple of {MXFP4_BLOCK} in MXFP4")
        return experts

    # --- Hugging Face ---

    def hf_tensors(self, source: str) -> Tensors:
        experts, (count, hidden, width) = f"{source}.mlp.experts", (self.count, self.hidden, self.width)
        return {
            f"{source}.{NORM}": (hidden,),
            self._router(source): (count, hidden),
            f"{source}.mlp.router.bias": (count,),
            f"{experts}.gate_up_proj": (count, width, 2, hidden),
            f"{experts}.gate_up_proj_bias": (count, width, 2),
            f"{experts}.down_proj": (count, hidden, width),
            f"{experts}.down_proj_bias": (count, hidden),
        }

    def disk_forms(self, source: str) -> Mapping[str, DiskForm]:
        experts = f"{source}.mlp.experts"
        return {
            f"{experts}.gate_up_proj": DiskForm((0, 3, 1, 2), merged=True, packed=True),
            f"{experts}.gate_up_proj_bias": DiskForm((0, 1, 2), merged=True),
            f"{experts}.down_proj": DiskForm((0, 2, 1), packed=True),
        }

    def _router(self, source: str) -> str:
        return f"{source}.mlp.router.weight"

    # --- Megatron ---

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        activation = {
            "add_bias_linear": True,
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": LIMIT,
            "ffn_hidden_size": self.width,
        }
        return MegatronSettings(super().megatron_args(layers).transformer | activation)

    def megatron_cuts(self) -> Sequence[Cut]:
        return (Cut("expert", "experts", self.count, "experts"),)

    def check_fp8(self, key: str) -> None:
        raise without_fp8("FP8 has not been tested with experts that have biases", key)

    def check_megatron(self, parallel: ParallelDims, key: str) -> None:
        if parallel.expert_tensor > 1:
            raise UserError(
                f"{parallel.expert_tensor} splits experts that have biases, which megatron-core 0.16 refuses"
                "; give 1, with expert above 1 for tensor above 1",
                key=f"{key}.expert_tensor",
            )
        super().check_megatron(parallel, key)

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        b.whole(f"{target}.pre_mlp_layernorm.weight", f"{source}.{NORM}")
        b.whole(f"{target}.{MEGATRON_ROUTER}", self._router(source))
        b.whole(f"{target}.{MEGATRON_ROUTER_BIAS}", f"{source}.mlp.router.bias")
        count, prefix = self.count // place.parallel.expert, f"{target}.mlp.experts"
        if place.spec == "te":
            # A grouped layer holds every expert's weight and bias in turn, before the next grouped layer.
            names = [[f"{prefix}.{name}{i}" for name in PARAMS] for i in range(count)]
            shapes = self._megatron_shapes()
            for columns in ((0, 1), (2, 3)):
                for expert in names:
                    for column in columns:
                        b.param(expert[column], *shapes[column])
        else:
            names = [[f"{prefix}.local_experts.{i}.{name}" for name in PARAMS] for i in range(count)]
        for local, params in enumerate(names):
            self._biased_pieces(b, params, f"{source}.mlp.experts", place.coords.ep * count + local)

    def _megatron_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the declared shapes of weight and bias of both layers of an expert; gate rows precede up rows."""
        hidden, width = self.hidden, self.width
        return (1, 2 * width, 1, hidden), (1, 2 * width, 1), (1, hidden, width), (1, hidden)

    def _biased_pieces(self, b: ShardBuilder, params: Sequence[str], experts: str, expert: int) -> None:
        """Adds weight and bias of both layers of an expert, called `params`."""
        for param, shape in zip(params, self._megatron_shapes(), strict=True):
            b.param(param, *shape)
        for up in (0, 1):
            row = up * self.width
            weight, bias = f"{experts}.gate_up_proj", f"{experts}.gate_up_proj_bias"
            b.place(params[0], (0, row, 0, 0), weight, (expert, 0, up, 0), (1, self.width, 1, self.hidden))
            b.place(params[1], (0, row, 0), bias, (expert, 0, up), (1, self.width, 1))
        b.rows(params[2], 0, f"{experts}.down_proj", expert, 1)
        b.rows(params[3], 0, f"{experts}.down_proj_bias", expert, 1)

    # --- vLLM ---

    def check_engine(self, cut: EngineCut, key: str) -> None:
        super().check_engine(cut, key)
        if self.width % cut.workers:  # vLLM's class checks it also for whole experts
            what = f"columns of an expert ({WIDTH})"
            raise indivisible(f"{cut.workers} workers do not divide", self.width, what, key)

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Adds an engine worker's load-time parameters to `b`, with their pieces: the norm, the router and its bias,
        w13 [experts, columns, 2, hidden] and w2 [experts, hidden, columns] with a bias each. With experts split by
        columns only worker 0 has pieces for the bias of w2, because the workers' results are summed."""
        b.whole(f"{source}.{NORM}", f"{source}.{NORM}")
        for name in (self._router(source), f"{source}.mlp.router.bias"):
            b.whole(name, name)
        held, columns = self._worker_part(cut, worker)
        experts, prefix = f"{source}.mlp.experts", f"{source}.mlp.experts.routed_experts"
        first, count, at, width = held.start, len(held), columns.start, len(columns)
        w13 = b.param(f"{prefix}.w13_weight", count, width, 2, self.hidden)
        b.place(w13, (0, 0, 0, 0), f"{experts}.gate_up_proj", (first, at, 0, 0), (count, width, 2, self.hidden))
        w2 = b.param(f"{prefix}.w2_weight", count, self.hidden, width)
        b.place(w2, (0, 0, 0), f"{experts}.down_proj", (first, 0, at), (count, self.hidden, width))
        w13_bias = b.param(f"{prefix}.w13_bias", count, width, 2)
        b.place(w13_bias, (0, 0, 0), f"{experts}.gate_up_proj_bias", (first, at, 0), (count, width, 2))
        w2_bias = b.param(f"{prefix}.w2_bias", count, self.hidden)
        if at == 0:
            b.rows(w2_bias, 0, f"{experts}.down_proj_bias", first, count)

    def engine_arguments(self, device: str) -> Mapping[str, Any]:
        return {}

    # --- cost ---

    @staticmethod
    def _activation_widths(work: Work) -> int:
        """Returns the number of expert widths kept by the activation function, besides gate and up: the product, and
        gate and up within the limits; unfused also the sigmoid, up plus 1, and the product before the probability."""
        return 3 if "swiglu" in work.fused else 6
