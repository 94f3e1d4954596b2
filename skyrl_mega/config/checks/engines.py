"""Rules of engines and environments: limits, options of vLLM and of chat templates, and the weights on their way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.derived import (
    NARROW_CACHES,
    ONLINE_FP8,
    WIDE_CACHES,
    fp8_parameters,
    length_limit,
    planned_device,
    response_limit,
)
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.endpoints import entries
from skyrl_mega.config.schema.fields import Refusal, Refusals, controlled

GROUP = "group"
"""Direct weight sync: `weights.transport` and `sync` of a server."""
SLEEP_ARGUMENTS = {
    "enable_sleep_mode": "residency.keep, without the parts that sleep",
    "enable_cumem_allocator": "residency.keep, without the parts that sleep",
    "sleep_mode_backend": None,
    "sleep_mode_offload_cudagraph": None,
    "sleep_preserve_parameter_names": None,
}
"""vLLM arguments for sleep mode → the setting to use instead (None: no such setting)."""
MOVED_EXPERTS = ("enable_eplb", "eplb_config", "enable_elastic_ep", "expert_placement_strategy")
"""vLLM arguments that give a worker other experts than a weight sync sends to the worker."""
REPLICA_ARGUMENTS = (
    *("data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local", "data_parallel_address"),
    *("data_parallel_rpc_port", "data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
    *("data_parallel_multi_port_external_lb", "nnodes", "node_rank", "master_addr", "master_port"),
)
"""vLLM arguments for replicas on several nodes or behind a balancer of load; here an engine is within a node."""
STATE_TYPES = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
"""vLLM arguments for the types of the states of convolutions and recurrent layers: planned as `model.dtype` and
float32."""
ENGINE_ARGUMENTS: dict[str, str | None] = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor",
    "prefill_context_parallel_size": "rollout.tensor",
    "max_model_len": "rollout.max_length",
    "max_num_seqs": "rollout.concurrency",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enforce_eager": "rollout.eager",
    "generation_config": "rollout.sampling",
    "logprobs_mode": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "load_format": None,
    "enable_return_routed_experts": "policy.moe.replay=rollout",
    **dict.fromkeys(STATE_TYPES),
    **SLEEP_ARGUMENTS,
    **dict.fromkeys(REPLICA_ARGUMENTS, "rollout.options.data_parallel_size, and rollout.engines for more engines"),
}
"""vLLM arguments controlled by the run → the setting to use instead (None: no such setting)."""
TEMPLATE_ARGUMENTS = {
    "messages": None,
    "conversation": None,
    "tools": "an environment with tools (docs/tools.md)",
    "chat_template": "chat_template.jinja in the folder of model.path",
    "add_generation_prompt": None,
    "continue_final_message": "rollout.conversation",
    "tokenize": None,
    "tokenizer_kwargs": None,
    "padding": None,
    "truncation": None,
    "max_length": "rollout.max_prompt_tokens",
    "return_tensors": None,
    "return_dict": None,
    "return_assistant_tokens_mask": None,
}
"""Arguments of a tokenizer's `apply_chat_template` controlled by the run → the replacement to use (None: none)."""
CHECKPOINT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""Required entries of a `quantization_config` for parameters sent with an FP8 wire (`kernels.block_fp8.BLOCK`)."""
ONLINE_SETTING = f"rollout.options.quantization={ONLINE_FP8}"


@raising
def check_rollout(c: Config) -> Refusals:
    """Raises a UserError for contradicting limits on tokens or time in rollouts, evaluation, retrieval and
    `model.build`, for a top_k or top_p of 0, no engine at all, invalid `rollout.endpoints` or `retriever.url`, options
    without a generator, options of vLLM or of the chat template that the run sets itself, malformed names of template
    options, or options of vLLM that place weights in another way than a weight sync."""
    r, retriever, response = c.rollout, c.environment.retriever, response_limit(c.rollout)
    yield from r.sampling.refusals()
    yield from c.evaluation.refusals()
    yield from retriever.refusals()
    if (retriever.url or retriever.index) and retriever.timeout_s >= r.env_timeout_s:
        yield Refusal(
            "environment.retriever.timeout_s",
            f"allowed is less than rollout.env_timeout_s = {r.env_timeout_s:g}, so that the policy learns of a failed "
            "search before the environment's step times out",
            settings=("rollout.env_timeout_s",),
        )
    if (c.evaluation.max_tokens or 0) > response:
        yield Refusal(
            "evaluation.max_tokens",
            f"allowed is at most {response}, the tokens of a whole response; raise rollout.max_response_tokens, or "
            "give less",
            settings=("rollout.max_response_tokens",),
        )
    yield from r.refusals()
    if c.model.build and c.model.build.max_length < length_limit(r):
        why = f"allowed is at least {length_limit(r)}, the longest sequence that rollout's limits allow"
        yield "model.build.max_length", why
    yield from controlled("rollout.options", r.options, ENGINE_ARGUMENTS)
    yield from _layout_refusals(r.options)
    yield from controlled("rollout.chat_template_options", r.chat_template_options, TEMPLATE_ARGUMENTS)
    for name in r.chat_template_options:
        if not isinstance(name, str) or not name.isidentifier():
            why = f"{shown(name)}: allowed is the name of a template's variable"
            yield "rollout.chat_template_options", why, "", ""


def _layout_refusals(options: Mapping[str, Any]) -> Refusals:
    """Yields options of vLLM that place weights in another way than a weight sync's plan."""
    if options.get("pipeline_parallel_size", 1) != 1:
        yield (
            "rollout.options.pipeline_parallel_size",
            "a weight sync plans tensor and data parallel workers, not stages of layers",
            "give a larger rollout.tensor, or rollout.options.data_parallel_size with enable_expert_parallel",
        )
    for name in MOVED_EXPERTS:
        if options.get(name):
            why = "vLLM would give a worker other experts than a weight sync's plan"
            yield f"rollout.options.{name}", why, "leave it out", ""


