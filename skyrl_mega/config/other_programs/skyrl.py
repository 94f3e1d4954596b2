"""SkyRL's keys (skyrl/train/config/config.py)."""

from __future__ import annotations

from skyrl_mega.config.other_programs import critic, offload, precision
from skyrl_mega.config.other_programs.entry import (
    ALWAYS,
    ASYNC,
    FROM_CONFIG,
    FUSED_HEAD,
    LAYOUT_OF_REFERENCE,
    MICRO,
    NO_CHECKPOINT_CHOICE,
    NO_FSDP,
    NO_LORA,
    NO_MEMORY_HISTORY,
    NO_MTP,
    NO_MULTIMODAL,
    ONE_CAP,
    OWN_LOSS,
    PROFILER,
    RECOMPUTED,
    REWARD,
    ROLLOUT_REPLAY,
    RUN_DECIDES,
    STALENESS,
    UNUSED,
    Table,
    none,
    several,
    to,
    under,
)
from skyrl_mega.config.other_programs.megatron_speed import fused, recomputed

_DATA_AND_RUN: Table = {
    "data.train_data": to("data.train", note="parquet files of prompts (docs/environments.md)"),
    "data.val_data": to("data.eval"),
    "data.dataloader.*": UNUSED,
    "trainer.epochs": to("run.epochs"),
    "trainer.max_training_steps": to("run.steps"),
    "trainer.seed": to("run.seed"),
    "trainer.run_name": to("run.name", note="its folder is run.directory/run.name"),
    "trainer.project_name": to("telemetry.options", note="each tracker has its own (docs/trackers.md)"),
    "trainer.logger": to(
        "telemetry.trackers",
        note="a list of names (docs/trackers.md)",
        values={"console": none("the terminal always has a row for every step; leave it out")},
    ),
    "trainer.tags": UNUSED,
    "trainer.log_path": none("logs are in the run's folder"),
    "trainer.enable_ray_gpu_monitor": UNUSED,
    "trainer.train_batch_size": to("data.prompts_per_step"),
    "trainer.policy_mini_batch_size": to("data.mini_batch_prompts"),
    "trainer.micro_train_batch_size_per_gpu": MICRO,
    "trainer.micro_forward_batch_size_per_gpu": MICRO,
    "trainer.max_tokens_per_microbatch": to("policy.micro_tokens"),
    "trainer.update_epochs_per_batch": to("data.epochs_per_step"),
    "trainer.recompute_old_logprobs_per_minibatch": none("the old log-probs are those before the step; leave it out"),
    "trainer.update_ref_every_epoch": none("the reference stays as it was loaded"),
    "trainer.remove_microbatch_padding": ALWAYS,
    "trainer.use_sample_packing": ALWAYS,
    "trainer.ckpt_path": to("run.directory", note="checkpoints are in the run's folder"),
    "trainer.ckpt_interval": to("checkpoint.every", values={"-1": to("checkpoint.every=0")}),
    "trainer.max_ckpts_to_keep": to("checkpoint.keep", note="a number; there is no -1 for all"),
    "trainer.resume_mode": to(
        "checkpoint.resume",
        values={
            "latest": to("checkpoint.resume=true"),
            "null": to("checkpoint.resume=false"),
            "none": to("checkpoint.resume=false"),
            "from_path": to("checkpoint.resume=true", note="give run.directory and run.name of the run to resume"),
        },
    ),
    "trainer.resume_path": to("checkpoint.resume", note="give run.directory and run.name of the run to resume"),
    "trainer.hf_save_interval": to(
        "checkpoint.export", note="at the end of the run; of any checkpoint: python -m skyrl_mega.export"
    ),
    "trainer.export_path": to("checkpoint.export", note="true or false; the folder is the run's"),
    "trainer.eval_interval": to("evaluation.every", values={"-1": to("evaluation.every=0")}),
    "trainer.eval_before_train": to("evaluation.before"),
    "trainer.eval_batch_size": none("all prompts are evaluated at once; evaluation.limit takes fewer"),
    "trainer.dump_eval_results": none("evaluate writes all samples (docs/evaluate.md); leave it out"),
    "trainer.dump_data_batch": to("telemetry.trajectories_every"),
    "trainer.print_example_interval": to(
        "telemetry.trajectories_every", note="python -m skyrl_mega.report trajectories RUN prints them"
    ),
    "trainer.log_example_interval": to(
        "telemetry.trajectories_every", note="python -m skyrl_mega.report trajectories RUN prints them"
    ),
    "trainer.num_logger_eval_samples": UNUSED,
    "trainer.num_logger_train_samples": to("telemetry.tracked_trajectories"),
    "trainer.max_prompt_length": to("rollout.max_prompt_tokens", note="longer prompts are left out, and counted"),
    "trainer.disable_fast_tokenizer": UNUSED,
}

