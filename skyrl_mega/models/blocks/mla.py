"""Multi-head latent attention (arXiv:2405.04434, section 2.1), and the norm before it.

Keys and values of all heads are projections of a latent vector per token; a key that all heads share has the rotary
positions. An engine caches only the latent vector and the shared key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from skyrl_mega.models.blocks.gqa import NORM
from skyrl_mega.models.blocks.rope import Yarn, read_scaling
from skyrl_mega.models.config_json import Hf, integer, require, unsupported
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims

YARN = ("yarn", "deepseek_yarn")
"""Values of `rope_type`: the published one, and vLLM's in the configuration of a loaded model."""
CPU_WIDTHS = (512, 64)
"""The only `kv_lora_rank` and `qk_rope_head_dim` that vLLM's decode kernel on a CPU is compiled for."""


@dataclass(frozen=True)
class LatentRope:
    """Rotary positions of latent attention: the base, and YaRN's scaling."""

    base: float
    yarn: Yarn | None = None

    @classmethod
    def read(cls, hf: Hf) -> LatentRope:
        """Returns the positions described by `rope_parameters` (transformers 5), or by `rope_theta` and `rope_scaling`
        (before). Without `rope_theta` the base is `ROPE_THETA`.

        Raises:
            UserError: The scaling is neither none nor YaRN or no mapping, a value of YaRN is missing or not supported,
                the base is no positive number, or only a part of a head is rotated.
        """
        key, values, base, kind = read_scaling(hf)
        for keys in (values, hf):
            require(keys, "partial_rotary_factor", 1.0)
        if kind not in ("default", *YARN):
            raise unsupported(hf, key, "rope_type default or yarn for this model_type")
        return cls(base, Yarn.read(hf, key) if kind in YARN else None)

    def megatron_args(self) -> dict[str, Any]:
        """Returns the keyword arguments of megatron-core's `MLATransformerConfig` for these positions: `rotary_base`
        and `rope_type`, with YaRN also its factor, original length, betas and scales."""
        args: dict[str, Any] = {"rotary_base": self.base, "rope_type": "yarn" if self.yarn else "rope"}
        if self.yarn is None:
            return args
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        return args | {"rotary_scaling_factor": self.yarn.factor, **{name: getattr(self.yarn, name) for name in names}}


