"""What the other programs call the critic and its advantages."""

from __future__ import annotations

from skyrl_mega.config.other_programs import offload
from skyrl_mega.config.other_programs.entry import NO_CHECKPOINT_CHOICE, NO_LORA, Table, none, several, to, under

GAE = to("algorithm.advantage=gae", "algorithm.whiten=batch")
GAMMA = to("algorithm.gamma")
LIKE_THE_POLICY = none("a critic has the policy's: settings of `policy`, but for those that `critic` has; leave it out")
_MICRO = to("critic.micro_tokens", note="a budget of tokens, not a number of sequences")
NODES_TIMES = "nodes times GPUs; null takes as many as the policy"

SKYRL: Table = {
    "trainer.critic_mini_batch_size": to("data.mini_batch_prompts", note="the policy's and the critic's alike"),
    "trainer.placement.critic_num_nodes": to("critic.ranks", note=NODES_TIMES),
    "trainer.placement.critic_num_gpus_per_node": to("critic.ranks", note=NODES_TIMES),
    "trainer.algorithm.value_head_prefix": none("a value head is score.weight, as transformers names it"),
    "trainer.algorithm.value_clip": to("critic.value_clip"),
    "trainer.algorithm.gamma": GAMMA,
    "trainer.algorithm.lambd": to("algorithm.gae.lam"),
    **under(
        "trainer.critic",
        {
            "model.path": to("critic.path"),
            "model.lora.*": NO_LORA,
            "optimizer_config.lr": to("critic.optimizer.lr"),
            "optimizer_config.adam_betas": to("critic.optimizer.beta1", "critic.optimizer.beta2"),
            "optimizer_config.weight_decay": to("critic.optimizer.weight_decay"),
            "optimizer_config.max_grad_norm": to("critic.optimizer.clip_grad"),
            "optimizer_config.num_warmup_steps": to("critic.optimizer.warmup_steps"),
            "*": LIKE_THE_POLICY,
        },
    ),
}

VERL: Table = {
    "trainer.max_critic_ckpt_to_keep": to("checkpoint.keep", note="policy and critic are in one checkpoint"),
    "trainer.critic_warmup": to("critic.warmup_steps"),
    "algorithm.gamma": GAMMA,
    "algorithm.lam": to("algorithm.gae.lam"),
    **under(
        "critic",
        {
            "enable": to("algorithm.advantage", note="gae has a critic, no other has"),
            "model.path": to("critic.path"),
            "cliprange_value": to("critic.value_clip"),
            "ppo_epochs": to("critic.epochs"),
            "ppo_mini_batch_size": to("data.mini_batch_prompts", note="the policy's and the critic's alike"),
            "ppo_max_token_len_per_gpu": to("critic.micro_tokens"),
            "loss_agg_mode": to("algorithm.loss_mean", note="the policy's and the critic's alike"),
            "grad_clip": to("critic.optimizer.clip_grad"),
            "checkpoint.*": NO_CHECKPOINT_CHOICE,
            **several(_MICRO, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu"),
            **several(
                _MICRO, "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu"
            ),
            **under(
                "optim",
                {
                    "lr": to("critic.optimizer.lr"),
                    "min_lr": to("critic.optimizer.min_lr"),
                    "betas": to("critic.optimizer.beta1", "critic.optimizer.beta2"),
                    "weight_decay": to("critic.optimizer.weight_decay"),
                    "clip_grad": to("critic.optimizer.clip_grad"),
                    "lr_warmup_steps": to("critic.optimizer.warmup_steps"),
                    "lr_decay_steps": to("critic.optimizer.decay_steps"),
                    "lr_decay_style": to("critic.optimizer.schedule"),
                    "lr_scheduler_type": to("critic.optimizer.schedule"),
                    "override_optimizer_config.*": to("critic.optimizer.options.*"),
                    **under("override_optimizer_config", offload.optimizer("critic.optimizer")),
                },
            ),
            **under(
                "megatron",
                {
                    "tensor_model_parallel_size": to("critic.layout.tensor"),
                    "pipeline_model_parallel_size": to("critic.layout.pipeline"),
                    "virtual_pipeline_model_parallel_size": to("critic.layout.virtual_pipeline"),
                    "context_parallel_size": to("critic.layout.context"),
                    "expert_model_parallel_size": to("critic.layout.expert"),
                    "expert_tensor_parallel_size": to("critic.layout.expert_tensor"),
                },
            ),
            **several(offload.CRITIC_LEAVES, "param_offload grad_offload optimizer_offload", "megatron."),
            **several(
                LIKE_THE_POLICY,
                "model.* optim.* megatron.* fsdp.* engine.* profiler.* strategy rollout_n nccl_timeout load_weight "
                "shuffle data_loader_seed use_dynamic_bsz ulysses_sequence_parallel_size "
                "ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu",
            ),
        },
    ),
}

SLIME: Table = {
    "--gamma": GAMMA,
    "--lambd": to("algorithm.gae.lam"),
    "--value-clip": to("critic.value_clip"),
    "--num-critic-only-steps": to("critic.warmup_steps"),
    "--critic-lr": to("critic.optimizer.lr"),
    "--critic-load": to("critic.path", note="a Hugging Face directory"),
    "--critic-num-nodes": to("critic.ranks", note=NODES_TIMES),
    "--critic-num-gpus-per-node": to("critic.ranks", note=NODES_TIMES),
}

TRL: Table = {
    "gamma": GAMMA,
    "lam": to("algorithm.gae.lam"),
    "cliprange": to("algorithm.clip_low", "algorithm.clip_high"),
    "cliprange_value": to("critic.value_clip"),
    "vf_coef": none("a critic has an optimizer of its own: critic.optimizer.lr"),
    "num_ppo_epochs": to("data.epochs_per_step", "critic.epochs", note="the policy's, and the critic's"),
    "num_mini_batches": to("data.mini_batch_prompts", note="data.prompts_per_step divided by it"),
    "kl_coef": to("algorithm.kl.coefficient", note="with algorithm.kl.where=reward and algorithm.kl.estimator=k1"),
    "kl_estimator": to(
        "algorithm.kl.estimator",
        values={name: to(f"algorithm.kl.estimator={name}", note="with where=reward") for name in ("k1", "k3")},
    ),
    "whiten_rewards": to("algorithm.whiten", note="of advantages, not of rewards; PPO has batch"),
    "response_length": to("rollout.sampling.max_tokens"),
    "reward_model_path": none("an environment gives the reward, which may ask a service (docs/own-environment.md)"),
    "sft_model_path": to("model.path"),
}
"""Of its PPOConfig."""
