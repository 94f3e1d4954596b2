"""Gated delta net (arXiv:2412.06464) of Qwen3-Next and Qwen3.5, with the convolution and the norm before it.

A value head keeps a state of [key width, value width] instead of keys and values of previous tokens. Each token decays
the state, reads the value stored under its key, and moves that value towards its own. A short causal convolution mixes
queries, keys and values with those of the previous tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.blocks.base import (
    Block,
    Cut,
    DeltaNetSizes,
    EngineCut,
    LayerModules,
    MegatronPlace,
    MegatronSettings,
    Messages,
    Tensors,
    TokenFlops,
    Work,
    check_cpu_width,
    without_fp8,
)
from skyrl_mega.models.blocks.gqa import NORM
from skyrl_mega.models.config_json import Hf, integer, require, unsupported
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims

FUSED = ("in_proj_qkvz", "in_proj_ba")
"""Projections whose rows are grouped by key head: query, key, values, gates; and β, then decay."""
SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Projections with the rows of all heads of a part together: queries, keys and values; gates; β; decay."""
FLOAT32 = 4
"""Bytes of a float32 element."""
CPU_WIDTHS = (128,)
"""Widths of a head in vLLM on a CPU; 32 fails at the first token."""
CHUNK = 64
"""Tokens of a chunk, whose interactions a kernel computes at once."""


