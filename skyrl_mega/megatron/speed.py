"""The speed settings in megatron-core's terms: fused kernels, recomputation, dispatch of tokens to experts.

docs/speed.md describes each setting and when to use it.
"""

from __future__ import annotations

import importlib
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import fused
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.models.megatron import Spec

FIELDS = {
    "rope": "apply_rope_fusion",
    "permute": "moe_permute_fusion",
    "router": "moe_router_fusion",
    "swiglu": "bias_activation_fusion",
}
"""Entry of `policy.fusions` → field of megatron-core's TransformerConfig."""

_WHOLE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def fields(policy: PolicyConfig, spec: Spec, experts: bool) -> dict[str, Any]:
    """Returns arguments of megatron-core's TransformerConfig for fusions, recomputation and the dispatcher of experts.

    Args:
        policy: The settings, already checked by `config.checks.policy`.
        spec: Kind of the layers: "te" for Transformer Engine's, "local" for megatron-core's own.
        experts: True for a model with experts.
    """
    return fusions(policy, spec, experts) | recompute(policy, experts) | dispatcher(policy)


def fusions(policy: PolicyConfig, spec: Spec, experts: bool) -> dict[str, bool]:
    """Returns field name → bool for all fields in `FIELDS` of megatron-core's TransformerConfig: True for a fused
    kernel. The arguments are those of `fields`."""
    wanted = fused(policy, spec, experts)
    return {field: name in wanted for name, field in FIELDS.items()}


def recompute(policy: PolicyConfig, experts: bool) -> dict[str, Any]:
    """Returns the arguments of megatron-core's TransformerConfig for `policy.recompute`; {} for `none`. `experts` is
    True for a model with experts."""
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
    """Returns the arguments of megatron-core's TransformerConfig for sending tokens to experts
    (`policy.moe.dispatcher`): flex with DeepEP for "deepep", else alltoall.

    megatron-core's default, allgather, refuses rows of varying lengths, even in dense models.
    """
    if policy.moe.dispatcher == "deepep":
        return dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    return dict(moe_token_dispatcher_type="alltoall")


def prepare(policy: PolicyConfig) -> None:
    """Imports and enables DeepEP with `policy.moe.dispatcher=deepep`, else does nothing. Call before building the
    model.

    Raises:
        UserError: The settings require the package deep_ep, but the import fails.
    """
    if policy.moe.dispatcher != "deepep":
        return
    try:
        importlib.import_module("deep_ep")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"the package deep_ep cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}",
            key="policy.moe.dispatcher",
            value="deepep",
            fix="install it (docs/speed.md), or give policy.moe.dispatcher=alltoall",
        ) from error
    from megatron.core.config import set_experimental_flag

    # Enables the kernel for DeepEP's expert indices; megatron-core's alternative uses a mask and waits for the GPU.
    set_experimental_flag(True)