@raising
def check_endpoint(c: Config) -> Refusals:
    """Raises a UserError unless `rollout.conversation` is `messages`: an endpoint renders messages itself."""
    if c.rollout.conversation != "messages":
        why = "an endpoint takes messages and renders them"
        yield "rollout.conversation", why, "give rollout.conversation=messages, or evaluate without --endpoint"


@raising
def check_topology(c: Config) -> Refusals:
    """Raises a UserError for more NICs than GPUs, an invalid pool of nodes or a pool for shared GPUs
    (`ClusterConfig.refusals`), or an invalid data parallel size or KV cache type of engines."""
    yield from c.cluster.refusals()
    data = c.rollout.options.get("data_parallel_size", 1)
    if not isinstance(data, int) or data < 1:
        yield "rollout.options.data_parallel_size", "allowed is a whole number of at least 1"
    cache, allowed = c.rollout.options.get("kv_cache_dtype"), [*filter(None, WIDE_CACHES), *NARROW_CACHES]
    if cache is not None and cache not in allowed:
        why = f"allowed is one of {', '.join(allowed)}; give fp8 for a byte an element, or auto"
        yield "rollout.options.kv_cache_dtype", why


@raising
def check_endpoints(c: Config) -> Refusals:
    """Raises a UserError for `cluster.shared` without engines of the run, for `cluster.pools.engines` without engines
    of the run now and later (`rollout.elastic.most`), and for settings that servers in `rollout.endpoints` cannot
    follow: `policy.moe.replay=rollout`, `run.deterministic`, and on GPUs a direct weight sync together with
    `cluster.shared`."""
    if not c.rollout.engines and c.cluster.shared:
        why = "rollout.engines = 0: no engine of the run shares the policy's GPUs"
        yield "cluster.shared", why, "give cluster.shared=false"
    if not c.rollout.engines and not c.rollout.elastic.most and c.cluster.pools.engines is not None:
        why = "no engine of the run uses the nodes of cluster.pools.engines"
        yield "rollout.engines", why, "give cluster.pools.engines=null, or at least 1"
    if not c.rollout.endpoints:
        return
    ways = [entry.way for entry in entries(c.rollout.endpoints)]
    if GROUP in ways and c.cluster.shared and c.weights.transport == GROUP and planned_device(c) != "cpu":
        yield (
            f"rollout.endpoints.{ways.index(GROUP)}.sync",
            "a direct weight sync reaches either colocated engines (cluster.shared) or servers elsewhere, not both",
            "give sync: files or directory, or cluster.shared=false",
            GROUP,
        )
    if c.policy.moe.replay == "rollout":
        why = "servers in rollout.endpoints return no expert routes"
        yield "policy.moe.replay", why, "give off or policy, or no rollout.endpoints"
    if c.run.deterministic:
        why = "servers in rollout.endpoints batch requests by time"
        yield "run.deterministic", why, "give false, or no rollout.endpoints"


@raising
def check_own_engines(c: Config) -> Refusals:
    """Raises a UserError if `rollout.engines` is 0, for an evaluation without `--endpoint`: such an evaluation starts
    engines of its own, and does not use the servers in `rollout.endpoints`."""
    if not c.rollout.engines:
        yield "rollout.engines", "an evaluation starts engines of its own; give at least 1, or --endpoint"


@raising
def check_wire(c: Config) -> Refusals:
    """Raises a UserError for engines with quantised weights in a format that no weight sync sends: a
    `quantization_config`, a `quantization` other than `ONLINE_FP8`, or parameters of an FP8 checkpoint in another form
    than `CHECKPOINT` or without `weights.wire=fp8`."""
    options, key = c.rollout.options, "rollout.options.quantization"
    kind = options.get("quantization")
    if options.get("quantization_config"):
        why = "vLLM would quantise layers in another format than a weight sync sends"
        fix = f"leave it out, and give {ONLINE_SETTING} for engines that quantise what arrives (docs/weight-sync.md)"
        yield f"{key}_config", why, fix, ""
    if fp8_parameters(c.rollout):
        yield from _checkpoint_refusals(c, kind, options["hf_overrides"]["quantization_config"])
    elif kind not in (None, ONLINE_FP8):
        yield (
            key,
            f"a weight sync can update only blocks of FP8 with a scale each; allowed is {ONLINE_FP8} "
            "(docs/weight-sync.md), or leave it out",
        )


def _checkpoint_refusals(c: Config, kind: Any, quantization: Any) -> Refusals:
    """Yields refusals of engines with the parameters of a quantized checkpoint; `kind`:
    `rollout.options.quantization`."""
    key = "rollout.options.hf_overrides.quantization_config"
    if not isinstance(quantization, dict) or any(quantization.get(name) != value for name, value in CHECKPOINT.items()):
        yield (
            key,
            "a weight sync sends quantised weights only as FP8 numbers with a scale for each block of 128 × 128",
            f"give it {shown(CHECKPOINT)[1:-1]}, or leave it out and give {ONLINE_SETTING}",
        )
    if kind not in (None, CHECKPOINT["quant_method"]):
        why = f"{key} says fp8, and vLLM fails to start if the two differ"
        yield "rollout.options.quantization", why, "leave one of them out"
    if c.weights.wire != "fp8":
        yield (
            "weights.wire",
            f"allowed is fp8, as {key} makes engines store FP8 numbers and scales; or leave that out, and give "
            f"{ONLINE_SETTING} for engines that quantise what arrives",
        )