_MODELS: Table = {
    "trainer.strategy": NO_FSDP,
    "trainer.bf16": to("model.dtype", values={"true": to("model.dtype=bfloat16"), "false": to("model.dtype=float32")}),
    "trainer.flash_attn": none("policy.spec chooses the attention of a layer"),
    "trainer.gradient_checkpointing": RECOMPUTED,
    "trainer.gradient_checkpointing_use_reentrant": UNUSED,
    **several(to("policy.logit_chunk"), "logprobs_chunk_size vocab_entropy_chunk_size", "trainer."),
    "trainer.vocab_entropy_chunk_memory_mb": to("policy.logit_chunk", note="tokens"),
    "trainer.fused_lm_head_logprob": FUSED_HEAD,
    "trainer.fused_lm_head_logprob_backend": UNUSED,
    "trainer.use_expandable_segments": ALWAYS,
    "trainer.sequence_parallel_backend": none("policy.layout.context cuts sequences over several GPUs"),
    "trainer.placement.colocate_all": offload.SHARED,
    "trainer.placement.colocate_policy_ref": to(
        "reference.layout", note="null shares the policy's GPUs; a layout gives it GPUs of its own"
    ),
    "trainer.placement.policy_num_nodes": to(
        "cluster.nodes", note="all nodes of the run; policy.ranks is the policy's"
    ),
    "trainer.placement.policy_num_gpus_per_node": to(
        "cluster.gpus_per_node", "policy.ranks", note="the policy's GPUs in all are policy.ranks"
    ),
    "trainer.placement.ref_num_nodes": to("reference.ranks", note="nodes times GPUs; null shares the policy's"),
    "trainer.placement.ref_num_gpus_per_node": to("reference.ranks", note="nodes times GPUs; null shares the policy's"),
    "trainer.policy.model.path": to("model.path"),
    "trainer.policy.model.lora.*": NO_LORA,
    "trainer.policy.model.fake_int4_qat.*": none("there is no training for INT4; leave it out"),
    "trainer.policy.optimizer_config.lr": to("policy.optimizer.lr"),
    "trainer.policy.optimizer_config.adam_betas": to("policy.optimizer.beta1", "policy.optimizer.beta2"),
    "trainer.policy.optimizer_config.weight_decay": to("policy.optimizer.weight_decay"),
    "trainer.policy.optimizer_config.max_grad_norm": to("policy.optimizer.clip_grad"),
    "trainer.policy.optimizer_config.num_warmup_steps": to("policy.optimizer.warmup_steps"),
    "trainer.policy.optimizer_config.scheduler": to(
        "policy.optimizer.schedule",
        values={
            "constant": to("policy.optimizer.schedule=constant", note="with warmup_steps=0"),
            "constant_with_warmup": to("policy.optimizer.schedule=constant", note="with policy.optimizer.warmup_steps"),
            "linear": to("policy.optimizer.schedule=linear", note="with policy.optimizer.decay_steps"),
            "cosine": to("policy.optimizer.schedule=cosine", note="with policy.optimizer.decay_steps"),
        },
    ),
    "trainer.policy.optimizer_config.offload_after_step": offload.offload("optimizer"),
    "trainer.policy.fsdp_config.cpu_offload": offload.POLICY_LEAVES,
    "trainer.policy.fsdp_config.*": NO_FSDP,
    "trainer.policy.sequence_parallel_size": to("policy.layout.context", note="sequences over several GPUs"),
    "trainer.policy.use_torch_compile": UNUSED,
    "trainer.policy.record_memory": NO_MEMORY_HISTORY,
    **under("trainer.policy.torch_profiler_config", PROFILER),
    "trainer.policy.model_config_kwargs.*": FROM_CONFIG,
    "trainer.policy.language_model_only": NO_MULTIMODAL,
    "trainer.policy.inference_only_init": none("python -m skyrl_mega.evaluate draws samples without training"),
    "trainer.ref.model.path": to("reference.path", note="null takes model.path"),
    "trainer.ref.megatron_config.tensor_model_parallel_size": to("reference.layout.tensor", note=LAYOUT_OF_REFERENCE),
    "trainer.ref.megatron_config.pipeline_model_parallel_size": to(
        "reference.layout.pipeline", note=LAYOUT_OF_REFERENCE
    ),
    "trainer.ref.megatron_config.context_parallel_size": to("reference.layout.context", note=LAYOUT_OF_REFERENCE),
    "trainer.ref.megatron_config.expert_model_parallel_size": to("reference.layout.expert", note=LAYOUT_OF_REFERENCE),
    "trainer.ref.megatron_config.expert_tensor_parallel_size": to(
        "reference.layout.expert_tensor", note=LAYOUT_OF_REFERENCE
    ),
    "trainer.ref.megatron_config.*": none("the reference is built as the policy is; leave it out"),
    "trainer.ref.sequence_parallel_size": to("reference.layout.context", note=LAYOUT_OF_REFERENCE),
    "trainer.ref.*": none("the reference is built as the policy is; leave it out"),
    "trainer.mtp.*": NO_MTP,
    "trainer.fully_async.max_staleness_steps": STALENESS,
    "trainer.fully_async.*": ASYNC,
}

