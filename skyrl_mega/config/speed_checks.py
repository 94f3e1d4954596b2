"""Checks of the policy's speed settings: `fusions`, `recompute`, `offload_layers`, `moe.dispatcher`, `head`."""

from __future__ import annotations

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.lists import check_unique
from skyrl_mega.config.schema import Config, PolicyConfig
from skyrl_mega.config.values import shown


def check_speed(c: Config) -> None:
    """Rejects speed settings that would be ignored or would change the result.

    Raises:
        UserError: A setting is rejected; names key, value, reason and fix.
    """
    _check_fusions(c)
    _check_recompute(c)
    _check_dispatcher(c)
    _check_head(c)


def _check_head(c: Config) -> None:
    default = PolicyConfig().logit_chunk
    if c.policy.head == "fused" and c.policy.logit_chunk != default:
        raise UserError(
            "policy.head=fused has no logits in memory, and so no chunks of them",
            key="policy.logit_chunk",
            value=c.policy.logit_chunk,
            fix=f"give policy.head=chunked, or policy.logit_chunk={default}",
        )


def _check_recompute(c: Config) -> None:
    # megatron-core 0.16 recomputes norms and activations with Transformer Engine's functions, and crashes without them.
    if c.policy.recompute == "selective" and (without := _no_transformer_engine(c)):
        raise UserError(
            "megatron-core recomputes such parts of Transformer Engine's layers alone, and "
            f"{without}; allowed there is none, moe or full",
            key="policy.recompute",
            value="selective",
        )
    if c.policy.offload_layers and c.policy.options.get("recompute_granularity") == "full":
        raise UserError(
            "policy.options.recompute_granularity=full has layers computed once more, which then "
            "keep nothing; give selective there, or policy.offload_layers=0",
            key="policy.offload_layers",
            value=c.policy.offload_layers,
        )
    if c.policy.recompute == "full" and c.policy.offload_layers:
        raise UserError(
            "with policy.recompute=full a layer keeps its input alone",
            key="policy.offload_layers",
            value=c.policy.offload_layers,
            fix="give policy.recompute=none, selective or moe, or policy.offload_layers=0",
        )


def _check_fusions(c: Config) -> None:
    fusions, moe = c.policy.fusions, c.policy.moe
    if not fusions:
        return
    check_unique("policy.fusions", fusions)
    if without := _no_transformer_engine(c):
        raise UserError(
            f"they are kernels of Transformer Engine's layers, and {without}",
            key="policy.fusions",
            value=shown(fusions),
            fix="leave it out",
        )
    if "router" in fusions and (moe.replay != "off" or moe.aux_loss):
        why = f"policy.moe.replay={moe.replay}" if moe.replay != "off" else f"policy.moe.aux_loss={moe.aux_loss:g}"
        raise UserError(
            f"a fused router chooses by itself, and {why} needs megatron-core's own",
            key="policy.fusions",
            value=shown(fusions),
            fix="leave router out, or policy.fusions, which then is without it",
        )


def _check_dispatcher(c: Config) -> None:
    if c.policy.moe.dispatcher != "deepep":
        return
    setting = "policy.moe.dispatcher = deepep"
    fix = "give policy.moe.dispatcher=alltoall"
    if without := _no_transformer_engine(c):
        raise UserError(f"it has kernels for CUDA alone, and {without}", key=setting, fix=fix)
    if c.model.dtype != "bfloat16":
        raise UserError(
            f"it sends bfloat16, and model.dtype is {c.model.dtype}; {fix}, or model.dtype=bfloat16", key=setting
        )


def _no_transformer_engine(c: Config) -> str:
    """Returns the reason why the policy uses megatron-core's local layers; '' for Transformer Engine or if the device
    is not known yet."""
    if c.policy.spec == "local":
        return "policy.spec is local"
    return "cluster.device is cpu" if c.cluster.device == "cpu" else ""
