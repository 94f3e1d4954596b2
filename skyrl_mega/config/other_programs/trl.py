"""TRL's fields of GRPOConfig and of transformers' TrainingArguments, and the options of its script `trl grpo`."""

from __future__ import annotations

from skyrl_mega.config.other_programs.entry import (
    ALWAYS,
    MICRO,
    NO_CHECKPOINT_CHOICE,
    NO_ENTROPY,
    NO_LORA,
    NO_MULTIMODAL,
    NO_OFFLOAD,
    ONE_CAP,
    OWN_LOSS,
    REWARD,
    UNUSED,
    Table,
    none,
    several,
    to,
)

COMPLETIONS = "prompts, not completions: divide by data.samples_per_prompt"
NO_SERVER = none("engines are the run's own: rollout.engines, cluster.shared")
SCHEDULES = {
    "constant": to("policy.optimizer.schedule=constant", note="with warmup_steps=0"),
    "constant_with_warmup": to("policy.optimizer.schedule=constant", note="with policy.optimizer.warmup_steps"),
    "linear": to("policy.optimizer.schedule=linear", note="with policy.optimizer.decay_steps"),
    "cosine": to("policy.optimizer.schedule=cosine", note="with policy.optimizer.decay_steps"),
}

_TRAINING: Table = {
    "model_name_or_path": to("model.path"),
    "dataset_name": to("data.train", note="parquet files of prompts (docs/environments.md)"),
    "dataset_train_split": to("data.train"),
    "dataset_test_split": to("data.eval"),
    "reward_funcs": REWARD,
    "reward_weights": REWARD,
    "reward_model_name_or_path": REWARD,
    "multi_objective_aggregation": REWARD,
    "output_dir": to("run.directory", note="a run is run.directory/run.name"),
    "run_name": to("run.name"),
    "seed": to("run.seed"),
    "max_steps": to("run.steps", note="RL steps, each of data.prompts_per_step prompts"),
    "num_train_epochs": to("run.epochs"),
    "learning_rate": to("policy.optimizer.lr"),
    "lr_scheduler_type": to("policy.optimizer.schedule", values=SCHEDULES),
    "lr_scheduler_kwargs": to("policy.optimizer.min_lr", "policy.optimizer.decay_steps"),
    "warmup_steps": to("policy.optimizer.warmup_steps"),
    "warmup_ratio": to("policy.optimizer.warmup_steps", note="optimizer steps, not a share of the run"),
    "weight_decay": to("policy.optimizer.weight_decay"),
    "adam_beta1": to("policy.optimizer.beta1"),
    "adam_beta2": to("policy.optimizer.beta2"),
    "adam_epsilon": to("policy.optimizer.eps"),
    "max_grad_norm": to("policy.optimizer.clip_grad"),
    "optim": none("the optimizer is AdamW"),
    "bf16": to("model.dtype", values={"true": to("model.dtype=bfloat16"), "false": to("model.dtype=float32")}),
    "dtype": to("model.dtype"),
    "gradient_checkpointing": to("policy.recompute"),
    "per_device_train_batch_size": MICRO,
    "gradient_accumulation_steps": to("data.mini_batch_prompts", note="prompts of one optimizer step"),
    "per_device_eval_batch_size": none("all prompts are evaluated at once; evaluation.limit takes fewer"),
    "save_steps": to("checkpoint.every"),
    "save_strategy": to("checkpoint.every", note="RL steps; 0 saves none"),
    "save_total_limit": to("checkpoint.keep"),
    "save_only_model": NO_CHECKPOINT_CHOICE,
    "resume_from_checkpoint": to("checkpoint.resume", note="from the newest of run.directory/run.name"),
    "eval_strategy": to("evaluation.every", values={"no": to("evaluation.every=0")}),
    "eval_steps": to("evaluation.every"),
    "eval_on_start": to("evaluation.before"),
    "logging_steps": none("every step is a row; leave it out"),
    "logging_dir": to("run.directory", note="TensorBoard's files are in the run's folder"),
    "report_to": to("telemetry.trackers", note="a list of names (docs/trackers.md)"),
    "log_completions": to("telemetry.trajectories_every"),
    "num_completions_to_print": none("python -m skyrl_mega.report trajectories RUN --limit N prints N"),
    "log_unique_prompts": UNUSED,
    "log_multimodal": NO_MULTIMODAL,
    "log_completions_hub_repo": none("the trajectories are parquet files in the run's folder"),
    "push_to_hub": none("checkpoint.export writes a Hugging Face directory; push that"),
    "deepspeed": none("Megatron trains every model; policy.layout cuts it over the GPUs"),
    "fsdp": none("Megatron trains every model; policy.layout cuts it over the GPUs"),
    "shuffle_dataset": to("data.shuffle"),
    "remove_unused_columns": none("every column of a row reaches its environment; leave it out"),
    "router_aux_loss_coef": to("policy.moe.aux_loss"),
    "use_peft": NO_LORA,
    "lora_r": NO_LORA,
    "lora_alpha": NO_LORA,
    "lora_dropout": NO_LORA,
    "lora_target_modules": NO_LORA,
    "disable_dropout": ALWAYS,
    **several(
        UNUSED,
        "model_init_kwargs trust_remote_code model_revision attn_implementation use_liger_kernel "
        "torch_empty_cache_steps pad_to_multiple_of dataloader_num_workers ddp_find_unused_parameters",
    ),
}

