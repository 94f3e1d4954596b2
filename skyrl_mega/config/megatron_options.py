"""Checks of `policy.options`, `policy.ddp_options` and an `optimizer.options` for megatron-core fields controlled by
other settings or by the code.

Names and types are checked against the installed megatron-core by `skyrl_mega.megatron.arguments`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config, CriticConfig, PolicyConfig
from skyrl_mega.config.schema.fields import Refusal, Refusals, controlled

MODEL = "another model.path: config.json decides it"
FLOAT32 = "float32, which master weights and their gradients always are (docs/speed.md)"
OFFLOAD = "policy.offload_layers"
OPTIMIZER = "policy.optimizer"
CRITIC = "critic.optimizer"

_TRANSFORMER: dict[str | None, str] = {
    "policy.layout.tensor": "tensor_model_parallel_size sequence_parallel",
    "policy.layout.pipeline": "pipeline_model_parallel_size",
    "policy.layout.virtual_pipeline": "virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage",
    "policy.layout.first_stage_layers": "num_layers_in_first_pipeline_stage pipeline_model_parallel_layout "
    "account_for_embedding_in_pipeline_split",
    "policy.layout.last_stage_layers": "num_layers_in_last_pipeline_stage account_for_loss_in_pipeline_split",
    "policy.layout.context": "context_parallel_size hierarchical_context_parallel_sizes hybrid_context_parallel "
    "max_seqlen_per_dp_cp_rank",
    "policy.layout.context_exchange": "cp_comm_type",
    "policy.layout.expert": "expert_model_parallel_size",
    "policy.layout.expert_tensor": "expert_tensor_parallel_size moe_extended_tp",
    "policy.moe.aux_loss": "moe_aux_loss_coeff moe_router_load_balancing_type",
    "policy.moe.dispatcher": "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend",
    "policy.spec": "transformer_impl moe_grouped_gemm moe_use_legacy_grouped_gemm use_kitchen use_kitchen_attention",
    "model.dtype": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype",
    "policy.precision": "fp8 fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    "policy.precision.parameters": "fp8_param",
    OFFLOAD: "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size cpu_offloading "
    "cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering",
    MODEL: "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm gated_linear_unit activation_func "
    "activation_func_clamp_value glu_linear_offset add_bias_linear add_qkv_bias attention_output_gate softmax_scale "
    "softmax_type apply_query_key_layer_scaling apply_residual_connection_post_layernorm rotary_interleaved "
    "no_rope_freq window_size window_attn_skip_freq mrope_section multi_latent_attention "
    "experimental_attention_variant linear_attention_freq num_moe_experts moe_router_topk moe_ffn_hidden_size "
    "moe_router_pre_softmax moe_router_score_function moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_layer_freq moe_latent_size "
    "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_apply_probs_on_input "
    "mtp_num_layers mtp_standalone is_hybrid_model heterogeneous_block_specs",
    # Token weights are precomputed, so nothing may be rescaled, dropped or randomized, or differ from the engine.
    None: "calculate_per_token_loss finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func "
    "param_sync_func timers attention_dropout hidden_dropout moe_z_loss_coeff moe_input_jitter_eps "
    "moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
    "moe_router_force_load_balancing moe_router_enable_expert_bias moe_enable_routing_replay qk_clip "
    "perform_initialization use_cpu_initialization init_model_with_meta_device variable_seq_lengths "
    "overlap_p2p_comm batch_p2p_comm use_ring_exchange_p2p "
    "overlap_p2p_comm_warmup_flush gradient_accumulation_fusion delay_wgrad_compute "
    "defer_embedding_wgrad_compute overlap_moe_expert_parallel_comm "
    "tp_comm_overlap enable_cuda_graph external_cuda_graph cuda_graph_impl "
    "fp32_residual_connection attention_backend moe_router_bias_update_rate barrier_with_L1_time "
    # Only recipes that a CPU can compute as well; padding is not routed.
    "fp8_quantizer_factory fp8_margin fp8_interval fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention "
    "fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red fp4 fp4_param fp4_recipe fp4_quantizer_factory "
    "moe_router_padding_for_fp8 moe_router_padding_for_quantization "
    "flash_decode use_inference_optimized_layers test_mode hetereogenous_dist_checkpoint",
}
_RECOMPUTE = "recompute_granularity recompute_method recompute_num_layers recompute_modules moe_layer_recompute"
_REQUIRED_GRANULARITY = {"recompute_modules": "selective", "recompute_method": "full", "recompute_num_layers": "full"}
"""Option → required value of `recompute_granularity`; with another value megatron-core ignores the option or fails."""
_DDP: dict[str | None, str] = {
    "policy.precision.parameters": "fp8_param_gather",
    "policy.overlap": "overlap_grad_reduce overlap_param_gather align_param_gather",
    None: "use_distributed_optimizer num_distributed_optimizer_instances average_in_collective "
    "gradient_reduce_div_fusion use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy "
    "outer_dp_sharding_strategy reuse_grad_buf_for_mxfp8_param_ag preserve_fp32_weights "
    "keep_fp8_transpose_cache fsdp_double_buffer "
    "fsdp_manual_registration suggested_communication_unit_size delay_wgrad_compute",
}
# Checkpoints and the memory plan support only AdamW, sharded over the data-parallel ranks, with unscaled
# gradients.
_OPTIMIZER_DECIDED = (
    "optimizer fp8_recipe reuse_grad_buf_for_mxfp8_param_ag use_distributed_optimizer "
    "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis sgd_momentum muon_momentum "
    "muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode "
    "muon_extra_scale_factor timers log_num_zeros_in_grad barrier_with_L1_time"
)


def _optimizer(group: str) -> dict[str | None, str]:
    """Returns the controlled fields of an optimizer with settings in `group`."""
    return {
        f"{group}.lr": "lr",
        f"{group}.min_lr": "min_lr",
        f"{group}.beta1": "adam_beta1",
        f"{group}.beta2": "adam_beta2",
        f"{group}.eps": "adam_eps",
        f"{group}.weight_decay": "weight_decay",
        f"{group}.clip_grad": "clip_grad",
        "policy.overlap": "overlap_param_gather overlap_param_gather_with_optimizer_step",
        "model.dtype": "params_dtype bf16 fp16",
        FLOAT32: "store_param_remainders main_grads_dtype main_params_dtype",
        f"{group}.moments": "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype",
        f"{group}.streamed": "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
        "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
        None: _OPTIMIZER_DECIDED,
    }


DENIED: dict[str, dict[str, str | None]] = {
    key: {name: instead for instead, names in table.items() for name in names.split()}
    for key, table in (
        ("policy.options", _TRANSFORMER),
        ("policy.ddp_options", _DDP),
        (f"{OPTIMIZER}.options", _optimizer(OPTIMIZER)),
        (f"{CRITIC}.options", _optimizer(CRITIC)),
    )
}
"""Setting with megatron-core options → refused option → the setting or advice to use instead (None: leave it out)."""


def options(policy: PolicyConfig, critic: CriticConfig | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields key and value of each setting with megatron-core options; those of the critic only if given."""
    yield "policy.options", policy.options
    yield "policy.ddp_options", policy.ddp_options
    yield f"{OPTIMIZER}.options", policy.optimizer.options
    if critic:
        yield f"{CRITIC}.options", critic.optimizer.options