@dataclass(frozen=True)
class GatedDeltaNet(Block):
    """Linear attention with a state per value head; several value heads share a key head."""

    hidden: int
    sizes: DeltaNetSizes
    separate: bool = False
    """True if the files have the projections `SEPARATE` (Qwen3.5), False for `FUSED` (Qwen3-Next)."""

    @classmethod
    def read(cls, hf: Hf, *, separate: bool) -> GatedDeltaNet:
        """Returns the gated delta net described by config.json.

        Args:
            hf: Content of config.json.
            separate: True if the files have the projections `SEPARATE`, False for `FUSED`.

        Raises:
            UserError: A key is missing, or a value is not supported.
        """
        require(hf, "hidden_act", "silu")
        sizes = DeltaNetSizes(
            key_heads=integer(hf, "linear_num_key_heads"),
            value_heads=integer(hf, "linear_num_value_heads"),
            key_width=integer(hf, "linear_key_head_dim"),
            value_width=integer(hf, "linear_value_head_dim"),
            window=integer(hf, "linear_conv_kernel_dim"),
        )
        if sizes.value_heads % sizes.key_heads:
            raise unsupported(hf, "linear_num_value_heads", f"a multiple of linear_num_key_heads {sizes.key_heads}")
        return cls(integer(hf, "hidden_size"), sizes, separate)

    def facts(self) -> Mapping[str, int]:
        return {"delta_key_heads": self.sizes.key_heads, "delta_value_heads": self.sizes.value_heads}

    def hf_tensors(self, source: str) -> Tensors:
        sizes, prefix = self.sizes, f"{source}.linear_attn"
        if self.separate:
            rows = (sizes.convolved, sizes.values, sizes.value_heads, sizes.value_heads)
            projections = dict(zip(SEPARATE, rows, strict=True))
        else:
            projections = dict(zip(FUSED, (sizes.convolved + sizes.values, 2 * sizes.value_heads), strict=True))
        return {
            f"{source}.{NORM}": (self.hidden,),
            **{f"{prefix}.{name}.weight": (rows, self.hidden) for name, rows in projections.items()},
            f"{prefix}.conv1d.weight": (sizes.convolved, 1, sizes.window),
            f"{prefix}.dt_bias": (sizes.value_heads,),
            f"{prefix}.A_log": (sizes.value_heads,),
            f"{prefix}.norm.weight": (sizes.value_width,),
            f"{prefix}.out_proj.weight": (self.hidden, sizes.values),
        }

    def float32_tensors(self, source: str) -> Sequence[str]:
        return (f"{source}.linear_attn.A_log",)

    def frozen_tensors(self, source: str) -> Sequence[str]:
        return ()

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        return MegatronSettings()

    def layer_modules(self) -> LayerModules:
        return LayerModules(delta_net=self.sizes)

    def megatron_cuts(self) -> Sequence[Cut]:
        return (Cut("tensor", "key heads of the gated delta net", self.sizes.key_heads),)

    def check_megatron(self, parallel: ParallelDims, key: str) -> None:
        if parallel.context > 1:
            raise UserError(
                f"{parallel.context} would cut the state of a gated delta net, which context ranks do not exchange; "
                "give 1",
                key=f"{key}.context",
            )

    def check_fp8(self, key: str) -> None:
        raise without_fp8("FP8 has not been tested with a gated delta net", key)

    def check_shared_prefixes(self, key: str) -> None:
        raise UserError(
            "the model has gated delta nets, which read a sequence from its first token",
            key=key,
            value="true",
            fix="give false",
        )

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        """Adds a policy rank's parameters to `b`, with their pieces. The rows of in_proj are those of the rank's heads:
        queries, keys, values, gates, β, decay. The convolution has queries, keys and values."""
        size, tp = place.parallel.tensor, place.coords.tp
        prefix, part = f"{target}.self_attention", self.sizes.part(size)
        if place.spec == "local":
            b.whole(f"{target}.input_layernorm.weight", f"{source}.{NORM}")
        self._convolution(b, b.param(f"{prefix}.conv_weight", part.convolved, 1, part.window), source, part, tp)
        for name in ("dt_bias", "A_log"):
            first = tp * part.value_heads
            b.row_part(f"{prefix}.{name}", f"{source}.linear_attn.{name}", first, part.value_heads)
        b.whole(f"{prefix}.norm_weight", f"{source}.linear_attn.norm.weight")
        if place.spec == "te":
            b.whole(f"{prefix}.in_proj.layer_norm_weight", f"{source}.{NORM}")
        param = b.param(f"{prefix}.in_proj.weight", part.convolved + part.values + 2 * part.value_heads, self.hidden)
        for at, tensor, start, count in self._projection(source, part, tp):
            b.rows(param, at, tensor, start, count)
        output = f"{source}.linear_attn.out_proj.weight"
        b.column_part(f"{prefix}.out_proj.weight", output, tp * part.values, part.values)

    def _convolution(self, b: ShardBuilder, param: str, source: str, part: DeltaNetSizes, rank: int) -> None:
        """Fills a rank's or worker's convolution: the channels of its queries, keys and values."""
        at = first = 0
        for rows, all_rows in ((part.keys, self.sizes.keys), (part.keys, self.sizes.keys), (part.values, 0)):
            b.rows(param, at, f"{source}.linear_attn.conv1d.weight", first + rank * rows, rows)
            at, first = at + rows, first + all_rows

    def _projection(self, source: str, part: DeltaNetSizes, rank: int) -> Iterator[tuple[int, str, int, int]]:
        """Yields the pieces of in_proj: first row in the parameter, tensor, first row in the tensor, rows."""
        parts = (part.keys, part.keys, part.values, part.values, part.value_heads, part.value_heads)
        starts = [sum(parts[:index]) for index in range(len(parts))]
        names = [f"{source}.linear_attn.{name}.weight" for name in (SEPARATE if self.separate else FUSED)]
        if self.separate:
            qkv, *others = names
            for index, rows in enumerate(parts[:3]):
                yield starts[index], qkv, index * self.sizes.keys + rank * rows, rows
            for index, name in enumerate(others, start=3):
                yield starts[index], name, rank * parts[index], parts[index]
            return
        for head in range(part.key_heads):
            for name, first, last in ((names[0], 0, 4), (names[1], 4, 6)):
                widths = [rows // part.key_heads for rows in parts[first:last]]
                row = (rank * part.key_heads + head) * sum(widths)
                for start, width in zip(starts[first:last], widths, strict=True):
                    yield start + head * width, name, row, width
                    row += width

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        return (("key heads of the gated delta net", self.sizes.key_heads),)

    def check_cpu_engine(self, prefix: str, dtype: str) -> None:
        check_cpu_width("gated delta net", f"{prefix}linear_key_head_dim", self.sizes.key_width, CPU_WIDTHS)
        check_cpu_width("gated delta net", f"{prefix}linear_value_head_dim", self.sizes.value_width, CPU_WIDTHS)
        if dtype != "bfloat16":
            raise UserError(
                "vLLM computes gated delta nets on a CPU in bfloat16 only; give bfloat16, or cluster.device=cuda",
                key="model.dtype",
                value=dtype,
            )

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Adds an engine worker's load-time parameters to `b`, with their pieces. The rows of in_proj_qkvz and
        in_proj_ba are grouped by key head as on disk (Qwen3-Next), or have the worker's heads of each part together
        (Qwen3.5)."""
        rank, prefix = worker % cut.tensor, f"{source}.linear_attn"
        part = self.sizes.part(cut.tensor)
        b.whole(f"{source}.{NORM}", f"{source}.{NORM}")
        self._convolution(b, b.param(f"{prefix}.conv1d.weight", part.convolved, 1, part.window), source, part, rank)
        for name in ("dt_bias", "A_log"):
            b.row_part(f"{prefix}.{name}", f"{prefix}.{name}", rank * part.value_heads, part.value_heads)
        first = part.convolved + part.values
        qkvz = b.param(f"{prefix}.in_proj_qkvz.weight", first, self.hidden)
        ba = b.param(f"{prefix}.in_proj_ba.weight", 2 * part.value_heads, self.hidden)
        if self.separate:
            for at, tensor, start, count in self._projection(source, part, rank):
                b.rows(qkvz if at < first else ba, at if at < first else at - first, tensor, start, count)
        else:
            b.rows(qkvz, 0, qkvz, rank * first, first)
            b.rows(ba, 0, ba, rank * 2 * part.value_heads, 2 * part.value_heads)
        b.whole(f"{prefix}.norm.weight", f"{prefix}.norm.weight")
        output = f"{prefix}.out_proj.weight"
        b.column_part(output, output, rank * part.values, part.values)

    def flops(self) -> TokenFlops:
        """Returns a token's operations in the forward pass, the sum over all ranks: the projections, the convolution,
        and three products with each head's state, without products inside a chunk. Nothing depends on the number of
        previous tokens."""
        sizes = self.sizes
        rows = sizes.convolved + sizes.values + 2 * sizes.value_heads
        state = sizes.value_heads * sizes.key_width * sizes.value_width
        return TokenFlops(2 * (self.hidden * (rows + sizes.values) + sizes.window * sizes.convolved + 3 * state))

    def saved_bytes(self, work: Work) -> float:
        """Returns the bytes kept on a rank for the backward pass without recomputation, for one micro-batch and one
        layer: the norm's input and output, the projection, the convolution's input and output, β and decay, a matrix
        over the tokens of a chunk, and for the gated norm three copies of the values in float32 and three in the
        model's type.

        A local layer computes the rule in float32. It keeps queries and keys before their norm, seven copies of them
        for each value head, six of the values, five matrices over the tokens of a chunk, and the state of every chunk.
        """
        part, tokens, b = self.sizes.part(work.parallel.tensor), work.tokens, work.itemsize
        norm = 2 * tokens / work.parallel.tensor * self.hidden * b
        keys = part.value_heads * part.key_width
        projected = part.convolved + part.values + 2 * part.value_heads
        chunk = part.value_heads * CHUNK
        rule: float = b * chunk + 2 * FLOAT32 * part.value_heads
        if work.spec == "local":
            states = part.value_heads * part.key_width * part.value_width / CHUNK
            rule = FLOAT32 * (2 * part.keys + 7 * keys + 6 * part.values + 5 * chunk + states)
        gated = 3 * (FLOAT32 + b) * part.values
        return norm + tokens * (b * (projected + 2 * part.convolved) + gated + rule)

    def messages(self, parallel: ParallelDims) -> Messages:
        return Messages(tensor=self.hidden)

    def engine_arguments(self, device: str) -> Mapping[str, Any]:
        """Returns the vLLM arguments for states in float32, as in training (`mamba_ssm_cache_dtype`), and on a CPU also
        `enable_prefix_caching` False: with states vLLM caches prefixes only if it may split a prompt over steps, which
        a CPU engine with seeds cannot (`engines.vllm.spec`)."""
        states = {"mamba_ssm_cache_dtype": "float32"}
        return states | {"enable_prefix_caching": False} if device == "cpu" else states

    def state_bytes(self, cut: EngineCut, itemsize: int, drafts: int = 0) -> int:
        part = self.sizes.part(cut.tensor)
        convolution = (part.window - 1 + drafts) * part.convolved * itemsize
        return convolution + part.value_heads * part.key_width * part.value_width * FLOAT32

    def engine_width(self, cut: EngineCut) -> float:
        sizes = self.sizes
        return (2 * sizes.convolved + 3 * sizes.values + 2 * sizes.value_heads) / cut.tensor
