"""verl's keys, second part: engines, environments, rewards and the algorithm."""

from __future__ import annotations

from skyrl_mega.config.other_programs import critic, offload, verl_kl
from skyrl_mega.config.other_programs.entry import (
    ALWAYS,
    MICRO,
    NO_DISTILLATION,
    NO_MTP,
    NO_PROFILER,
    NO_REWARD_MODEL,
    ONE_CAP,
    REWARD,
    ROLLOUT_REPLAY,
    UNUSED,
    Table,
    none,
    several,
    to,
    under,
)

RS_BOUNDS = "its bounds are algorithm.rejection.low and high"
SAMPLING = "rollout.sampling has temperature, top_p and top_k"

_ROLLOUT = under(
    "actor_rollout_ref.rollout",
    {
        "name": none("engines are vLLM's; leave it out"),
        "mode": none("engines take requests as they come, so leave it out; training ahead of them is asynchrony.mode"),
        "n": to("data.samples_per_prompt"),
        "temperature": to("rollout.sampling.temperature"),
        "top_p": to("rollout.sampling.top_p"),
        "top_k": to("rollout.sampling.top_k"),
        "do_sample": to("rollout.sampling.temperature", note="0 is greedy"),
        "ignore_eos": none("a turn ends with the model's end of sequence, or rollout.sampling.stop"),
        "prompt_length": to("rollout.max_prompt_tokens"),
        "response_length": to(
            "rollout.max_response_tokens", note="of all turns; rollout.sampling.max_tokens is of one"
        ),
        "max_model_len": to("rollout.max_length"),
        "tensor_model_parallel_size": to("rollout.tensor"),
        "data_parallel_size": to("rollout.engines", note="as many more engines"),
        "pipeline_model_parallel_size": none("an engine is cut by rollout.tensor alone"),
        "expert_parallel_size": to("rollout.options.enable_expert_parallel=true", note="over the GPUs of an engine"),
        "moe_tensor_parallel_size": to("rollout.options.enable_expert_parallel"),
        "gpu_memory_utilization": offload.FRACTION,
        "max_num_seqs": to("rollout.concurrency"),
        "max_num_batched_tokens": to("rollout.options.max_num_batched_tokens"),
        "enable_chunked_prefill": to("rollout.options.enable_chunked_prefill"),
        "enable_prefix_caching": to("rollout.options.enable_prefix_caching"),
        "cudagraph_capture_sizes": to("rollout.options.cudagraph_capture_sizes"),
        "scheduling_policy": to("rollout.options.scheduling_policy"),
        "disable_log_stats": to("rollout.options.disable_log_stats"),
        "enforce_eager": to("rollout.eager"),
        "quantization": to("rollout.options.quantization", note="fp8_per_block for their fp8"),
        "quantization_config_file": to("rollout.options.hf_overrides"),
        "seed": to("run.seed"),
        "dtype": to("model.dtype", note="one for policy and engines"),
        "engine_kwargs.vllm.max_model_len": to("rollout.max_length"),
        "engine_kwargs.vllm.*": to("rollout.options.*"),
        "engine_kwargs.*": none("engines are vLLM's: rollout.options has its arguments"),
        "nnodes": to("cluster.nodes", note="policy.ranks GPUs are the policy's, the others the engines'"),
        "n_gpus_per_node": to("cluster.gpus_per_node"),
        "free_cache_engine": offload.ENGINES_SLEEP,
        "enable_sleep_mode": offload.ENGINES_SLEEP,
        "multi_stage_wake_up": ALWAYS,
        "log_prob_micro_batch_size": MICRO,
        "log_prob_micro_batch_size_per_gpu": MICRO,
        "log_prob_max_token_len_per_gpu": to("policy.micro_tokens"),
        "log_prob_use_dynamic_bsz": ALWAYS,
        "calculate_log_probs": ALWAYS,
        "logprobs_mode": ALWAYS,
        "over_sample_rate": to("algorithm.dynamic_sampling.enabled", note="generates what is missing, in rounds"),
        "val_kwargs.n": to("evaluation.samples"),
        "val_kwargs.temperature": to("evaluation.temperature"),
        "val_kwargs.top_p": to("evaluation.top_p"),
        "val_kwargs.do_sample": to(
            "evaluation.temperature", note="0 is greedy", values={"false": to("evaluation.temperature=0")}
        ),
        "val_kwargs.*": none("rollout.sampling holds for evaluation too"),
        "multi_turn.max_assistant_turns": to("rollout.max_turns"),
        "multi_turn.max_user_turns": to("rollout.max_turns", note="turns of the policy; that is one more"),
        "multi_turn.enable": to("rollout.max_turns", note="above 1", values={"false": to("rollout.max_turns=1")}),
        "multi_turn.tool_config_path": none("an environment has its tools (docs/environments.md)"),
        "multi_turn.function_tool_path": none("an environment has its tools (docs/environments.md)"),
        "multi_turn.interaction_config_path": to("environment.classes", note="an environment answers every turn"),
        "multi_turn.max_tool_response_length": to(
            "environment.options", note="the environment's own option, such as environment.retriever.passage_chars"
        ),
        "multi_turn.tool_response_truncate_side": none("an environment shortens what its tools answer"),
        "multi_turn.max_parallel_calls": none("an environment decides how it runs the calls of a turn"),
        "multi_turn.format": none("an environment reads the calls of its tools"),
        "multi_turn.*": none("turns are messages of the model's chat template; leave it out"),
        "agent.num_workers": to("environment.processes"),
        "agent.default_agent_loop": to("environment.default"),
        "agent.agent_loop_config_path": to("environment.classes"),
        "agent.*": none("the agent loop is the same for every environment: environment.classes"),
        "checkpoint_engine.update_weights_bucket_megabytes": to("weights.bucket_mib"),
        "checkpoint_engine.*": none("the transfer plan chooses the way of every part (docs/weight-sync.md)"),
        "load_format": none("the policy sends the weights to the engines; leave it out"),
        "layered_summon": none("the policy sends the weights to the engines; leave it out"),
        "trace.*": to("telemetry.trajectories_every", note="trajectories of so many steps, as parquet"),
        "prometheus.*": UNUSED,
        "profiler.*": NO_PROFILER,
        "mtp.*": NO_MTP,
        "enable_rollout_routing_replay": ROLLOUT_REPLAY,
        "skip_rollout": none("every step generates; leave it out"),
        "skip_dump_dir": none("every step generates; leave it out"),
        "disaggregation.*": none("an engine computes prompts and answers; leave it out"),
        "qat.*": none("there is no training for low precision; leave it out"),
        "full_determinism": to("run.deterministic", note="of the whole run, not of the engines alone"),
        **several(
            UNUSED,
            "skip_tokenizer_init moe_load_balance_metrics_interval layer_name_map.*",
        ),
    },
)

