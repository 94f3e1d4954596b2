"""What the settings of speed are in megatron-core: fused kernels, recomputation, the way of tokens to their experts.

docs/speed.md says what each does and when to use it.
"""

from __future__ import annotations

import importlib
from typing import Any

from skyrl_mega.config.derived import fused
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.models.megatron import Spec

FIELDS = {
    "rope": "apply_rope_fusion",
    "permute": "moe_permute_fusion",
    "router": "moe_router_fusion",
    "swiglu": "bias_activation_fusion",
}
"""An entry of `policy.fusions` → the field of megatron-core's TransformerConfig."""

_WHOLE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def fields(policy: PolicyConfig, spec: Spec, experts: bool) -> dict[str, Any]:
    """Arguments of megatron-core's TransformerConfig.

    Args:
        policy: The settings, which `config.speed_checks` has passed.
        spec: Whose layers they are.
        experts: Whether the model has any.
    """
    return fusions(policy, spec, experts) | recompute(policy, experts) | dispatcher(policy)


def fusions(policy: PolicyConfig, spec: Spec, experts: bool) -> dict[str, bool]:
    """Which kernels are fused."""
    wanted = fused(policy, spec, experts)
    return {field: name in wanted for name, field in FIELDS.items()}


def recompute(policy: PolicyConfig, experts: bool) -> dict[str, Any]:
    """What the backward pass computes once more (`policy.recompute`)."""
    match policy.recompute:
        case "full":
            return dict(_WHOLE)
        case "moe":
            return dict(recompute_granularity="selective", recompute_modules=["moe", "mlp"])
        case "selective":
            activation = ["moe_act"] if experts else []
            return dict(recompute_granularity="selective", recompute_modules=["layernorm", *activation])
    return {}


def dispatcher(policy: PolicyConfig) -> dict[str, Any]:
    """How tokens get to their experts (`policy.moe.dispatcher`).

    The default of megatron-core, allgather, refuses rows of varying lengths, in dense models too.
    """
    if policy.moe.dispatcher == "deepep":
        return dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    return dict(moe_token_dispatcher_type="alltoall")


def prepare(policy: PolicyConfig) -> None:
    """Before the model is built.

    Raises:
        UserError: the package deep_ep is asked for, and cannot be imported.
    """
    if policy.moe.dispatcher != "deepep":
        return
    try:
        importlib.import_module("deep_ep")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"policy.moe.dispatcher = deepep: the package deep_ep cannot be imported: {type(error).__name__}: "
            f"{' '.join(str(error).split())}; install it (docs/speed.md), or give policy.moe.dispatcher=alltoall"
        ) from error
    from megatron.core.config import set_experimental_flag

    # Its kernel that unfolds DeepEP's indices of experts; megatron-core's other way masks, and so waits for the GPU.
    set_experimental_flag(True)
