"""verl's keys, first part: data, trainer and models.

From verl/trainer/config: ppo_megatron_trainer.yaml, and what FSDP recipes set of ppo_trainer.yaml.
"""

from __future__ import annotations

from skyrl_mega.config.other_programs import offload, precision, verl_kl
from skyrl_mega.config.other_programs.entry import (
    ALWAYS,
    ASYNC,
    CLIP_BOTH,
    CLIP_HIGH,
    CLIP_LOW,
    EVERY_SYNC,
    FROM_CONFIG,
    FUSED_HEAD,
    LAYOUT_OF_REFERENCE,
    MICRO,
    NO_CHECKPOINT_CHOICE,
    NO_FSDP,
    NO_LORA,
    NO_MTP,
    NO_MULTIMODAL,
    NO_PROFILER,
    ONE_CAP,
    OWN_LOSS,
    PARTIAL,
    PROFILER,
    RECOMPUTED,
    RUN_DECIDES,
    UNUSED,
    Table,
    none,
    several,
    to,
    under,
)
from skyrl_mega.config.other_programs.megatron_speed import fused, recomputed

ROUTER_REPLAY: Table = {
    "router_replay.mode": to(
        "policy.moe.replay",
        values={
            "disabled": to("policy.moe.replay=off"),
            "R2": to("policy.moe.replay=policy"),
            "R3": to("policy.moe.replay=rollout"),
        },
    ),
    "router_replay.*": none("routes are recorded and replayed in memory alone"),
}
ONE_TURN = "of all turns; rollout.sampling.max_tokens is of one"


_DATA = under(
    "data",
    {
        "train_files": to("data.train", note="parquet files of prompts (docs/environments.md)"),
        "val_files": to("data.eval"),
        "train_batch_size": to("data.prompts_per_step"),
        "gen_batch_size": to("algorithm.dynamic_sampling.oversample", note="it divided by data.prompts_per_step"),
        "val_batch_size": none("all prompts are evaluated at once; evaluation.limit takes fewer"),
        "train_max_samples": none("write fewer rows into data.train"),
        "val_max_samples": to("evaluation.limit", note="of each set"),
        "max_prompt_length": to("rollout.max_prompt_tokens", note="longer prompts are left out, and counted"),
        "max_response_length": to("rollout.max_response_tokens", note=ONE_TURN),
        "filter_overlong_prompts": ALWAYS,
        "filter_overlong_prompts_workers": UNUSED,
        "truncation": none("no prompt is cut; those beyond rollout.max_prompt_tokens are left out, and counted"),
        "shuffle": to("data.shuffle"),
        "seed": to("run.seed"),
        "prompt_key": none("the column is `prompt`; rename it in the file"),
        "reward_fn_key": none("the column `env_class` of a row, or environment.default, names its environment"),
        "tokenizer": none("the tokenizer is the model's"),
        "apply_chat_template_kwargs.*": to("rollout.chat_template_options.*"),
        "tool_config_path": none("an environment has its tools (docs/environments.md)"),
        "function_tool_path": none("an environment has its tools (docs/environments.md)"),
        "custom_cls.*": none("rows are read from parquet; write them as docs/environments.md says"),
        "sampler.*": none("data.shuffle orders the prompts by run.seed"),
        "datagen.*": none("rows are read from parquet; data.prepare can make the files"),
        **several(
            NO_MULTIMODAL,
            "image_key video_key audio_key image_patch_size return_multi_modal_inputs mm_processor_kwargs.*",
        ),
        **several(
            UNUSED,
            "use_shm return_raw_input_ids return_raw_chat return_full_prompt dataloader_num_workers "
            "validation_shuffle trust_remote_code",
        ),
    },
)

