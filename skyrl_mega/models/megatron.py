"""megatron-core 0.16: the settings of its GPTModel, and where each of its parameters lies in the Hugging Face tensors.

Two layer specs name parameters differently: `local` is megatron-core's own; `te` is Transformer Engine's, which fuses
the norm before a linear layer into it and keeps a rank's experts in one grouped linear layer.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_mega.config.errors import UserError
from skyrl_mega.layout.box import Shard
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models import huggingface
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.pieces import ShardBuilder

Spec = Literal["local", "te"]

TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-torch")
"""Its packages: Python, and what is compiled for torch. The compiled module lies within the first one's folder, and is
found only once that is imported; hence packages."""


def layer_spec(asked: str, device: str) -> Spec:
    """The spec that `policy.spec` (`auto`, `te` or `local`) means on a device (`cpu` or `cuda`).

    It follows from the settings alone, so that driver, ranks and plans agree whatever each of them can import.
    """
    if asked == "auto":
        return "te" if device == "cuda" else "local"
    return "te" if asked == "te" else "local"


def require_transformer_engine() -> None:
    """Refuses the `te` spec where Transformer Engine or its compiled extension cannot be imported.

    Asked before megatron-core is imported, which itself goes on without Transformer Engine on an ImportError, and on
    anything else (a missing library, another cuDNN) fails to be imported at all.

    Raises:
        UserError: what cannot be imported, and why.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"policy.spec = te (which auto means on CUDA): Transformer Engine cannot be imported: "
            f"{type(error).__name__}: {' '.join(str(error).split())}; install it with `make cuda`, or give "
            "policy.spec=local, which trains without it, slower"
        ) from error


@dataclass(frozen=True)
class MegatronSettings:
    """What the architecture fixes; sizes of the parallel grid, types and recipes are the policy's."""

    transformer: dict[str, Any]
    """Keyword arguments of `TransformerConfig`."""
    gpt: dict[str, Any]
    """Keyword arguments of `GPTModel`; `vocab_size` is the tokenizer's, pad it with `padded_vocab`."""


def settings(d: Decoder) -> MegatronSettings:
    """Keyword arguments that make megatron-core compute this model."""
    from torch.nn.functional import silu

    transformer: dict[str, Any] = {
        "num_layers": d.layers,
        "hidden_size": d.hidden,
        "ffn_hidden_size": d.ffn,
        "num_attention_heads": d.heads,
        "num_query_groups": d.kv_heads,
        "kv_channels": d.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": d.norm_eps,
        "qk_layernorm": d.qk_norm,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": d.qkv_bias,
    }
    if d.experts:
        transformer |= {
            "num_moe_experts": d.experts.count,
            "moe_router_topk": d.experts.per_token,
            "moe_ffn_hidden_size": d.experts.width,
            # A softmax over all experts, renormalised over the chosen ones, is the softmax of the chosen logits.
            "moe_router_pre_softmax": not d.experts.renormalize,
            "moe_layer_freq": [int(d.is_moe(i)) for i in range(d.layers)],
        }
    gpt: dict[str, Any] = {
        "vocab_size": d.vocab,
        "max_sequence_length": d.max_length,
        "position_embedding_type": "rope",
        "rotary_base": d.rope.base,
        "share_embeddings_and_output_weights": d.tied,
    }
    if d.rope.scaling == "llama3":
        gpt |= {"rope_scaling": True, "rope_scaling_factor": d.rope.factor}
    elif d.rope.scaling == "linear":
        gpt["seq_len_interpolation_factor"] = d.rope.factor
    return MegatronSettings(transformer, gpt)


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows of Megatron's embedding: the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-vocab // tensor) * tensor