_GRPO: Table = {
    "num_generations": to("data.samples_per_prompt"),
    "num_generations_eval": to("evaluation.samples"),
    "generation_batch_size": to("data.prompts_per_step", note=COMPLETIONS),
    "steps_per_generation": to("data.mini_batch_prompts", note="data.prompts_per_step divided by it"),
    "num_iterations": none("every batch is trained on once"),
    "max_prompt_length": to("rollout.max_prompt_tokens", note="longer prompts are left out, and counted"),
    "max_completion_length": to(
        "rollout.max_response_tokens", "rollout.sampling.max_tokens", note="of all turns, of one"
    ),
    "max_tool_calling_iterations": to("rollout.max_turns", note="turns of the policy; that is one more"),
    "temperature": to("rollout.sampling.temperature"),
    "top_p": to("rollout.sampling.top_p"),
    "top_k": to("rollout.sampling.top_k", values={"0": to("rollout.sampling.top_k=-1")}),
    "min_p": none("rollout.sampling has temperature, top_p and top_k"),
    "repetition_penalty": none("rollout.sampling has temperature, top_p and top_k"),
    "generation_kwargs": none("rollout.sampling has temperature, top_p, top_k, max_tokens and stop"),
    "chat_template_kwargs": to("rollout.chat_template_options"),
    "cache_implementation": UNUSED,
    "use_transformers_paged": UNUSED,
    "use_transformers_continuous_batching": UNUSED,
    "transformers_continuous_batching_config": UNUSED,
    "use_vllm": ALWAYS,
    "vllm_mode": to(
        "cluster.shared",
        values={"colocate": to("cluster.shared=true"), "server": to("cluster.shared=false", note="with policy.ranks")},
    ),
    "vllm_gpu_memory_utilization": to("rollout.memory_fraction"),
    "vllm_max_model_length": to("rollout.max_length"),
    "vllm_tensor_parallel_size": to("rollout.tensor"),
    "vllm_enable_sleep_mode": NO_OFFLOAD,
    "vllm_model_impl": to("rollout.options.model_impl"),
    "vllm_structured_outputs_regex": none("answers are not constrained; the environment judges them"),
    "vllm_server_base_url": NO_SERVER,
    "vllm_server_host": NO_SERVER,
    "vllm_server_port": NO_SERVER,
    "vllm_server_timeout": to("cluster.start_timeout_s"),
    "vllm_group_port": NO_SERVER,
    "beta": to("algorithm.kl.coefficient"),
    "epsilon": to("algorithm.clip_low", "algorithm.clip_high", note="for GSPO algorithm.gspo.clip_low, clip_high"),
    "epsilon_high": to("algorithm.clip_high"),
    "delta": to("algorithm.dual_clip"),
    "importance_sampling_level": to(
        "algorithm.loss", values={"token": to("algorithm.loss=ppo"), "sequence": to("algorithm.loss=gspo")}
    ),
    "scale_rewards": to(
        "algorithm.normalize",
        values={
            **{theirs: to("algorithm.normalize=true") for theirs in ("group", "true")},
            **{theirs: to("algorithm.normalize=false") for theirs in ("none", "false")},
            "batch": none("advantages are normalised in their group: algorithm.normalize"),
        },
    ),
    "loss_type": to(
        "algorithm.loss_mean",
        values={
            "dapo": to("algorithm.loss_mean=tokens"),
            "bnpo": to("algorithm.loss_mean=micro_batches", "algorithm.loss_mean_samples"),
            "grpo": to("algorithm.loss_mean=sequences"),
            "dr_grpo": none("algorithm.loss_mean divides by the tokens or sequences that there are"),
            **several(OWN_LOSS, "cispo sapo luspo vespo"),
        },
    ),
    "mask_truncated_completions": to("algorithm.overlong.filter"),
    "vllm_importance_sampling_correction": to(
        "algorithm.importance_cap", note=ONE_CAP, values={"false": to("algorithm.importance_cap=null")}
    ),
    "vllm_importance_sampling_mode": to(
        "algorithm.importance_cap",
        note=ONE_CAP,
        values={
            "token_truncate": to("algorithm.importance_cap"),
            **several(
                none("algorithm.importance_cap truncates each token's ratio"),
                "token_mask sequence_truncate sequence_mask",
            ),
        },
    ),
    "vllm_importance_sampling_clip_max": to("algorithm.importance_cap", note=ONE_CAP),
    "vllm_importance_sampling_cap": to("algorithm.importance_cap", note=ONE_CAP),
    "vllm_importance_sampling_clip_min": none("algorithm.importance_cap has no lower bound"),
    "off_policy_mask_threshold": OWN_LOSS,
    "use_bias_correction_kl": none("algorithm.kl.estimator is k1, k2 or k3"),
    "sync_ref_model": none("the reference stays as it was loaded"),
    "ref_model_mixup_alpha": none("the reference stays as it was loaded"),
    "ref_model_sync_steps": none("the reference stays as it was loaded"),
    "top_entropy_quantile": none("every token of an answer counts in the loss"),
    "entropy_coef": NO_ENTROPY,
    "use_adaptive_entropy": NO_ENTROPY,
    **several(NO_ENTROPY, "coef_min coef_max coef_delta target", "entropy_"),
    **{
        f"{loss}_{key}": OWN_LOSS
        for loss, keys in {
            "sapo": ("temperature_neg", "temperature_pos"),
            "vespo": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
        }.items()
        for key in keys
    },
}

KEYS: Table = {**_TRAINING, **_GRPO}