_TRAINER = under(
    "trainer",
    {
        "total_epochs": to("run.epochs"),
        "total_training_steps": to("run.steps"),
        "experiment_name": to("run.name", note="its folder is run.directory/run.name"),
        "project_name": to("telemetry.options", note="each tracker has its own (docs/trackers.md)"),
        "default_local_dir": to("run.directory", note="checkpoints are in the run's folder"),
        "default_hdfs_dir": none("run.directory is on a file system that all nodes see"),
        "logger": to(
            "telemetry.trackers",
            note="a list of names (docs/trackers.md)",
            values={"console": none("the terminal always has a row for every step; leave it out")},
        ),
        "nnodes": to("cluster.nodes"),
        "n_gpus_per_node": to("cluster.gpus_per_node"),
        "device": to("cluster.device", values={"cuda": to("cluster.device=cuda"), "npu": none("cpu or cuda")}),
        "save_freq": to("checkpoint.every", values={"-1": to("checkpoint.every=0")}),
        "max_actor_ckpt_to_keep": to("checkpoint.keep"),
        "max_ckpt_to_keep": to("checkpoint.keep"),
        "resume_mode": to(
            "checkpoint.resume",
            values={
                "auto": to("checkpoint.resume=true"),
                "disable": to("checkpoint.resume=false"),
                "resume_path": to(
                    "checkpoint.resume=true", note="give run.directory and run.name of the run to resume"
                ),
            },
        ),
        "resume_from_path": to("checkpoint.resume", note="give run.directory and run.name of the run to resume"),
        "del_local_ckpt_after_load": none("checkpoint.keep says how many stay"),
        "test_freq": to("evaluation.every", values={"-1": to("evaluation.every=0")}),
        "val_before_train": to("evaluation.before"),
        "val_only": none("python -m skyrl_mega.evaluate scores a model without training (docs/evaluate.md)"),
        "log_val_generations": none("evaluate writes all samples (docs/evaluate.md); leave it out"),
        "validation_data_dir": none("evaluate writes all samples (docs/evaluate.md); leave it out"),
        "rollout_data_dir": to("telemetry.trajectories_every", note="the folder is the run's `trajectories`"),
        "balance_batch": ALWAYS,
        "esi_redundant_time": none("a job checkpoints before its time limit (docs/slurm.md)"),
        "ray_wait_register_center_timeout": to("cluster.start_timeout_s"),
        "use_legacy_worker_impl": UNUSED,
        "use_v1": UNUSED,
        "v1.*": ASYNC,
    },
)

_MODEL = under(
    "actor_rollout_ref.model",
    {
        "path": to("model.path"),
        "hf_config_path": FROM_CONFIG,
        "tokenizer_path": none("the tokenizer is the model's"),
        "custom_chat_template": none("the template of the model's tokenizer is used; change it there"),
        "enable_gradient_checkpointing": RECOMPUTED,
        "enable_activation_offload": offload.ACTIVATIONS,
        "override_config.max_position_embeddings": to("model.max_length"),
        "override_config.model_config.max_position_embeddings": to("model.max_length"),
        "override_config.moe_config.freeze_moe_router": to("policy.moe.freeze_router"),
        "override_config.*": FROM_CONFIG,
        "use_remove_padding": ALWAYS,
        "use_fused_kernels": FUSED_HEAD,
        "fused_kernel_options.*": UNUSED,
        "mtp.*": NO_MTP,
        "lora.*": NO_LORA,
        "tiled_mlp.*": NO_FSDP,
        **several(NO_LORA, "lora_rank lora_alpha target_modules exclude_modules lora_adapter_path"),
        **several(UNUSED, "use_shm trust_remote_code external_lib use_liger"),
    },
)