_MEGATRON: Table = {
    "trainer.policy.megatron_config." + theirs: entry
    for theirs, entry in {
        "tensor_model_parallel_size": to("policy.layout.tensor"),
        "pipeline_model_parallel_size": to("policy.layout.pipeline"),
        "context_parallel_size": to("policy.layout.context"),
        "expert_model_parallel_size": to("policy.layout.expert"),
        "expert_tensor_parallel_size": to("policy.layout.expert_tensor"),
        "transformer_config_kwargs.virtual_pipeline_model_parallel_size": to("policy.layout.virtual_pipeline"),
        "transformer_config_kwargs.num_layers_in_first_pipeline_stage": to("policy.layout.first_stage_layers"),
        "transformer_config_kwargs.num_layers_in_last_pipeline_stage": to("policy.layout.last_stage_layers"),
        **recomputed("transformer_config_kwargs."),
        **fused("transformer_config_kwargs."),
        **under("transformer_config_kwargs", precision.FIELDS),
        "transformer_config_kwargs.*": to("policy.options.*"),
        "optimizer_config_kwargs.*": to("policy.optimizer.options.*"),
        **under("optimizer_config_kwargs", offload.optimizer("policy.optimizer")),
        "model_config_kwargs.*": FROM_CONFIG,
        "moe_aux_loss_coeff": to("policy.moe.aux_loss"),
        "freeze_moe_router": to("policy.moe.freeze_router"),
        "moe_router_load_balancing_type": to("policy.moe.aux_loss", note="above 0 balances by an auxiliary loss"),
        **fused(""),
        "moe_grouped_gemm": RUN_DECIDES,
        "moe_router_score_function": FROM_CONFIG,
        "moe_router_enable_expert_bias": FROM_CONFIG,
        "moe_router_dtype": to("policy.options.moe_router_dtype"),
        "moe_enable_routing_replay": ROLLOUT_REPLAY,
        "moe_per_layer_logging": UNUSED,
        "ddp_config.overlap_grad_reduce": to("policy.overlap"),
        "ddp_config.overlap_param_gather": to("policy.overlap"),
        "ddp_config.*": to("policy.ddp_options.*"),
        "hf_export_config.*": UNUSED,
        "lora_config.*": NO_LORA,
        "empty_cuda_cache": UNUSED,
        "dist_ckpt_optim_fully_reshardable": ALWAYS,
        "async_dist_ckpt_save": NO_CHECKPOINT_CHOICE,
        "async_dist_ckpt_strategy": NO_CHECKPOINT_CHOICE,
        "async_save_prestage_to_cpu": NO_CHECKPOINT_CHOICE,
        **under("torch_profiler_config", PROFILER),
        **several(NO_MTP, "mtp_num_layers mtp_loss_weight mtp_loss_chunk_size mtp_loss_topk"),
    }.items()
}

