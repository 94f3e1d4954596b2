"""Rules between the policy's settings and data, model, device and engines: replay of routes, and speed."""

from __future__ import annotations

from skyrl_mega.config.derived import engine_data, planned_device
from skyrl_mega.config.drafts import draft_method
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config, PolicyConfig
from skyrl_mega.config.schema.fields import Refusals, duplicates

OFF = "or policy.moe.replay=off"


@raising
def check_replay(c: Config) -> Refusals:
    """Raises a UserError if `policy.moe.replay` is impossible with other settings, or has no effect with them; not for
    `off`.

    Refuses a fused router and a MoE part recomputed by itself; with `policy` also a single optimizer step per step
    and `algorithm.old_logprobs` other than `policy`; with `rollout` also data-parallel replicas in an engine, engines
    without prefix caching, `mtp` drafts, and on GPUs `suffix` drafts.
    """
    replay, options = c.policy.moe.replay, c.policy.options
    if replay == "off":
        return
    alone = f"a MoE part recomputed by itself cannot replay its micro-batch's routes (policy.moe.replay={replay})"
    full = "policy.recompute=full, which recomputes whole layers"
    if options.get("moe_router_fusion"):
        why = f"a fused router chooses by itself, and policy.moe.replay={replay} tells it what to choose"
        yield "policy.options.moe_router_fusion", why, f"give false, {OFF}"
    if c.policy.recompute == "moe":
        yield "policy.recompute", alone, f"give {full}, {OFF}"
    if options.get("moe_layer_recompute"):
        yield "policy.options.moe_layer_recompute", alone, f"give false, {full}, {OFF}"
    if "moe" in (options.get("recompute_modules") or ()):
        yield "policy.options.recompute_modules", alone, f"leave moe out, give {full}, {OFF}"
    if replay == "policy" and c.data.one_update:
        yield (
            "policy.moe.replay",
            "with one mini-batch a step, the update has the weights and routes of the old log-probs anyway",
            f"give data.mini_batch_prompts below data.prompts_per_step = {c.data.prompts_per_step}, "
            f"policy.moe.replay=rollout, {OFF}",
        )
    if replay == "policy" and c.algorithm.old_logprobs != "policy":
        yield (
            "policy.moe.replay",
            f"with algorithm.old_logprobs={c.algorithm.old_logprobs} no pass of the policy computes old log-probs, "
            "whose routes could be replayed",
            f"give policy.moe.replay=rollout, {OFF}",
        )
    if replay != "rollout":
        return
    if engine_data(c.rollout) > 1:
        why = "its replicas' routes are not gathered (policy.moe.replay=rollout)"
        yield "rollout.options.data_parallel_size", why, f"give rollout.engines instead, {OFF}"
    if c.rollout.options.get("enable_prefix_caching", True) is not True:
        why = "vLLM gives no routes with it (policy.moe.replay=rollout)"
        yield "rollout.options.enable_prefix_caching", why, f"leave it out, {OFF}"
    if draft_method(c.rollout) == "suffix" and planned_device(c) == "cuda":
        why = "vLLM's model runner that returns routes on a GPU has no suffix drafts (policy.moe.replay=rollout)"
        yield "rollout.drafts.method", why, f"give rollout.drafts.method=ngram, {OFF}"
    if draft_method(c.rollout) == "mtp":
        why = "its layers have experts of their own, not tried with recording (policy.moe.replay=rollout)"
        yield "rollout.drafts.method", why, f"give rollout.drafts.method=ngram, {OFF}", "mtp"


@raising
def check_speed(c: Config) -> Refusals:
    """Raises a UserError for a setting of speed or memory of the policy that is ignored or fails with other settings.

    Refuses `fusions` listed twice or without Transformer Engine's layers, and fusion `router` with replayed routes
    or an auxiliary loss; `recompute=selective` without these layers; `offload_layers` with full recomputation;
    `moe.dispatcher=deepep` without these layers or in another type than bfloat16; `logit_chunk` with `head=fused`;
    `share_prefixes` with context parallelism, an auxiliary loss, or routes replayed from the policy.
    """
    p, local, default = c.policy, _no_transformer_engine(c), PolicyConfig().logit_chunk
    yield from _fusion_refusals(c, local)
    yield from _shared_prefix_refusals(p)
    # megatron-core 0.16 recomputes norms and activations with Transformer Engine's functions, and crashes without them.
    if p.recompute == "selective" and local:
        yield (
            "policy.recompute",
            f"megatron-core recomputes such parts of Transformer Engine's layers alone, and {local}; allowed there is "
            "none, moe or full",
        )
    if p.offload_layers and p.options.get("recompute_granularity") == "full":
        yield (
            "policy.offload_layers",
            "policy.options.recompute_granularity=full has layers computed once more, which then keep nothing; give "
            "selective there, or policy.offload_layers=0",
        )
    if p.recompute == "full" and p.offload_layers:
        why = "with policy.recompute=full a layer keeps its input alone"
        yield "policy.offload_layers", why, "give policy.recompute=none, selective or moe, or policy.offload_layers=0"
    if p.moe.dispatcher == "deepep" and local:
        why = f"it has kernels for CUDA alone, and {local}"
        yield "policy.moe.dispatcher", why, "give policy.moe.dispatcher=alltoall"
    if p.moe.dispatcher == "deepep" and c.model.dtype != "bfloat16":
        why = f"it sends bfloat16, and model.dtype is {c.model.dtype}; give policy.moe.dispatcher=alltoall, or "
        yield "policy.moe.dispatcher", f"{why}model.dtype=bfloat16"
    if p.head == "fused" and p.logit_chunk != default:
        why = "policy.head=fused has no logits in memory, and so no chunks of them"
        yield "policy.logit_chunk", why, f"give policy.head=chunked, or policy.logit_chunk={default}"


def _fusion_refusals(c: Config, local: str) -> Refusals:
    fusions, moe = c.policy.fusions, c.policy.moe
    if not fusions:
        return
    yield from duplicates("policy.fusions", fusions)
    if local:
        yield "policy.fusions", f"they are kernels of Transformer Engine's layers, and {local}", "leave it out"
    if "router" in fusions and (moe.replay != "off" or moe.aux_loss):
        needs = f"policy.moe.replay={moe.replay}" if moe.replay != "off" else f"policy.moe.aux_loss={moe.aux_loss:g}"
        why = f"a fused router chooses by itself, and {needs} needs megatron-core's own"
        yield "policy.fusions", why, "take router out of the list, or give null, which then leaves router out"


def _shared_prefix_refusals(p: PolicyConfig) -> Refusals:
    if not p.share_prefixes:
        return
    if p.layout.context > 1:
        why = f"context ranks ({p.layout.context}) hold parts of every sequence"
        yield "policy.share_prefixes", why, "give false, or policy.layout.context=1"
    if p.moe.aux_loss:
        why = f"policy.moe.aux_loss={p.moe.aux_loss:g} counts the tokens of every sequence"
        yield "policy.share_prefixes", why, "give false, or policy.moe.aux_loss=0"
    if p.moe.replay == "policy":
        why = "policy.moe.replay=policy needs the routes of every sequence's tokens"
        yield "policy.share_prefixes", why, "give false, or policy.moe.replay=rollout"


def _no_transformer_engine(c: Config) -> str:
    """Returns the reason for megatron-core's local layers; '' for Transformer Engine or an unknown device."""
    if c.policy.spec == "local":
        return "policy.spec is local"
    return "cluster.device is cpu" if c.cluster.device == "cpu" else ""