_MEGATRON_OPTIONS: Table = {
    "virtual_pipeline_model_parallel_size": to("policy.layout.virtual_pipeline"),
    "override_transformer_config.num_layers_in_first_pipeline_stage": to("policy.layout.first_stage_layers"),
    "override_transformer_config.num_layers_in_last_pipeline_stage": to("policy.layout.last_stage_layers"),
    **recomputed("override_transformer_config."),
    **fused("override_transformer_config."),
    **under("override_transformer_config", precision.FIELDS),
    "override_transformer_config.moe_aux_loss_coeff": to("policy.moe.aux_loss"),
    "override_transformer_config.*": to("policy.options.*"),
    "override_ddp_config.overlap_grad_reduce": to("policy.overlap"),
    "override_ddp_config.overlap_param_gather": to("policy.overlap"),
    "override_ddp_config.*": to("policy.ddp_options.*"),
    "override_mcore_model_config.*": FROM_CONFIG,
    "dtype": to("model.dtype", values={"bfloat16": to("model.dtype=bfloat16"), "float32": to("model.dtype=float32")}),
    "seed": to("run.seed"),
    "sequence_parallel": ALWAYS,
    "use_distributed_optimizer": ALWAYS,
    "use_remove_padding": ALWAYS,
    "entropy_from_logits_chunk_size": to("policy.logit_chunk"),
    "entropy_from_logits_with_chunking": to("policy.logit_chunk"),
    "dynamic_context_parallel": to("policy.layout.context", note="one size for all micro-batches"),
    **ROUTER_REPLAY,
    "qat.*": none("there is no training for low precision; leave it out"),
    "use_megatron_fsdp": NO_FSDP,
    "param_offload": offload.offload("parameters"),
    "grad_offload": offload.offload("gradients"),
    "optimizer_offload": offload.offload("optimizer"),
    **several(
        NO_CHECKPOINT_CHOICE,
        "use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix "
        "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient",
    ),
    **several(
        none("model.path is a Hugging Face directory, read as it is; leave it out"),
        "use_mbridge vanilla_mbridge",
    ),
    **several(
        UNUSED,
        "max_seqlen_per_dp_cp_rank forward_only pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket",
    ),
}

_OPTIMIZER = under(
    "actor_rollout_ref.actor.optim",
    {
        "lr": to("policy.optimizer.lr"),
        "min_lr": to("policy.optimizer.min_lr"),
        "betas": to("policy.optimizer.beta1", "policy.optimizer.beta2"),
        "weight_decay": to("policy.optimizer.weight_decay"),
        "clip_grad": to("policy.optimizer.clip_grad"),
        "lr_warmup_steps": to("policy.optimizer.warmup_steps", values={"-1": to("policy.optimizer.warmup_steps=0")}),
        "lr_warmup_steps_ratio": to("policy.optimizer.warmup_steps", note="optimizer steps, not a share of the run"),
        "lr_warmup_init": none("the warm-up begins at zero"),
        "lr_decay_steps": to("policy.optimizer.decay_steps"),
        "total_training_steps": to("policy.optimizer.decay_steps", note="where the schedule ends"),
        "lr_decay_style": to(
            "policy.optimizer.schedule",
            values={s: to(f"policy.optimizer.schedule={s}") for s in ("constant", "linear", "cosine")},
        ),
        "lr_scheduler_type": to(
            "policy.optimizer.schedule",
            values={s: to(f"policy.optimizer.schedule={s}") for s in ("constant", "cosine")},
        ),
        "warmup_style": to("policy.optimizer.schedule"),
        "num_cycles": none("policy.optimizer.schedule=cosine is half a period"),
        "zero_indexed_step": UNUSED,
        "optimizer_impl": none("the optimizer is AdamW"),
        "min_lr_ratio": to("policy.optimizer.min_lr", note="a rate, not a share of policy.optimizer.lr"),
        "lr_wsd_decay_style": none("policy.optimizer.schedule is constant, linear or cosine"),
        "lr_wsd_decay_steps": none("policy.optimizer.schedule is constant, linear or cosine"),
        "weight_decay_incr_style": none("policy.optimizer.weight_decay stays as it is"),
        "optimizer": none("the optimizer is AdamW", values={"adam": none("it is always AdamW; leave it out")}),
        "override_optimizer_config.*": to("policy.optimizer.options.*"),
        **under("override_optimizer_config", offload.optimizer("policy.optimizer")),
        "use_checkpoint_opt_param_scheduler": none("a resumed run takes the schedule of its settings"),
        **several(offload.moments("policy.optimizer"), "exp_avg_dtype exp_avg_sq_dtype"),
        "use_precision_aware_optimizer": offload.of_types("policy.optimizer"),
        **several(RUN_DECIDES, "main_grads_dtype use_layer_wise_distributed_optimizer"),
        **several(
            none("the optimizer is AdamW; leave it out"),
            "momentum nesterov split_qkv scale_mode coefficient_type num_ns_steps tp_mode "
            "fp32_matmul_prec extra_scale_factor scalar_optimizer match_adamw_update_rms",
            "muon_",
        ),
    },
)