_ALGORITHM: Table = {
    "trainer.algorithm." + theirs: entry
    for theirs, entry in {
        "advantage_estimator": to(
            "algorithm.advantage",
            values={
                "grpo": to("algorithm.advantage=grpo"),
                "rloo": to("algorithm.advantage=rloo"),
                "gae": critic.GAE,
                "reinforce++": to("algorithm.advantage=reinforce++"),
                "maxrl": to("algorithm.advantage=maxrl"),
            },
        ),
        "policy_loss_type": to(
            "algorithm.loss",
            values={
                "regular": to("algorithm.loss=ppo", "algorithm.dual_clip=null"),
                "dual_clip": to("algorithm.loss=ppo", "algorithm.dual_clip"),
                "gspo": to(
                    "algorithm.loss=gspo", "algorithm.sequence_unit=trajectory", note="its clip range is algorithm.gspo"
                ),
                "cispo": to("algorithm.loss=cispo", note="its clip range is algorithm.cispo"),
                "sapo": to("algorithm.loss=sapo", note="its gate is algorithm.sapo"),
                "dppo": to("algorithm.loss", note="dppo_tv or dppo_kl; its trust region is algorithm.dppo"),
                **{loss: to(f"algorithm.loss={loss}") for loss in ("clip_cov", "kl_cov")},
                "rollout_is": OWN_LOSS,
            },
        ),
        "loss_reduction": to(
            "algorithm.loss_mean",
            values={
                "token_mean": to("algorithm.loss_mean=tokens", note="over the mini-batch"),
                "token_mean_legacy": to("algorithm.loss_mean=micro_batches", "algorithm.loss_mean_samples"),
                "sequence_mean": to("algorithm.loss_mean=sequences"),
                "prompt_mean": to("algorithm.loss_mean=prompts"),
                "seq_mean_token_sum_norm": to("algorithm.loss_mean=constant", "algorithm.loss_mean_length"),
            },
        ),
        "max_seq_len": to("algorithm.loss_mean_length", note="of algorithm.loss_mean=constant"),
        "grpo_norm_by_std": to("algorithm.normalize"),
        "use_kl_loss": to(
            "algorithm.kl.coefficient", note="above 0 is on", values={"false": to("algorithm.kl.coefficient=0")}
        ),
        "kl_loss_coef": to("algorithm.kl.coefficient"),
        "kl_estimator_type": to(
            "algorithm.kl.estimator",
            values={
                **{k: to(f"algorithm.kl.estimator={k}") for k in ("k1", "k2", "k3", "abs")},
            },
        ),
        "use_kl_in_reward": to("algorithm.kl.where", values={"true": to("algorithm.kl.where=reward")}),
        "kl_ctrl.type": to("algorithm.kl.target", values={"fixed": to("algorithm.kl.target=null")}),
        "kl_ctrl.kl_target": to("algorithm.kl.target", note="of an answer: the sum over its tokens"),
        "kl_ctrl.horizon": to("algorithm.kl.horizon"),
        "use_entropy_loss": to("algorithm.entropy.coefficient", note="above 0 is on"),
        "entropy_loss_coef": to("algorithm.entropy.coefficient"),
        "temperature": to("rollout.sampling.temperature"),
        "advantage_batch_normalize": to("algorithm.whiten", values={"true": to("algorithm.whiten=batch")}),
        "zero_variance_filter": to(
            "algorithm.dynamic_sampling.enabled",
            note="with algorithm.dynamic_sampling.max_rounds=1; without it they have advantages of 0",
            values={
                "true": to("algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.max_rounds=1"),
                "false": to("algorithm.dynamic_sampling.enabled=false"),
            },
        ),
        "zero_variance_filter_tol": to(
            "algorithm.dynamic_sampling.tolerance", note="of highest - lowest, there of the std"
        ),
        "eps_clip_low": to("algorithm.clip_low"),
        "eps_clip_high": to("algorithm.clip_high"),
        "clip_ratio_c": to("algorithm.dual_clip"),
        "off_policy_correction.token_tis_ratio_clip_high": to("algorithm.importance_cap", note=ONE_CAP),
        "off_policy_correction.tis_ratio_type": to(
            "algorithm.importance_level",
            values={
                "null": to("algorithm.importance_cap=null"),
                "token": to("algorithm.importance_cap"),
                "sequence": to(
                    "algorithm.importance_cap",
                    "algorithm.importance_level=sequence",
                    "algorithm.sequence_unit=trajectory",
                ),
            },
        ),
        "off_policy_correction.sequence_tis_ratio_clip_high": to("algorithm.importance_cap"),
        "off_policy_correction.outlier_token_is_threshold_low": to("algorithm.rejection.outlier_low"),
        "off_policy_correction.outlier_token_is_threshold_high": to("algorithm.rejection.outlier_high"),
        **{
            f"off_policy_correction.token_mask_is_threshold_{bound}": to(
                f"algorithm.rejection.{bound}", note="of algorithm.rejection.level=token"
            )
            for bound in ("low", "high")
        },
        "off_policy_correction.sequence_mask_metric": to(
            "algorithm.rejection.level",
            values={
                "product": to("algorithm.rejection.level=sequence", "algorithm.sequence_unit=trajectory"),
                "geometric": to("algorithm.rejection.level=geometric", "algorithm.sequence_unit=trajectory"),
            },
        ),
        **{
            f"off_policy_correction.{metric}_mask_{bound}": to(f"algorithm.rejection.{bound}")
            for metric in ("geo", "product")
            for bound in ("low", "high")
        },
        "off_policy_correction.*": none("algorithm.importance_cap and algorithm.rejection are the corrections"),
        "use_tis": to("algorithm.importance_cap", note=ONE_CAP, values={"false": to("algorithm.importance_cap=null")}),
        "tis_imp_ratio_cap": to("algorithm.importance_cap", note=ONE_CAP),
        "dynamic_sampling.type": to(
            "algorithm.dynamic_sampling.enabled",
            "algorithm.dynamic_sampling.mode",
            values={
                "filter": to("algorithm.dynamic_sampling.enabled=true"),
                "null": to("algorithm.dynamic_sampling.enabled=false"),
                "replace": to("algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.mode=replace"),
            },
        ),
        "dynamic_sampling.max_sample_batches": to("algorithm.dynamic_sampling.max_rounds", note="at least 1"),
        "dynamic_sampling.min_replace_ratio": to("algorithm.dynamic_sampling.replace_from"),
        "overlong_buffer_len": to("algorithm.overlong.buffer"),
        "overlong_buffer_penalty_factor": to("algorithm.overlong.penalty"),
        "sapo.tau_pos": to("algorithm.sapo.temperature_positive"),
        "sapo.tau_neg": to("algorithm.sapo.temperature_negative"),
        "cispo.cispo_eps_clip_low": to("algorithm.cispo.clip_low"),
        "cispo.cispo_eps_clip_high": to("algorithm.cispo.clip_high"),
        "dppo.dppo_type": to(
            "algorithm.loss",
            values={"binary_tv": to("algorithm.loss=dppo_tv"), "binary_kl": to("algorithm.loss=dppo_kl")},
        ),
        "dppo.delta_low": to("algorithm.dppo.tv_low", "algorithm.dppo.kl_low"),
        "dppo.delta_high": to("algorithm.dppo.tv_high", "algorithm.dppo.kl_high"),
        "clip_cov.clip_ratio": to("algorithm.clip_cov.share"),
        "clip_cov.clip_cov_lb": to("algorithm.clip_cov.low"),
        "clip_cov.clip_cov_ub": to("algorithm.clip_cov.high"),
        "kl_cov.kl_cov_frac": to("algorithm.kl_cov.share"),
        "kl_cov.ppo_kl_coef": to("algorithm.kl_cov.coefficient"),
    }.items()
}