@raising
def check(c: Config) -> Refusals:
    """Raises a UserError for a megatron-core option of policy or critic that is controlled by another setting or by the
    code (names the setting to use instead), and for options for recomputing activations that contradict each other or
    `policy.recompute`."""
    for key, given in options(c.policy, c.critic):
        yield from controlled(key, given, DENIED[key])
    yield from _recompute_refusals(c.policy)


_RECOMPUTE_UNPLANNED = "the dry run plans policy.recompute=none, not what this saves and repeats"
UNPLANNED = {
    "recompute_granularity": _RECOMPUTE_UNPLANNED,
    "moe_layer_recompute": _RECOMPUTE_UNPLANNED,
    "activation_func_fp8_input_store": "the dry run plans inputs of activation functions in model.dtype, not in FP8",
}
"""Options with a notable effect on memory not included in the memory plan → note."""


def unplanned_memory_notes(policy: PolicyConfig) -> list[str]:
    """Returns a note for the user for each true option of `UNPLANNED` in `policy.options`, whose effect on memory the
    memory plan does not include; [] without any."""
    given = policy.options
    return [
        f"policy.options.{name} = {shown(given[name])}: {note}" for name, note in UNPLANNED.items() if given.get(name)
    ]


def _recompute_refusals(policy: PolicyConfig) -> Refusals:
    """Yields refusals of recompute options: allowed only with `policy.recompute=none`, and only if megatron-core does
    not ignore them; whole layers need `policy.recompute=full`."""
    options = policy.options
    given = [name for name in _RECOMPUTE.split() if name in options]
    if given and policy.recompute != "none":
        why = f"policy.recompute={policy.recompute} decides it"
        fix = "give policy.recompute=none beside it, which leaves the choice to policy.options, or leave it out"
        yield f"policy.options.{given[0]}", why, fix, ""
    kind, method, layers = (options.get(f"recompute_{name}") for name in ("granularity", "method", "num_layers"))
    for name, needed in _REQUIRED_GRANULARITY.items():
        if options.get(name) is not None and kind != needed:
            why = f"megatron-core uses it only with recompute_granularity={needed}"
            fix = f"give policy.options.recompute_granularity={needed} beside it, or leave it out"
            yield f"policy.options.{name}", why, fix
    if kind != "full":
        return
    if method in (None, "uniform") and layers in (None, 1):
        yield (
            "policy.options.recompute_granularity",
            "the dry run would plan policy.recompute=none instead",
            "give policy.recompute=full and leave out the options recompute_*, or recompute_method=block with "
            "recompute_num_layers for so many layers of a stage",
        )
    for name, allowed in (("recompute_method", "block or uniform"), ("recompute_num_layers", "a number of layers")):
        if options.get(name) is None:
            why = f"recompute_granularity=full needs it; give {allowed}, or policy.recompute=full"
            key, problem = f"policy.options.{name}", f"{why} and no options recompute_*"
            yield Refusal(key, problem, value="", settings=("policy.recompute",))
