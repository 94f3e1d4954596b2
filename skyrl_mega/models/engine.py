"""vLLM 0.32: where each parameter of a worker, as it is at load time, lies in the Hugging Face tensors.

Load-time parameters are the canonical local shard, before a kernel's own re-packing: the update path restores them,
fills them and processes the layer again.
"""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.layout.box import Shard
from skyrl_mega.models import huggingface
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.pieces import ShardBuilder

BLOCK = 128
"""Rows and columns of what has one scale in an FP8 checkpoint (`kernels.block_fp8`)."""
VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before cutting it."""


def check(d: Decoder, tensor: int, expert_parallel: bool = False, key: str = "rollout.tensor", data: int = 1) -> None:
    """Refuses sizes that vLLM cannot cut this model into: tensor parallel, and data parallel for its experts.

    Raises:
        UserError: naming `key`, its value and what is allowed.
    """
    padded = -(-d.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    cuts = [("attention heads", d.heads), ("rows of the padded vocabulary", padded)]
    if d.kv_heads >= tensor:
        cuts.append(("key/value heads", d.kv_heads))
    elif tensor % d.kv_heads:
        raise UserError(f"{key}: {tensor} is not a multiple of the model's {d.kv_heads} key/value heads; choose one")
    if not d.experts or len(d.experts.layers) < d.layers:
        cuts.append(("columns of a dense layer (intermediate_size)", d.ffn))
    if d.experts:
        workers = tensor * data
        if workers > d.experts.count:
            raise UserError(f"{key}: {workers} workers are above the model's {d.experts.count} experts; lower it")
        if not expert_parallel and d.experts.width % workers:
            raise UserError(
                f"{key}: {workers} workers do not divide the model's {d.experts.width} columns of an expert "
                f"(moe_intermediate_size); choose a divisor of {d.experts.width}"
            )
    for what, total in cuts:
        if total % tensor:
            raise UserError(f"{key}: {tensor} does not divide the model's {total} {what}; choose a divisor of {total}")


def check_blocks(d: Decoder, tensor: int, expert_parallel: bool, key: str = "rollout.tensor", data: int = 1) -> None:
    """Refuses a cut of an FP8 checkpoint's parameters through their blocks, of which each has one scale.

    vLLM then stops in a dense layer, and makes smaller blocks of experts, for which no wire brings scales.

    Raises:
        UserError: naming `key`, its value and what is allowed.
    """
    lacking = _cut_blocks(d, tensor, expert_parallel, data)
    if lacking is None:
        return
    allowed = []
    for size in range(1, d.heads + 1):
        try:
            check(d, size, expert_parallel, key, data)
        except UserError:
            continue
        if _cut_blocks(d, size, expert_parallel, data) is None:
            allowed.append(str(size))
    allows = f"{key} {', '.join(allowed)}" if allowed else f"no {key} with this model"
    raise UserError(
        f"{key}: {tensor} leaves {lacking} to a worker, and engines with the parameters of an FP8 checkpoint "
        f"(rollout.options.hf_overrides.quantization_config) need multiples of {BLOCK}; allowed is {allows}, or "
        "rollout.options.quantization=fp8_per_block without hf_overrides"
    )


def _cut_blocks(d: Decoder, tensor: int, expert_parallel: bool, data: int) -> str | None:
    """What of a worker's part is no multiple of a block; None where all is."""
    parts = {
        "query columns": d.heads // tensor * d.head_dim,
        "key and value columns": max(1, d.kv_heads // tensor) * d.head_dim,
    }
    if not d.experts or len(d.experts.layers) < d.layers:
        parts["columns of a dense layer"] = d.ffn // tensor
    if d.experts:
        parts["columns of an expert"] = d.experts.width // (1 if expert_parallel else tensor * data)
    return next((f"{size} {name}" for name, size in parts.items() if size % BLOCK), None)


def shard(
    d: Decoder,
    tensor: int,
    rank: int,
    expert_parallel: bool = False,
    data: int = 1,
    tensors: dict[str, tuple[int, ...]] | None = None,
) -> Shard:
    """The parameters of worker `rank` of an engine: `data` replicas, one after the other, of `tensor` workers.

    Experts see all `data · tensor` workers as one group: each is cut by columns over them, or with `expert_parallel`
    whole experts are dealt to them in contiguous runs. All else is cut over `tensor` and replicated over `data`.
    `tensors` is `huggingface.tensors(d)`, for who has it at hand.
    """
    b = ShardBuilder(tensors or huggingface.tensors(d))
    workers, worker = data * tensor, rank
    rank %= tensor
    _vocabulary(b, d, huggingface.EMBEDDING, tensor, rank)
    for i in range(d.layers):
        layer = f"model.layers.{i}"
        b.whole(f"{layer}.input_layernorm.weight", f"{layer}.input_layernorm.weight")
        _attention(b, d, f"{layer}.self_attn", tensor, rank)
        b.whole(f"{layer}.post_attention_layernorm.weight", f"{layer}.post_attention_layernorm.weight")
        if d.is_moe(i):
            _experts(b, d, f"{layer}.mlp", workers, worker, expert_parallel)
        else:
            width = d.ffn // tensor
            fused = b.param(f"{layer}.mlp.gate_up_proj.weight", 2 * width, d.hidden)
            b.rows(fused, 0, f"{layer}.mlp.gate_proj.weight", rank * width, width)
            b.rows(fused, width, f"{layer}.mlp.up_proj.weight", rank * width, width)
            down = b.param(f"{layer}.mlp.down_proj.weight", d.hidden, width)
            b.columns(down, f"{layer}.mlp.down_proj.weight", rank * width, width)
    b.whole(huggingface.FINAL_NORM, huggingface.FINAL_NORM)
    if not d.tied:
        _vocabulary(b, d, huggingface.HEAD, tensor, rank)
    return b.shard()


def _vocabulary(b: ShardBuilder, d: Decoder, name: str, tensor: int, rank: int) -> None:
    """Rows of the padded vocabulary; the padding is covered by no piece."""
    rows = -(-d.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // tensor
    b.param(name, rows, d.hidden)
    if rank * rows < d.vocab:
        b.rows(name, 0, name, rank * rows, min(rows, d.vocab - rank * rows))


def _attention(b: ShardBuilder, d: Decoder, prefix: str, tensor: int, rank: int) -> None:
    """qkv_proj is this worker's q, k and v rows, one after the other; with few kv heads, several workers share one."""
    q = d.heads // tensor * d.head_dim
    kv_heads = max(1, d.kv_heads // tensor)
    kv = kv_heads * d.head_dim
    kv_start = rank * kv if d.kv_heads >= tensor else rank // (tensor // d.kv_heads) * kv
    kinds = [("weight", (q + 2 * kv, d.hidden))] + ([("bias", (q + 2 * kv,))] if d.qkv_bias else [])
    for kind, shape in kinds:
        fused = b.param(f"{prefix}.qkv_proj.{kind}", *shape)
        b.rows(fused, 0, f"{prefix}.q_proj.{kind}", rank * q, q)
        b.rows(fused, q, f"{prefix}.k_proj.{kind}", kv_start, kv)
        b.rows(fused, q + kv, f"{prefix}.v_proj.{kind}", kv_start, kv)
    b.columns(b.param(f"{prefix}.o_proj.weight", d.hidden, q), f"{prefix}.o_proj.weight", rank * q, q)
    if d.qk_norm:
        b.whole(f"{prefix}.q_norm.weight", f"{prefix}.q_norm.weight")
        b.whole(f"{prefix}.k_norm.weight", f"{prefix}.k_norm.weight")


def _experts(b: ShardBuilder, d: Decoder, prefix: str, workers: int, worker: int, expert_parallel: bool) -> None:
    """w13 [experts, gate rows then up rows, hidden], w2 [experts, hidden, columns]."""
    assert d.experts is not None
    b.whole(f"{prefix}.gate.weight", f"{prefix}.gate.weight")
    if expert_parallel:
        base, more = divmod(d.experts.count, workers)
        first = worker * base + min(worker, more)
        held, width, start = range(first, first + base + (worker < more)), d.experts.width, 0
    else:
        width = d.experts.width // workers
        held, start = range(d.experts.count), worker * width
    w13 = b.param(f"{prefix}.experts.routed_experts.w13_weight", len(held), 2 * width, d.hidden)
    w2 = b.param(f"{prefix}.experts.routed_experts.w2_weight", len(held), d.hidden, width)
    for local, expert in enumerate(held):
        b.rows(w13, 0, f"{prefix}.experts.{expert}.gate_proj.weight", start, width, stack=(local,))
        b.rows(w13, width, f"{prefix}.experts.{expert}.up_proj.weight", start, width, stack=(local,))
        b.columns(w2, f"{prefix}.experts.{expert}.down_proj.weight", start, width, stack=(local,))