ENGINES: Table = {
    "generator.inference_engine." + theirs: entry
    for theirs, entry in {
        "num_engines": to("rollout.engines"),
        "tensor_parallel_size": to("rollout.tensor"),
        "pipeline_parallel_size": none("an engine is cut by rollout.tensor alone"),
        "data_parallel_size": to("rollout.engines", note="as many more engines"),
        "expert_parallel_size": to("rollout.options.enable_expert_parallel=true", note="over the GPUs of an engine"),
        "gpu_memory_utilization": offload.FRACTION,
        "max_num_seqs": to("rollout.concurrency"),
        "max_num_batched_tokens": to("rollout.options.max_num_batched_tokens"),
        "enable_prefix_caching": to("rollout.options.enable_prefix_caching"),
        "enable_chunked_prefill": to("rollout.options.enable_chunked_prefill"),
        "enforce_eager": to("rollout.eager"),
        "model_dtype": to("model.dtype", note="one for policy and engines"),
        "engine_init_kwargs.max_model_len": to("rollout.max_length"),
        "engine_init_kwargs.*": to("rollout.options.*"),
        "backend": none("engines are vLLM's; leave it out"),
        "weight_sync_backend": none("the transfer plan chooses the way of every part (docs/weight-sync.md)"),
        "weight_transfer_threshold_cuda_ipc_GB": to("weights.bucket_mib"),
        "run_engines_locally": none("engines are the run's own; evaluate --endpoint asks one that runs"),
        "external_proxy_url": none("engines are the run's own; evaluate --endpoint asks one that runs"),
        "external_server_urls": none("engines are the run's own; evaluate --endpoint asks one that runs"),
        "speculative_config": none("decoding is not speculative, so that log-probs are the policy's"),
        "enable_return_routed_experts": ROLLOUT_REPLAY,
        "offload_kv_for_weight_sync": offload.offload("kv_cache", note="no sync needs the cache"),
        "fully_sharded_loras": NO_LORA,
        "language_model_only": NO_MULTIMODAL,
        "delta_weight_sync.*": none("whole weights are sent, each part once (docs/weight-sync.md)"),
        "router_init_kwargs.*": UNUSED,
        **several(
            UNUSED,
            "served_model_name distributed_executor_backend enable_pd num_prefill use_expandable_segments "
            "enable_ray_prometheus_stats vllm_v1_disable_multiproc async_engine enable_http_endpoint "
            "override_existing_update_group",
        ),
    }.items()
}