_ACTOR = under(
    "actor_rollout_ref.actor",
    {
        "strategy": NO_FSDP,
        "ppo_mini_batch_size": to("data.mini_batch_prompts"),
        "ppo_micro_batch_size": MICRO,
        "ppo_micro_batch_size_per_gpu": MICRO,
        "ppo_max_token_len_per_gpu": to("policy.micro_tokens"),
        "use_dynamic_bsz": ALWAYS,
        "ppo_epochs": to("data.epochs_per_step"),
        "shuffle": none("mini-batches follow the order of the prompts: data.shuffle"),
        "data_loader_seed": to("run.seed"),
        "grad_clip": to("policy.optimizer.clip_grad"),
        "clip_ratio": to("algorithm.clip_low", "algorithm.clip_high", note=CLIP_BOTH),
        "clip_ratio_low": to("algorithm.clip_low", note=CLIP_LOW),
        "clip_ratio_high": to("algorithm.clip_high", note=CLIP_HIGH),
        "clip_ratio_c": to("algorithm.dual_clip", note="null unless given; there it is 3"),
        "loss_agg_mode": to(
            "algorithm.loss_mean",
            values={
                "token-mean": to("algorithm.loss_mean=tokens", note="over the mini-batch"),
                "seq-mean-token-mean": to("algorithm.loss_mean=sequences"),
                "seq-mean-token-sum": to("algorithm.loss_mean=constant", "algorithm.loss_mean_length=1"),
                "seq-mean-token-sum-norm": to("algorithm.loss_mean=constant", "algorithm.loss_mean_length"),
            },
        ),
        "loss_scale_factor": to("algorithm.loss_mean_length", note="of algorithm.loss_mean=constant"),
        "policy_loss.loss_mode": to(
            "algorithm.loss",
            values={
                "vanilla": to("algorithm.loss=ppo"),
                "gspo": to(
                    "algorithm.loss=gspo",
                    "algorithm.sequence_unit=trajectory",
                    "algorithm.loss_mean=sequences",
                    note="clip range: algorithm.gspo",
                ),
                "cispo": to("algorithm.loss=cispo", note="its clip range is algorithm.cispo"),
                "sapo": to("algorithm.loss=sapo", "algorithm.loss_mean=sequences", note="its gate: algorithm.sapo"),
                "geo_mean": to(
                    "algorithm.loss=gmpo",
                    "algorithm.sequence_unit=trajectory",
                    "algorithm.loss_mean=sequences",
                    note="see algorithm.gmpo",
                ),
                "dppo_tv": to("algorithm.loss=dppo_tv", note="its bounds: algorithm.dppo.tv_low, tv_high"),
                "dppo_kl": to("algorithm.loss=dppo_kl", note="its bounds: algorithm.dppo.kl_low, kl_high"),
                "dro": to("algorithm.loss=dro", note="its strength is algorithm.dro.strength"),
                "bypass_mode": to("algorithm.old_logprobs=engine"),
                **{loss: to(f"algorithm.loss={loss}") for loss in ("clip_cov", "kl_cov")},
                "gpg": OWN_LOSS,
            },
        ),
        "policy_loss.clip_cov_ratio": to("algorithm.clip_cov.share"),
        "policy_loss.clip_cov_lb": to("algorithm.clip_cov.low"),
        "policy_loss.clip_cov_ub": to("algorithm.clip_cov.high"),
        "policy_loss.kl_cov_ratio": to("algorithm.kl_cov.share"),
        "policy_loss.ppo_kl_coef": to("algorithm.kl_cov.coefficient"),
        "policy_loss.*": OWN_LOSS,
        "tau_pos": to("algorithm.sapo.temperature_positive"),
        "tau_neg": to("algorithm.sapo.temperature_negative"),
        "entropy_coeff": to("algorithm.entropy.coefficient"),
        "calculate_entropy": ALWAYS,
        "use_kl_loss": to(
            "algorithm.kl.coefficient", note="above 0 is on", values={"false": to("algorithm.kl.coefficient=0")}
        ),
        "kl_loss_coef": to("algorithm.kl.coefficient"),
        "kl_loss_type": to("algorithm.kl.estimator", values=verl_kl.IN_LOSS),
        "tis_imp_ratio_cap": to("algorithm.importance_cap", note=ONE_CAP),
        "use_torch_compile": UNUSED,
        "use_prefix_grouper": UNUSED,
        "use_remove_padding": ALWAYS,
        "use_fused_kernels": FUSED_HEAD,
        "freeze_vision_tower": NO_MULTIMODAL,
        "entropy_from_logits_chunk_size": to("policy.logit_chunk"),
        "entropy_from_logits_with_chunking": to("policy.logit_chunk"),
        "entropy_checkpointing": ALWAYS,
        "calculate_sum_pi_squared": none("it is computed where algorithm.advantage needs it; leave it out"),
        "sum_pi_squared_checkpointing": ALWAYS,
        "checkpoint.*": NO_CHECKPOINT_CHOICE,
        **under("profiler", PROFILER),
        **ROUTER_REPLAY,
        "qat.*": none("there is no training for low precision; leave it out"),
        "fsdp_config.*": NO_FSDP,
        "veomni.*": NO_FSDP,
        "ulysses_sequence_parallel_size": to("policy.layout.context", note="sequences over several GPUs"),
        "load_weight": ALWAYS,
        "rollout_n": to("data.samples_per_prompt"),
        "pad_to_length": UNUSED,
        "megatron.tensor_model_parallel_size": to("policy.layout.tensor"),
        "megatron.pipeline_model_parallel_size": to("policy.layout.pipeline"),
        "megatron.context_parallel_size": to("policy.layout.context"),
        "megatron.expert_model_parallel_size": to("policy.layout.expert"),
        "megatron.expert_tensor_parallel_size": to("policy.layout.expert_tensor"),
        **under("megatron", _MEGATRON_OPTIONS),
        "fsdp_config.param_offload": offload.offload("parameters", "gradients"),
        "fsdp_config.optimizer_offload": offload.offload("optimizer"),
        "fsdp_config.offload_policy": offload.POLICY_LEAVES,
    },
)