_REST: Table = {
    "actor_rollout_ref.hybrid_engine": offload.SHARED,
    "actor_rollout_ref.nccl_timeout": to("cluster.call_timeout_s"),
    "algorithm.adv_estimator": to(
        "algorithm.advantage",
        values={
            **{theirs: to("algorithm.advantage=grpo") for theirs in ("grpo", "grpo_vectorized")},
            **{theirs: to("algorithm.advantage=rloo") for theirs in ("rloo", "rloo_vectorized")},
            "gae": critic.GAE,
            "reinforce_plus_plus": to("algorithm.advantage=reinforce++"),
            "reinforce_plus_plus_baseline": to("algorithm.advantage=reinforce++_baseline"),
            "opo": to("algorithm.advantage=opo"),
            "grpo_passk": to("algorithm.advantage=pass_at_k", note="not divided by the standard deviation"),
            "gpg": to("algorithm.advantage=gpg", note="N is over the trajectories of groups that differ, as published"),
            "gdpo": to("algorithm.advantage=gdpo", "algorithm.reward_weights"),
            "remax": to("algorithm.advantage=remax"),
            **several(
                to(
                    "algorithm.advantage=optimal_token_baseline", note="places are counted over the policy's own tokens"
                ),
                "optimal_token_baseline tir_optimal_token_baseline",
            ),
        },
    ),
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.normalize"),
    "algorithm.use_kl_in_reward": to("algorithm.kl.where", values={"true": to("algorithm.kl.where=reward")}),
    "algorithm.kl_penalty": to(
        "algorithm.kl.estimator", note="of algorithm.kl.where=reward, as verl's is", values=verl_kl.IN_REWARD
    ),
    "algorithm.kl_ctrl.kl_coef": to("algorithm.kl.coefficient"),
    "algorithm.kl_ctrl.type": to("algorithm.kl.target", values={"fixed": to("algorithm.kl.target=null")}),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl.target", note="of an answer: the sum over its tokens"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl.horizon"),
    "algorithm.use_pf_ppo": none("every trajectory counts once; leave it out"),
    "algorithm.pf_ppo.*": none("every trajectory counts once; leave it out"),
    "algorithm.filter_groups.enable": to("algorithm.dynamic_sampling.enabled"),
    "algorithm.filter_groups.max_num_gen_batches": to("algorithm.dynamic_sampling.max_rounds", note="at least 1"),
    "algorithm.filter_groups.metric": to(
        "algorithm.dynamic_sampling.reward",
        note="the name of one of an environment's rewards",
        values=several(to("algorithm.dynamic_sampling.reward=null"), "score seq_reward seq_final_reward"),
    ),
    "algorithm.filter_groups.*": UNUSED,
    "algorithm.gdpo_reward_keys": to(
        "algorithm.advantage=gdpo",
        note="an environment's step names its rewards, and all of them count (docs/own-environment.md)",
    ),
    "algorithm.gdpo_reward_weights": to("algorithm.reward_weights", note="name: weight, not a list"),
    "algorithm.rollout_correction.rollout_is_threshold": to("algorithm.importance_cap", note=ONE_CAP),
    "algorithm.rollout_correction.rollout_is": to(
        "algorithm.importance_level",
        values={
            "null": to("algorithm.importance_cap=null"),
            "token": to("algorithm.importance_cap"),
            "sequence": to(
                "algorithm.importance_cap", "algorithm.importance_level=sequence", "algorithm.sequence_unit=trajectory"
            ),
        },
    ),
    "algorithm.rollout_correction.rollout_rs": to(
        "algorithm.rejection.level",
        values={
            "null": to("algorithm.rejection.level=off"),
            "token_k1": to("algorithm.rejection.level=token", note=RS_BOUNDS),
            "seq_sum_k1": to(
                "algorithm.rejection.level=sequence", "algorithm.sequence_unit=trajectory", note=RS_BOUNDS
            ),
            "seq_mean_k1": to(
                "algorithm.rejection.level=geometric", "algorithm.sequence_unit=trajectory", note=RS_BOUNDS
            ),
            "geometric": to(
                "algorithm.rejection.level=geometric", "algorithm.sequence_unit=trajectory", note=RS_BOUNDS
            ),
            **several(
                none("algorithm.rejection looks at ratios: level, low and high, or outlier_low and outlier_high"),
                "token_k2 token_k3 seq_sum_k2 seq_sum_k3 seq_mean_k2 seq_mean_k3 seq_max_k2 seq_max_k3",
            ),
        },
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": to(
        "algorithm.rejection.high", note="algorithm.rejection.low is 1 / high there unless given"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": to("algorithm.rejection.low"),
    "algorithm.rollout_correction.rollout_token_veto_threshold": to("algorithm.rejection.outlier_low"),
    "algorithm.rollout_correction.bypass_mode": to(
        "algorithm.old_logprobs",
        values={"true": to("algorithm.old_logprobs=engine"), "false": to("algorithm.old_logprobs=policy")},
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": to("algorithm.importance_normalize"),
    "algorithm.rollout_correction.*": none("algorithm.importance_cap and algorithm.rejection are the corrections"),
    "reward_model.overlong_buffer.enable": to("algorithm.overlong.buffer", note="above 0 is on"),
    "reward_model.overlong_buffer.len": to("algorithm.overlong.buffer"),
    "reward_model.overlong_buffer.penalty_factor": to("algorithm.overlong.penalty"),
    "reward_model.overlong_buffer.log": UNUSED,
    **{
        f"{group}.reward_kwargs.{key}": entry
        for group in ("reward_model", "reward")
        for key, entry in {
            "overlong_buffer_cfg.enable": to("algorithm.overlong.buffer", note="above 0 is on"),
            "overlong_buffer_cfg.len": to("algorithm.overlong.buffer"),
            "overlong_buffer_cfg.penalty_factor": to("algorithm.overlong.penalty"),
            "overlong_buffer_cfg.log": UNUSED,
            "max_resp_len": to("rollout.max_response_tokens"),
            "*": to("environment.options", note="the options of the environment that gives the reward"),
        }.items()
    },
    "reward_model.reward_manager": REWARD,
    "reward_model.sandbox_fusion.*": none("programs run in the project's own sandbox (docs/sandbox.md)"),
    "reward_model.*": NO_REWARD_MODEL,
    "reward_manager.*": REWARD,
    "reward.reward_manager.*": REWARD,
    "reward.custom_reward_function.*": REWARD,
    "reward.reward_model.*": NO_REWARD_MODEL,
    "reward.sandbox_fusion.*": none("programs run in the project's own sandbox (docs/sandbox.md)"),
    "reward.num_workers": to("environment.workers", note="calls of environments at once, not processes"),
    "custom_reward_function.*": REWARD,
    "sandbox_fusion.*": none("programs run in the project's own sandbox (docs/sandbox.md)"),
    "distillation.*": NO_DISTILLATION,
    "global_profiler.steps": to("telemetry.profile.steps"),
    "global_profiler.*": NO_PROFILER,
    "transfer_queue.*": UNUSED,
    "skip.*": none("every step generates; leave it out"),
    "ray_kwargs.*": none("the run starts its own Ray session, or joins one (docs/ray.md)"),
    "model_engine": none("Megatron trains every model; leave it out"),
}

KEYS: Table = {**_ROLLOUT, **critic.VERL, **_REST}
