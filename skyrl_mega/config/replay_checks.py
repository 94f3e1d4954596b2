"""Checks of router replay's settings (`policy.moe.replay`)."""

from __future__ import annotations

from skyrl_mega.config.derived import engine_data
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.config.values import shown

OFF = "or policy.moe.replay=off"
_RECOMPUTED_ALONE = "a MoE part that is recomputed alone has lost its micro-batch's routes"


def check_replay(c: Config) -> None:
    """Rejects settings for which router replay is impossible or without effect.

    Raises:
        UserError: A setting is rejected; names key, value, reason and fix.
    """
    replay, options = c.policy.moe.replay, c.policy.options
    if replay == "off":
        return
    if options.get("moe_router_fusion"):
        raise UserError(
            f"a fused router chooses by itself, and policy.moe.replay={replay} tells it what to choose",
            key="policy.options.moe_router_fusion",
            value="true",
            fix=f"give false, {OFF}",
        )
    if c.policy.recompute == "moe":
        raise UserError(
            f"{_RECOMPUTED_ALONE} (policy.moe.replay={replay})",
            key="policy.recompute",
            value="moe",
            fix=f"give policy.recompute=full, which recomputes whole layers, {OFF}",
        )
    if options.get("moe_layer_recompute"):
        raise UserError(
            f"{_RECOMPUTED_ALONE} (policy.moe.replay={replay})",
            key="policy.options.moe_layer_recompute",
            value="true",
            fix=f"give false, policy.recompute=full, which recomputes whole layers, {OFF}",
        )
    if "moe" in (options.get("recompute_modules") or ()):
        raise UserError(
            f"{_RECOMPUTED_ALONE} (policy.moe.replay={replay})",
            key="policy.options.recompute_modules",
            value=shown(options["recompute_modules"]),
            fix=f"leave moe out, give policy.recompute=full, which recomputes whole layers, {OFF}",
        )
    one_update = c.data.mini_batch_prompts in (None, c.data.prompts_per_step) and c.data.epochs_per_step == 1
    if replay == "policy" and one_update:
        raise UserError(
            "a step has one mini-batch, whose update has the weights and routes of the old log-probs anyway",
            key="policy.moe.replay",
            value="policy",
            fix=f"give data.mini_batch_prompts below data.prompts_per_step = {c.data.prompts_per_step}"
            f", policy.moe.replay=rollout, {OFF}",
        )
    if replay == "policy" and c.algorithm.old_logprobs != "policy":
        raise UserError(
            f"with algorithm.old_logprobs={c.algorithm.old_logprobs} no pass of the policy "
            "computes old log-probs, whose routes could be replayed",
            key="policy.moe.replay",
            value="policy",
            fix=f"give policy.moe.replay=rollout, {OFF}",
        )
    if replay == "rollout":
        _check_engine(c)


def _check_engine(c: Config) -> None:
    """Rejects engine options for which vLLM reports no routes, or for which routes are not supported here."""
    if (data := engine_data(c.rollout)) > 1:
        raise UserError(
            "its replicas' routes are not gathered (policy.moe.replay=rollout)",
            key="rollout.options.data_parallel_size",
            value=data,
            fix=f"give rollout.engines instead, {OFF}",
        )
    for name, without in (("speculative_config", None), ("enable_prefix_caching", True)):
        value = c.rollout.options.get(name, without)
        if value != without:
            raise UserError(
                "vLLM gives no routes with it (policy.moe.replay=rollout)",
                key=f"rollout.options.{name}",
                value=shown(value),
                fix=f"leave it out, {OFF}",
            )