def check(d: Decoder, parallel: Parallel, key: str = "policy.layout") -> None:
    """Refuses a layout that this model cannot be cut into, or that would train wrong.

    Raises:
        UserError: naming the setting under `key`, its value and what is allowed.
    """

    def divides(name: str, size: int, what: str, total: int) -> None:
        if total % size:
            raise UserError(
                f"{key}.{name}: {size} does not divide the model's {total} {what}; choose a divisor of {total}"
            )

    divides("tensor", parallel.tensor, "attention heads", d.heads)
    divides("tensor", parallel.tensor, "key/value heads", d.kv_heads)
    if not d.experts or len(d.experts.layers) < d.layers:
        divides("tensor", parallel.tensor, "columns of a dense layer (intermediate_size)", d.ffn)
    if parallel.tensor > 1:
        divides("tensor", parallel.tensor, "hidden size", d.hidden)
    _check_stages(d, parallel, key)
    if d.experts:
        divides("expert", parallel.expert, "experts", d.experts.count)
        divides(
            "expert_tensor", parallel.expert_tensor, "columns of an expert (moe_intermediate_size)", d.experts.width
        )
        if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
            # Without expert parallelism megatron-core 0.16 gives experts the data-parallel groups of the dense layers
            # (`allreduce` in tensor_parallel/layers.py). With fewer tensor ranks than those, it never sums gradients
            # of replicated experts; with more, it sums those of different columns and gathers them over one another.
            side = "below" if parallel.expert_tensor < parallel.tensor else "above"
            raise UserError(
                f"{key}.expert_tensor: {parallel.expert_tensor} {side} tensor {parallel.tensor} with expert 1 trains "
                f"wrong in megatron-core 0.16; give expert_tensor {parallel.tensor} or expert above 1"
            )
        if d.experts.per_token == 1 and d.experts.renormalize:
            raise UserError(
                "config.json: num_experts_per_tok 1 with norm_topk_prob gives the router no gradient; choose another "
                "model"
            )
    elif parallel.expert > 1:
        raise UserError(f"{key}.expert: {parallel.expert} needs a model with experts; give 1")


def _check_stages(d: Decoder, parallel: Parallel, key: str) -> None:
    """Every stage has layers, the stages between the first and the last equally many, and each whole chunks."""
    uneven = [
        f"{name} {layers}"
        for name in ("first_stage_layers", "last_stage_layers")
        if (layers := getattr(parallel, name)) is not None
    ]
    try:
        parallel.stage_sizes(d.layers)
    except ValueError as error:
        if uneven:
            raise UserError(
                f"{key}.{uneven[0].split()[0]}: {' and '.join(uneven)} do not fit the model's {d.layers} layers on "
                f"pipeline {parallel.pipeline} × virtual_pipeline {parallel.virtual_pipeline}: {error}; choose others"
            ) from None
        if d.layers % parallel.pipeline:
            raise UserError(
                f"{key}.pipeline: {parallel.pipeline} does not divide the model's {d.layers} layers; choose a divisor "
                f"of {d.layers}, or give {key}.first_stage_layers or last_stage_layers"
            ) from None
        slices = parallel.pipeline * parallel.virtual_pipeline
        raise UserError(
            f"{key}.virtual_pipeline: {parallel.virtual_pipeline} × pipeline {parallel.pipeline} = {slices} does not "
            f"divide the model's {d.layers} layers; choose sizes whose product divides {d.layers}"
        ) from None


def shard(
    d: Decoder, parallel: Parallel, rank: int, spec: Spec, tensors: dict[str, tuple[int, ...]] | None = None
) -> Shard:
    """The parameters of `rank`, as `"<chunk>.<name in GPTModel.named_parameters()>"` and in that order.

    Ranks that differ in dp, cp or edp only hold the same. `tensors` is `huggingface.tensors(d)`, for who has it.
    """
    at = parallel.coordinates(rank)
    b = ShardBuilder(tensors or huggingface.tensors(d))
    for chunk in range(parallel.virtual_pipeline):
        first, last = parallel.holds_embedding(at.pp, chunk), parallel.holds_head(at.pp, chunk)
        if first:
            _vocabulary(
                b, d, f"{chunk}.embedding.word_embeddings.weight", huggingface.EMBEDDING, parallel.tensor, at.tp
            )
        for local, layer in enumerate(parallel.stage_layers(d.layers, at.pp, chunk)):
            here, there = f"{chunk}.decoder.layers.{local}", f"model.layers.{layer}"
            _attention(b, d, here, there, parallel.tensor, at.tp, spec)
            if d.is_moe(layer):
                _experts(b, d, here, there, parallel, at.ep, at.etp, spec)
            else:
                _dense(b, d, here, there, parallel.tensor, at.tp, spec)
        if last:
            b.whole(f"{chunk}.decoder.final_layernorm.weight", huggingface.FINAL_NORM)
            # A tied head is the embedding itself where both are on one stage, else a second copy of it.
            if not (d.tied and first):
                source = huggingface.EMBEDDING if d.tied else huggingface.HEAD
                _vocabulary(b, d, f"{chunk}.output_layer.weight", source, parallel.tensor, at.tp)
    return b.shard()