_GENERATOR: Table = {
    "generator.n_samples_per_prompt": to("data.samples_per_prompt"),
    "generator.eval_n_samples_per_prompt": to("evaluation.samples"),
    "generator.max_turns": to("rollout.max_turns"),
    "generator.max_input_length": to(
        "rollout.max_input_tokens", note="and rollout.max_length = max_input_length + rollout.sampling.max_tokens"
    ),
    "generator.sampling_params.max_generate_length": to("rollout.sampling.max_tokens", note="of one turn"),
    "generator.sampling_params.temperature": to("rollout.sampling.temperature"),
    "generator.sampling_params.top_p": to("rollout.sampling.top_p"),
    "generator.sampling_params.top_k": to("rollout.sampling.top_k"),
    "generator.sampling_params.stop": to("rollout.sampling.stop"),
    "generator.sampling_params.logprobs": ALWAYS,
    "generator.sampling_params.*": none("rollout.sampling has temperature, top_p and top_k"),
    "generator.sampling_params.min_p": none("rollout.sampling has temperature, top_p and top_k"),
    "generator.sampling_params.repetition_penalty": none("rollout.sampling has temperature, top_p and top_k"),
    "generator.sampling_params.additional_kwargs.*": none("rollout.sampling has temperature, top_p and top_k"),
    "generator.eval_sampling_params.temperature": to("evaluation.temperature"),
    "generator.eval_sampling_params.top_p": to("evaluation.top_p"),
    "generator.eval_sampling_params.max_generate_length": to("evaluation.max_tokens"),
    "generator.eval_sampling_params.*": none("rollout.sampling holds for evaluation too"),
    "generator.batched": none("turns of all trajectories run side by side; leave it out"),
    "generator.chat_template.*": none("the template of the model's tokenizer is used; change it there"),
    "generator.chat_template_kwargs.*": to("rollout.chat_template_options.*"),
    "generator.use_conversation_multi_turn": to(
        "rollout.conversation",
        values={
            "true": to("rollout.conversation=messages"),
            "false": to("rollout.conversation=one_message"),
        },
    ),
    "generator.append_eos_token_after_stop_str_in_multi_turn": none(
        "the model's chat template ends a turn; leave it out"
    ),
    "generator.zero_reward_on_non_stop": none(
        "the environment gives the reward; algorithm.overlong.filter masks such trajectories"
    ),
    "generator.apply_overlong_filtering": to(
        "algorithm.overlong.filter", note="with algorithm.overlong.filter_by=tokens"
    ),
    "generator.step_wise_trajectories": to(
        "rollout.step_wise", values={"true": to("rollout.step_wise=turns"), "false": to("rollout.step_wise=off")}
    ),
    "generator.merge_stepwise_output": to("rollout.step_wise=merged"),
    "generator.use_cache_salt": UNUSED,
    "generator.vision_language_generator": NO_MULTIMODAL,
    "environment.env_class": to("environment.default", note="of rows whose env_class is empty"),
    "environment.skyrl_gym.max_env_workers": to("environment.workers"),
    "environment.skyrl_gym.search.search_url": to("environment.retriever.url"),
    "environment.skyrl_gym.search.topk": to("environment.retriever.topk"),
    "environment.skyrl_gym.search.timeout": to("environment.retriever.timeout_s"),
    "environment.skyrl_gym.search.log_requests": UNUSED,
    "environment.skyrl_gym.text2sql.db_path": to("environment.options.text2sql.db_path"),
    "environment.skyrl_gym.llm_as_a_judge.*": REWARD,
}

KEYS: Table = {**_DATA_AND_RUN, **_MODELS, **_MEGATRON, **_ALGORITHM, **critic.SKYRL, **ENGINES, **_GENERATOR}
