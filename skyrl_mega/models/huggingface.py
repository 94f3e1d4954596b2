"""The tensors of a Hugging Face checkpoint on disk, by name and shape. They are the weights' global identities."""

from __future__ import annotations

from skyrl_mega.models.decoder import Decoder

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROUTER = ".mlp.gate.weight"
"""What a router's name ends with."""


def tensors(d: Decoder) -> dict[str, tuple[int, ...]]:
    """Name → shape. Linear weights are [out, in]; experts are separate; a tied head has no tensor of its own."""
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (d.vocab, d.hidden)}
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    for i in range(d.layers):
        layer = f"model.layers.{i}"
        found[f"{layer}.input_layernorm.weight"] = (d.hidden,)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            found[f"{layer}.self_attn.{name}.weight"] = (rows, d.hidden)
            if d.qkv_bias:
                found[f"{layer}.self_attn.{name}.bias"] = (rows,)
        if d.qk_norm:
            found[f"{layer}.self_attn.q_norm.weight"] = (d.head_dim,)
            found[f"{layer}.self_attn.k_norm.weight"] = (d.head_dim,)
        found[f"{layer}.self_attn.o_proj.weight"] = (d.hidden, q)
        found[f"{layer}.post_attention_layernorm.weight"] = (d.hidden,)
        if d.experts and d.is_moe(i):
            found[layer + ROUTER] = (d.experts.count, d.hidden)
            for e in range(d.experts.count):
                found |= _gated(f"{layer}.mlp.experts.{e}", d.experts.width, d.hidden)
        else:
            found |= _gated(f"{layer}.mlp", d.ffn, d.hidden)
    found[FINAL_NORM] = (d.hidden,)
    if not d.tied:
        found[HEAD] = (d.vocab, d.hidden)
    return found


def _gated(prefix: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """down(silu(gate(x)) * up(x))."""
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }
