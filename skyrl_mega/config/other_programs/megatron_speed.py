"""Megatron's own fields of recomputation, activations in host memory, fused kernels and the dispatcher, as SkyRL, verl
and slime hand them on."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_mega.config.other_programs.entry import Entry, to
from skyrl_mega.config.other_programs.offload import ACTIVATIONS

FINER = "{recompute_granularity:selective,recompute_modules:[core_attn]}"
SELECTIVE = (
    "norms and the experts' activation function; megatron-core's is attention's core unless recompute_modules says "
    f"more: policy.recompute=none 'policy.options={FINER}', whose memory is not planned (docs/speed.md)"
)


def recomputed(prefix: str) -> dict[str, Entry]:
    """Megatron's fields of recomputation and of activations in host memory; `prefix` stands before each, dashes in it
    mean dashes in the names."""
    kinds = {"full": "full", "null": "none"}
    finer = to(
        "policy.recompute",
        note="none, selective, moe or full; other parts or layers: policy.recompute=none and the fields of "
        f"megatron-core, as 'policy.options={FINER}', whose memory is not planned (docs/speed.md)",
    )
    entries = {
        "recompute_granularity": to(
            "policy.recompute",
            note="none, selective, moe or full",
            values={
                **{theirs: to(f"policy.recompute={ours}") for theirs, ours in kinds.items()},
                "selective": to("policy.recompute=selective", note=SELECTIVE),
            },
        ),
        "recompute_method": finer,
        "recompute_num_layers": finer,
        "recompute_modules": finer,
        "cpu_offloading": ACTIVATIONS,
        "cpu_offloading_num_layers": to("policy.offload_layers"),
        "fine_grained_activation_offloading": ACTIVATIONS,
    }
    return _named(prefix, entries)


def fused(prefix: str) -> dict[str, Entry]:
    """Megatron's fields of fused kernels and of the dispatcher, named likewise."""
    ours = {"apply_rope_fusion": "rope", "moe_permute_fusion": "permute", "moe_router_fusion": "router",
            "bias_activation_fusion": "swiglu", "bias_swiglu_fusion": "swiglu"}  # fmt: skip
    entries = {
        theirs: to("policy.fusions", note=f"{name} in the list; null has it wherever it is right")
        for theirs, name in ours.items()
    }
    kinds = {"alltoall": "alltoall", "flex": "deepep"}
    entries["moe_token_dispatcher_type"] = to(
        "policy.moe.dispatcher", values={theirs: to(f"policy.moe.dispatcher={ours}") for theirs, ours in kinds.items()}
    )
    entries["moe_enable_deepep"] = to(
        "policy.moe.dispatcher=deepep", values={"false": to("policy.moe.dispatcher=alltoall")}
    )
    return _named(prefix, entries)


def _named(prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    dashes = prefix.startswith("--")
    return {prefix + (name.replace("_", "-") if dashes else name): entry for name, entry in entries.items()}