_REFERENCE = under(
    "actor_rollout_ref.ref",
    {
        "megatron.tensor_model_parallel_size": to("reference.layout.tensor", note=LAYOUT_OF_REFERENCE),
        "megatron.pipeline_model_parallel_size": to("reference.layout.pipeline", note=LAYOUT_OF_REFERENCE),
        "megatron.virtual_pipeline_model_parallel_size": to(
            "reference.layout.virtual_pipeline", note=LAYOUT_OF_REFERENCE
        ),
        "megatron.context_parallel_size": to("reference.layout.context", note=LAYOUT_OF_REFERENCE),
        "megatron.expert_model_parallel_size": to("reference.layout.expert", note=LAYOUT_OF_REFERENCE),
        "megatron.expert_tensor_parallel_size": to("reference.layout.expert_tensor", note=LAYOUT_OF_REFERENCE),
        "ulysses_sequence_parallel_size": to("reference.layout.context", note=LAYOUT_OF_REFERENCE),
        "log_prob_micro_batch_size": MICRO,
        "log_prob_micro_batch_size_per_gpu": MICRO,
        "log_prob_max_token_len_per_gpu": to("policy.micro_tokens"),
        "log_prob_use_dynamic_bsz": ALWAYS,
        "megatron.param_offload": none("a reference on the policy's ranks lies in host memory always; leave it out"),
        "fsdp_config.*": NO_FSDP,
        "profiler.*": NO_PROFILER,
        "*": none("the reference is built as the policy is; leave it out"),
    },
)

_ASYNC = under(
    "async_training",
    {
        "staleness_threshold": to(
            "asynchrony.max_staleness",
            note="syncs, with asynchrony.mode=full: their share of a step's samples, rounded up",
        ),
        "trigger_parameter_sync_step": EVERY_SYNC,
        "require_batches": to("data.prompts_per_step", note="a step takes so many groups"),
        "partial_rollout": PARTIAL,
        "use_rollout_log_probs": to("algorithm.old_logprobs", note="engine where theirs is true"),
        "compute_prox_log_prob": to("algorithm.old_logprobs", note="policy where theirs is true"),
        "*": ASYNC,
    },
)

KEYS: Table = {**_TRAINER, **_ASYNC, **_DATA, **_MODEL, **_OPTIMIZER, **_ACTOR, **_REFERENCE}