def _vocabulary(b: ShardBuilder, d: Decoder, param: str, tensor: str, size: int, tp: int) -> None:
    """Rows of the padded vocabulary; the padding is covered by no piece."""
    rows = padded_vocab(d.vocab, size) // size
    start = tp * rows
    b.param(param, rows, d.hidden)
    if start < d.vocab:
        b.rows(param, 0, tensor, start, min(rows, d.vocab - start))


def _attention(b: ShardBuilder, d: Decoder, here: str, there: str, size: int, tp: int, spec: Spec) -> None:
    """Rows of linear_qkv are interleaved by query group: a group's query heads, its key head, its value head."""
    columns = d.heads * d.head_dim // size
    if spec == "local":
        b.whole(f"{here}.input_layernorm.weight", f"{there}.input_layernorm.weight")
    param = b.param(f"{here}.self_attention.linear_proj.weight", d.hidden, columns)
    b.columns(param, f"{there}.self_attn.o_proj.weight", tp * columns, columns)
    if spec == "te":
        b.whole(f"{here}.self_attention.linear_qkv.layer_norm_weight", f"{there}.input_layernorm.weight")
    groups, width = d.kv_heads // size, d.heads // d.kv_heads * d.head_dim
    rows = groups * (width + 2 * d.head_dim)
    kinds = [("weight", (rows, d.hidden))] + ([("bias", (rows,))] if d.qkv_bias else [])
    for kind, shape in kinds:
        param = b.param(f"{here}.self_attention.linear_qkv.{kind}", *shape)
        for local in range(groups):
            group, at = tp * groups + local, local * (width + 2 * d.head_dim)
            b.rows(param, at, f"{there}.self_attn.q_proj.{kind}", group * width, width)
            b.rows(param, at + width, f"{there}.self_attn.k_proj.{kind}", group * d.head_dim, d.head_dim)
            b.rows(param, at + width + d.head_dim, f"{there}.self_attn.v_proj.{kind}", group * d.head_dim, d.head_dim)
    if d.qk_norm:
        b.whole(f"{here}.self_attention.q_layernorm.weight", f"{there}.self_attn.q_norm.weight")
        b.whole(f"{here}.self_attention.k_layernorm.weight", f"{there}.self_attn.k_norm.weight")


def _dense(b: ShardBuilder, d: Decoder, here: str, there: str, size: int, tp: int, spec: Spec) -> None:
    norm = "mlp.linear_fc1.layer_norm_weight" if spec == "te" else "pre_mlp_layernorm.weight"
    b.whole(f"{here}.{norm}", f"{there}.post_attention_layernorm.weight")
    _gated(
        b, f"{here}.mlp.linear_fc1.weight", f"{here}.mlp.linear_fc2.weight", f"{there}.mlp", d.ffn // size, d.hidden, tp
    )


def _experts(
    b: ShardBuilder, d: Decoder, here: str, there: str, parallel: Parallel, ep: int, etp: int, spec: Spec
) -> None:
    assert d.experts is not None
    b.whole(f"{here}.pre_mlp_layernorm.weight", f"{there}.post_attention_layernorm.weight")
    b.whole(f"{here}.mlp.router.weight", f"{there}.mlp.gate.weight")
    count, width = d.experts.count // parallel.expert, d.experts.width // parallel.expert_tensor
    experts = f"{here}.mlp.experts"
    if spec == "te":
        names = [(f"{experts}.linear_fc1.weight{i}", f"{experts}.linear_fc2.weight{i}") for i in range(count)]
        for fc1, _ in names:  # a grouped layer holds all its experts' weights, before the next one does
            b.param(fc1, 2 * width, d.hidden)
    else:
        each = (f"{experts}.local_experts.{i}" for i in range(count))
        names = [(f"{one}.linear_fc1.weight", f"{one}.linear_fc2.weight") for one in each]
    for local, (fc1, fc2) in enumerate(names):
        _gated(b, fc1, fc2, f"{there}.mlp.experts.{ep * count + local}", width, d.hidden, etp)


def _gated(b: ShardBuilder, fc1: str, fc2: str, there: str, width: int, hidden: int, tp: int) -> None:
    """fc1 holds this rank's rows of gate, then those of up; fc2 its columns of down."""
    b.param(fc1, 2 * width, hidden)
    b.rows(fc1, 0, f"{there}.gate_proj.weight", tp * width, width)
    b.rows(fc1, width, f"{there}.up_proj.weight", tp * width, width)
    b.columns(b.param(fc2, hidden, width), f"{there}.down_proj.weight", tp * width, width)