@dataclass(frozen=True)
class LatentAttention(Block):
    """Multi-head latent attention, with RMSNorm of the latent vectors."""

    hidden: int
    heads: int
    query_rank: int | None
    """Width of the query's latent vector; None: queries are projected from the hidden states."""
    latent: int
    """Width of the latent vector of keys and values (`kv_lora_rank`)."""
    plain: int
    """Width of a head's own part of query and key (`qk_nope_head_dim`)."""
    rotary: int
    """Width of the part with positions, shared by the keys of all heads (`qk_rope_head_dim`)."""
    value: int
    """Width of a head's value."""
    rope: LatentRope

    @classmethod
    def read(cls, hf: Hf) -> LatentAttention:
        """Returns the attention described by config.json.

        Raises:
            UserError: A key is missing, or a value is not supported.
        """
        heads = integer(hf, "num_attention_heads")
        require(hf, "num_key_value_heads", heads)
        require(hf, "attention_bias", False)
        require(hf, "sliding_window", None)
        require(hf, "rope_interleave", True)
        require(hf, "index_topk", None)  # sparse attention of later models
        return cls(
            hidden=integer(hf, "hidden_size"),
            heads=heads,
            query_rank=None if hf.get("q_lora_rank") is None else integer(hf, "q_lora_rank"),
            latent=integer(hf, "kv_lora_rank"),
            plain=integer(hf, "qk_nope_head_dim"),
            rotary=integer(hf, "qk_rope_head_dim"),
            value=integer(hf, "v_head_dim"),
            rope=LatentRope.read(hf),
        )

    @property
    def query(self) -> int:
        """Width of a head's query and key: `plain` + `rotary`."""
        return self.plain + self.rotary

    def facts(self) -> Mapping[str, int]:
        return {"heads": self.heads}

    def hf_tensors(self, source: str) -> Tensors:
        prefix, queries = f"{source}.self_attn", self.heads * self.query
        shapes: Tensors = {f"{source}.{NORM}": (self.hidden,)}
        if self.query_rank is None:
            shapes[f"{prefix}.q_proj.weight"] = (queries, self.hidden)
        else:
            shapes[f"{prefix}.q_a_proj.weight"] = (self.query_rank, self.hidden)
            shapes[f"{prefix}.q_a_layernorm.weight"] = (self.query_rank,)
            shapes[f"{prefix}.q_b_proj.weight"] = (queries, self.query_rank)
        shapes[f"{prefix}.kv_a_proj_with_mqa.weight"] = (self.latent + self.rotary, self.hidden)
        shapes[f"{prefix}.kv_a_layernorm.weight"] = (self.latent,)
        shapes[f"{prefix}.kv_b_proj.weight"] = (self.heads * (self.plain + self.value), self.latent)
        shapes[f"{prefix}.o_proj.weight"] = (self.hidden, self.heads * self.value)
        return shapes

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        transformer = {
            "multi_latent_attention": True,
            "num_attention_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.latent,
            "qk_head_dim": self.plain,
            "qk_pos_emb_head_dim": self.rotary,
            "v_head_dim": self.value,
            "qk_layernorm": True,
        }
        return MegatronSettings(transformer | self.rope.megatron_args(), {"position_embedding_type": "rope"})

    def layer_modules(self) -> LayerModules:
        return LayerModules()

    def megatron_cuts(self) -> Sequence[Cut]:
        return (Cut("tensor", "attention heads", self.heads, "heads", of_heads=True),)

    def check_fp8(self, key: str) -> None:
        raise without_fp8("FP8 has not been tested with multi-head latent attention", key)

    def check_shared_prefixes(self, key: str) -> None:
        raise UserError(
            "the model has multi-head latent attention, with which it has not been tested",
            key=key,
            value="true",
            fix="give false",
        )

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        """Adds a policy rank's parameters to `b`, with their pieces: the norms and down-projections whole, and the
        rank's heads of the up-projections and of the output projection. With Transformer Engine the norm of a latent
        vector is a parameter of the up-projection."""
        rank, tensor, te = place.coords.tp, place.parallel.tensor, place.spec == "te"
        hf, target_prefix = f"{source}.self_attn", f"{target}.self_attention"

        def by_heads(name: str, tensor_name: str, width: int) -> None:
            rows = self.heads * width // tensor
            b.row_part(f"{target_prefix}.{name}.weight", f"{hf}.{tensor_name}.weight", rank * rows, rows)

        b.whole(f"{target}.input_layernorm.weight", f"{source}.{NORM}")
        values = self.heads * self.value // tensor
        b.column_part(f"{target_prefix}.linear_proj.weight", f"{hf}.o_proj.weight", rank * values, values)
        norms = []
        if self.query_rank is None:
            by_heads("linear_q_proj", "q_proj", self.query)
        else:
            b.whole(f"{target_prefix}.linear_q_down_proj.weight", f"{hf}.q_a_proj.weight")
            if te:
                b.whole(f"{target_prefix}.linear_q_up_proj.layer_norm_weight", f"{hf}.q_a_layernorm.weight")
            by_heads("linear_q_up_proj", "q_b_proj", self.query)
            norms.append(("q_layernorm", "q_a_layernorm"))
        b.whole(f"{target_prefix}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight")
        if te:
            b.whole(f"{target_prefix}.linear_kv_up_proj.layer_norm_weight", f"{hf}.kv_a_layernorm.weight")
        by_heads("linear_kv_up_proj", "kv_b_proj", self.plain + self.value)
        norms.append(("kv_layernorm", "kv_a_layernorm"))
        for name, tensor_name in () if te else norms:
            b.whole(f"{target_prefix}.{name}.weight", f"{hf}.{tensor_name}.weight")

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        return (("attention heads", self.heads),)

    def check_cpu_engine(self, prefix: str, dtype: str) -> None:
        check_cpu_width("latent attention", f"{prefix}kv_lora_rank", self.latent, CPU_WIDTHS[:1])
        check_cpu_width("latent attention", f"{prefix}qk_rope_head_dim", self.rotary, CPU_WIDTHS[1:])

    def engine_arguments(self, device: str) -> Mapping[str, Any]:
        """Returns vLLM's arguments for correct results on a CPU: argument → value; {} on CUDA.

        The arguments select vLLM's reference backend, not picked by default on a machine with AMX, and torch's rotary
        positions: vLLM's CPU kernel reads the three-dimensional queries of latent attention with a wrong stride, and
        log-probs would be off by whole nats.
        """
        if device != "cpu":
            return {}
        return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}, "attention_config": {"backend": "CPU_MLA"}}

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        """Adds an engine worker's load-time parameters to `b`, with their pieces: the norms and down-projections whole,
        those of query and key in a single parameter if the query has one, and the worker's heads of the up-projections
        and of the output projection."""
        rank, prefix = worker % cut.tensor, f"{source}.self_attn"
        b.whole(f"{source}.{NORM}", f"{source}.{NORM}")

        def by_heads(name: str, width: int) -> None:
            rows = self.heads * width // cut.tensor
            b.row_part(f"{prefix}.{name}", f"{prefix}.{name}", rank * rows, rows)

        if self.query_rank is None:
            by_heads("q_proj.weight", self.query)
            b.whole(f"{prefix}.kv_a_proj_with_mqa.weight", f"{prefix}.kv_a_proj_with_mqa.weight")
        else:
            rows = self.query_rank + self.latent + self.rotary
            fused = b.param(f"{prefix}.fused_qkv_a_proj.weight", rows, self.hidden)
            b.rows(fused, 0, f"{prefix}.q_a_proj.weight")
            b.rows(fused, self.query_rank, f"{prefix}.kv_a_proj_with_mqa.weight")
            b.whole(f"{prefix}.q_a_layernorm.weight", f"{prefix}.q_a_layernorm.weight")
            by_heads("q_b_proj.weight", self.query)
        b.whole(f"{prefix}.kv_a_layernorm.weight", f"{prefix}.kv_a_layernorm.weight")
        by_heads("kv_b_proj.weight", self.plain + self.value)
        values = self.heads * self.value // cut.tensor
        b.column_part(f"{prefix}.o_proj.weight", f"{prefix}.o_proj.weight", rank * values, values)

    def engine_row(self, cut: EngineCut, worker: int) -> Mapping[str, str]:
        return {"heads": share(self.heads, cut.tensor, worker % cut.tensor)}

    def flops(self) -> TokenFlops:
        queries = self.heads * self.query
        matrices = self.hidden * queries
        if self.query_rank is not None:
            matrices = self.query_rank * (self.hidden + queries)
        matrices += self.hidden * (self.latent + self.rotary) + self.latent * self.heads * (self.plain + self.value)
        matrices += self.heads * self.value * self.hidden
        # An engine decodes in the space of the latent vectors: queries and results meet the up-projection instead.
        decoding = 2 * self.heads * (2 * self.latent + self.rotary)
        return TokenFlops(2 * matrices, 2 * self.heads * (self.query + self.value), decoding)

    def saved_bytes(self, work: Work) -> float:
        """Returns the bytes kept on a rank for the backward pass without recomputation, for one micro-batch and one
        layer: input and output of the first norm, the latent vectors before and after their norms, queries, keys,
        values, the attention's output, the softmax's normaliser, and the rotation's cosines and sines."""
        tensor, tokens, b = work.parallel.tensor, work.tokens, work.itemsize
        norm = 2 * tokens / tensor * self.hidden * b  # input and output
        latents = 2 * ((self.query_rank or 0) + self.latent) + self.rotary
        results = 2 if work.parallel.by_heads else 1  # with an all-to-all, before and after the exchange
        heads = self.heads / tensor * (2 * self.query + (1 + results) * self.value)
        return norm + tokens * b * (latents / tensor + heads + 4 * self.rotary) + tokens * 4 * self.heads / tensor

    def kept_bytes(self, work: Work, recompute: str) -> float:
        """Returns the bytes kept on a rank for the backward pass, for one micro-batch and one layer: with "selective"
        all but the first norm's output, which is recomputed; with "moe" and "none" all of `saved_bytes`."""
        norm = work.tokens / work.parallel.tensor * self.hidden * work.itemsize
        return self.saved_bytes(work) - (norm if recompute == "selective" else 0.0)

    def messages(self, parallel: ParallelDims) -> Messages:
        # The latent vectors are gathered before the up-projections, the shared key before the attention.
        gathered = (self.hidden if self.query_rank is None else self.query_rank) + self.latent + self.rotary
        width = (2 if parallel.by_heads else 1) * (self.query + self.value)  # q, k, v and the result, or k and v
        return Messages(tensor=(gathered + self.hidden) / 2, context=exchanged(self.heads * width, parallel))

    def kv_bytes_per_token(self, tensor: int, itemsize: int) -> int:
        """Returns the bytes of a token in the KV cache of an engine worker, for a single layer: the latent vector and
        the shared key. Every worker caches both whole, so the result does not depend on `tensor`."""
        return (self.latent + self.rotary) * itemsize

    def engine_width(self, cut: EngineCut) -> float:
        latents = (self.query_rank or 0) + self.latent + self.rotary
        return latents + self.heads * (2 * self.query + 2 * self.value) / cut.tensor
