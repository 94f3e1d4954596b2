"""Grouped-query attention (arXiv:2305.13245) and the norm before it.

Options: sinks, a logit per head without a value in every softmax (arXiv:2309.17453), and a sliding window, the only
tokens that a token attends to (arXiv:2004.05150).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.blocks.base import (
    Block,
    Cut,
    EngineCut,
    LayerModules,
    MegatronPlace,
    MegatronSettings,
    Messages,
    Tensors,
    TokenFlops,
    Work,
    check_cpu_width,
    exchanged,
    share,
    without_fp8,
)
from skyrl_mega.models.blocks.rope import Rope
from skyrl_mega.models.config_json import Hf, integer, require, unsupported
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims

Norms = Literal["none", "head", "all_heads"]
NORM = "input_layernorm.weight"
CPU_HEADS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of a head that vLLM's attention on a CPU is compiled for."""


@dataclass(frozen=True)
class GroupedQueryAttention(Block):
    """Grouped-query attention. Field names follow the literature, not a library."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: Norms
    """RMSNorm of queries and keys: over each head, or over all heads together."""
    qkv_bias: bool
    """True for a bias in the q, k and v projections."""
    engine_norm_rows: bool = False
    """True if an engine's worker holds its own heads' part of a norm over all heads; False: the whole norm."""
    output_gate: bool = False
    """True if the rows of q_proj are a query and a gate for each head: the gate's sigmoid multiplies the head's result
    (arXiv:2505.06708)."""
    output_bias: bool = False
    """True for a bias in the output projection."""
    sinks: bool = False
    """True for a sink in every head; the family's class in vLLM then calls the layer `attn`."""
    window: int | None = None
    """Number of tokens, itself included, that a token attends to; None: all earlier ones."""

    @classmethod
    def read(
        cls,
        hf: Hf,
        *,
        qk_norm: Norms,
        qkv_bias: bool,
        bias_key: str | None = "attention_bias",
        part: float | None = None,
        output_gate: bool = False,
        output_bias: bool = False,
        sinks: bool = False,
        window: int | None = None,
        yarn: bool = False,
    ) -> GroupedQueryAttention:
        """Returns the attention described by config.json. Default `head_dim`: the hidden size divided by the heads.
        Default `num_key_value_heads`: the number of query heads.

        Args:
            hf: Content of config.json.
            qk_norm: The norm of queries and keys.
            qkv_bias: True for a bias in the q, k and v projections.
            bias_key: Key of config.json that must be false or absent; None checks no key.
            part: Default of `partial_rotary_factor`, the rotated fraction of a head; None: only 1 is allowed.
            output_gate: True if a gate multiplies each head's result.
            output_bias: True for a bias in the output projection.
            sinks: True for a sink in every head. `sliding_window` is then not checked, because the family reads it.
            window: Number of tokens, itself included, that a token attends to; None: all earlier ones.
            yarn: True if YaRN is required, as the family's engine computes no other positions.

        Raises:
            UserError: A key is missing, or a value is not supported: the key-value heads do not divide the heads;
                `use_sliding_window`, `dual_chunk_attention_config` or `bias_key` is set; `sliding_window` is set
                without `use_sliding_window` and sinks; or `Rope.read` refuses a value.
        """
        heads, hidden = integer(hf, "num_attention_heads"), integer(hf, "hidden_size")
        kv_heads = heads if hf.get("num_key_value_heads") is None else integer(hf, "num_key_value_heads")
        if heads % kv_heads:
            raise unsupported(hf, "num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        require(hf, "use_sliding_window", False)
        if "use_sliding_window" not in hf and not sinks:
            require(hf, "sliding_window", None)  # vLLM uses it with every family
        require(hf, "dual_chunk_attention_config", None)
        if bias_key:
            require(hf, bias_key, False)
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads if hf.get("head_dim") is None else integer(hf, "head_dim"),
            rope=Rope.read(hf, part, yarn=yarn),
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            output_gate=output_gate,
            output_bias=output_bias,
            sinks=sinks,
            window=window,
        )

    def facts(self) -> Mapping[str, int]:
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return sizes | {"qkv_bias": int(self.qkv_bias)}

    def hf_tensors(self, source: str) -> Tensors:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: Tensors = {f"{source}.{NORM}": (self.hidden,)}
        for name, rows in (("q_proj", self._query_parts * q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{source}.self_attn.{name}.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                shapes[f"{source}.self_attn.{name}.bias"] = (rows,)
        if self.qk_norm != "none":
            all_heads = self.qk_norm == "all_heads"
            shapes[f"{source}.self_attn.q_norm.weight"] = (q if all_heads else self.head_dim,)
            shapes[f"{source}.self_attn.k_norm.weight"] = (kv if all_heads else self.head_dim,)
        shapes[f"{source}.self_attn.o_proj.weight"] = (self.hidden, q)
        if self.output_bias:
            shapes[f"{source}.self_attn.o_proj.bias"] = (self.hidden,)
        if self.sinks:
            shapes[f"{source}.self_attn.sinks"] = (self.heads,)
        return shapes

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        transformer = {
            "num_attention_heads": self.heads,
            "num_query_groups": self.kv_heads,
            "kv_channels": self.head_dim,
            "qk_layernorm": self.qk_norm != "none",
            "add_qkv_bias": self.qkv_bias,
        }
        if self.output_gate:
            transformer["attention_output_gate"] = True
        if self.output_bias:
            transformer["add_bias_linear"] = True
        if self.rope.yarn:
            transformer |= self.rope.yarn.megatron_fields()
        return MegatronSettings(transformer, self.rope.megatron_args())

    def layer_modules(self) -> LayerModules:
        return LayerModules(self.qk_norm, sinks=self.sinks, window=self.window)

    def megatron_cuts(self) -> Sequence[Cut]:
        return (
            Cut("tensor", "attention heads", self.heads, "heads", of_heads=True),
            Cut("tensor", "key/value heads", self.kv_heads, "kv", of_heads=True),
        )

    def megatron_widths(self) -> Sequence[Cut]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Cut("tensor", "query columns (heads · head_dim)", q),
            Cut("tensor", "rows of q, k and v", self._query_parts * q + 2 * kv),
        )

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        """Adds a policy rank's parameters to `b`, with their pieces. linear_qkv has rows by query group: query heads,
        their gates if any, then the key head, then the value head."""
        size, tp = place.parallel.tensor, place.coords.tp
        hf_prefix, megatron_prefix = f"{source}.self_attn", f"{target}.self_attention"
        columns = self.heads * self.head_dim // size
        if place.spec == "local":
            b.whole(f"{target}.input_layernorm.weight", f"{source}.{NORM}")
        if self.sinks:
            heads = self.heads // size
            b.row_part(f"{megatron_prefix}.core_attention.softmax_offset", f"{hf_prefix}.sinks", tp * heads, heads)
        b.column_part(f"{megatron_prefix}.linear_proj.weight", f"{hf_prefix}.o_proj.weight", tp * columns, columns)
        if self.output_bias:
            b.whole(f"{megatron_prefix}.linear_proj.bias", f"{hf_prefix}.o_proj.bias")
        if place.spec == "te":
            b.whole(f"{megatron_prefix}.linear_qkv.layer_norm_weight", f"{source}.{NORM}")
        head = self.head_dim
        groups, width = self.kv_heads // size, self.heads // self.kv_heads * head
        queries = self._query_parts * width
        rows = groups * (queries + 2 * head)
        for kind, shape in self._kinds(rows):
            param = b.param(f"{megatron_prefix}.linear_qkv.{kind}", *shape)
            for local in range(groups):
                group, row = tp * groups + local, local * (queries + 2 * head)
                if self.output_gate:
                    for at in range(0, width, head):  # on disk every query is followed by its gate
                        disk = group * queries + 2 * at
                        b.rows(param, row + at, f"{hf_prefix}.q_proj.{kind}", disk, head)
                        b.rows(param, row + width + at, f"{hf_prefix}.q_proj.{kind}", disk + head, head)
                else:
                    b.rows(param, row, f"{hf_prefix}.q_proj.{kind}", group * width, width)
                b.rows(param, row + queries, f"{hf_prefix}.k_proj.{kind}", group * head, head)
                b.rows(param, row + queries + head, f"{hf_prefix}.v_proj.{kind}", group * head, head)
        if self.qk_norm != "none":
            b.whole(f"{megatron_prefix}.q_layernorm.weight", f"{hf_prefix}.q_norm.weight")
            b.whole(f"{megatron_prefix}.k_layernorm.weight", f"{hf_prefix}.k_norm.weight")

    def check_fp8(self, key: str) -> None:
        if self.qk_norm == "all_heads":
            raise without_fp8("FP8 has not been tested with a norm over all heads of queries and keys", key)
        if self.output_gate:
            raise without_fp8("FP8 has not been tested with gated attention", key)
        if self.sinks:
            raise without_fp8("FP8 has not been tested with attention sinks", key)

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        shared = () if self.kv_heads < cut.tensor else (("key/value heads", self.kv_heads),)
        return (("attention heads", self.heads), *shared)

    def check_engine(self, cut: EngineCut, key: str) -> None:
        if self.sinks and self.kv_heads < cut.tensor:
            raise UserError(
                f"{cut.tensor} is more than the model's {self.kv_heads} key/value heads, which vLLM's class cannot cut",
                key=key,
                fix="choose a divisor of the number of key/value heads",
            )
        if self.kv_heads < cut.tensor and cut.tensor % self.kv_heads:
            raise UserError(
                f"{cut.tensor} is not a multiple of the model's {self.kv_heads} key/value heads; choose one", key=key
            )

    def check_cpu_engine(self, prefix: str, dtype: str) -> None:
        check_cpu_width("attention", f"{prefix}head_dim", self.head_dim, CPU_HEADS)

    def engine_columns(self, cut: EngineCut) -> Mapping[str, int]:
        return {
            "query columns": self.heads // cut.tensor * self.head_dim,
            "key and value columns": max(1, self.kv_heads // cut.tensor) * self.head_dim,
        }

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Adds an engine worker's load-time parameters to `b`, with their pieces. The rows of qkv_proj are the worker's
        q (each query followed by its gate, if any), then k, then v. With fewer kv heads than workers, several workers
        hold the same kv head."""
        rank, prefix = worker % cut.tensor, f"{source}.self_attn"
        target = f"{source}.attn" if self.sinks else prefix
        b.whole(f"{source}.{NORM}", f"{source}.{NORM}")
        if self.sinks:
            heads = self.heads // cut.tensor
            b.row_part(f"{target}.sinks", f"{prefix}.sinks", rank * heads, heads)
        q = self.heads // cut.tensor * self.head_dim
        kv = max(1, self.kv_heads // cut.tensor) * self.head_dim
        kv_start = rank * kv if self.kv_heads >= cut.tensor else rank // (cut.tensor // self.kv_heads) * kv
        queries = self._query_parts * q
        for kind, shape in self._kinds(queries + 2 * kv):
            fused = b.param(f"{target}.qkv_proj.{kind}", *shape)
            b.rows(fused, 0, f"{prefix}.q_proj.{kind}", rank * queries, queries)
            b.rows(fused, queries, f"{prefix}.k_proj.{kind}", kv_start, kv)
            b.rows(fused, queries + kv, f"{prefix}.v_proj.{kind}", kv_start, kv)
        b.column_part(f"{target}.o_proj.weight", f"{prefix}.o_proj.weight", rank * q, q)
        if self.output_bias:
            b.whole(f"{target}.o_proj.bias", f"{prefix}.o_proj.bias")
        for name, start, rows in (("q_norm.weight", rank * q, q), ("k_norm.weight", kv_start, kv)):
            if self.qk_norm == "all_heads" and self.engine_norm_rows:
                b.row_part(f"{prefix}.{name}", f"{prefix}.{name}", start, rows)
            elif self.qk_norm != "none":
                b.whole(f"{prefix}.{name}", f"{prefix}.{name}")

    def engine_row(self, cut: EngineCut, worker: int) -> Mapping[str, str]:
        rank = worker % cut.tensor
        kv = rank * self.kv_heads // cut.tensor
        groups = share(self.kv_heads, cut.tensor, rank) if self.kv_heads >= cut.tensor else str(kv)
        return {"heads": share(self.heads, cut.tensor, rank), "kv": groups}

    def flops(self) -> TokenFlops:
        matrices = self.hidden * self.head_dim * ((1 + self._query_parts) * self.heads + 2 * self.kv_heads)
        return TokenFlops(2 * matrices, 4 * self.heads * self.head_dim, window=self.window)

    def saved_bytes(self, work: Work) -> float:
        """Returns the bytes kept on a rank for the backward pass without recomputation, for one micro-batch and one
        layer: input and output of the first norm, queries and keys before the norm and after rotation, values, the
        attention's output, the softmax's normaliser, the rotation's cosines and sines unless fused, and with an
        output gate the gated result and the gate's sigmoid in float32. Cosines and sines are those of queries and of
        keys, or with `policy.spec=local` a set for both, with sines of half the width. All layers share that set, but
        each counts it.

        With an all-to-all of context ranks, the output is kept before and after the exchange. Without it, context ranks
        with sinks or a window keep the keys and values of the whole row. With shared prefixes the keys and values of
        every whole sequence are kept. With `policy.spec=local`, keys and values are views of the fused projection, so
        the whole projection is kept. Transformer Engine copies values, and copies the queries and keys read by a norm.
        """
        tensor, tokens, b = work.parallel.tensor, work.tokens, work.itemsize
        q, v = self.heads * self.head_dim / tensor, self.kv_heads * self.head_dim / tensor
        norm = 2 * tokens / tensor * self.hidden * b  # input and output
        before_norm = 0.0
        if self.qk_norm == "head":
            before_norm = q + v if work.spec == "te" else q
        elif self.qk_norm == "all_heads":  # in float32 before the norm, and the norm's output before the weight
            before_norm = (q + v) * (4 / b + 1)
        normed = before_norm + (v if work.spec == "te" else self._query_parts * q + 2 * v)
        rotation = 0.0
        if work.spec == "local":
            rotation = 1.5 * self.head_dim * self.rope.part
        elif self.rope.yarn or "rope" not in work.fused:
            rotation = 4 * self.head_dim * self.rope.part
        results = 2 * q if work.parallel.by_heads else q
        if work.parallel.context > 1 and not work.parallel.by_heads and (self.sinks or self.window):
            results += 2 * v * work.parallel.context  # `PackedAttention` keeps keys and values of the whole row
        if work.repeated_keys:
            results += 2 * v * (1 + work.repeated_keys)  # gathered for every sequence
        if self.output_gate:
            results += q * (1 + 4 / b)  # the gated result, and the gate's sigmoid in float32
        attention = tokens * b * (normed + (q + v) + results + rotation)
        return norm + attention + tokens * 4 * self.heads / tensor

    def messages(self, parallel: ParallelDims) -> Messages:
        heads = 2 * self.kv_heads + (2 * self.heads if parallel.by_heads else 0)
        return Messages(tensor=self.hidden, context=exchanged(heads * self.head_dim, parallel))

    def kv_bytes_per_token(self, tensor: int, itemsize: int) -> int:
        return 2 * max(1, self.kv_heads // tensor) * self.head_dim * itemsize

    def kv_window(self) -> int | None:
        return self.window

    def engine_width(self, cut: EngineCut) -> float:
        return (self._query_parts * self.heads + 2 * self.kv_heads) * self.head_dim / cut.tensor

    @property
    def _query_parts(self) -> int:
        """Rows of q_proj for each row of a query: 2 with a gate."""
        return 2 if self.output_gate else 1

    def _kinds(self, rows: int) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the weight, and the bias if any, of a fused projection, with shapes."""
        return [("weight", (rows, self.hidden))] + ([("bias", (rows,))] if self.qkv_bias else [])
