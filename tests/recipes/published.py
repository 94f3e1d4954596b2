"""The settings of published runs, and the deliberate deviations of this project's recipes.

Values come from the scripts at the published commits, with the defaults of their base configuration, under this
project's names. `ours` of a deviation is the recipe's value; the recipe gives the reason next to the setting. Only
Megatron runs have a layout: FSDP lacks these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALL = "all"
"""Checkpoints kept: all, instead of a number."""


@dataclass(frozen=True)
class Run:
    """A published run."""

    source: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Deviation:
    """A recipe's value in place of the published value."""

    ours: Any
    reason: str


COMMON = {
    "run.seed": 42,
    "cluster.shared": True,
    "cluster.device": "cuda",
    "residency.keep": [],  # policy and engines take turns: `colocate_all`
    "model.dtype": "bfloat16",
    "policy.ranks": None,
    "policy.recompute": "full",
    "policy.moe.aux_loss": 0.0,
    "policy.optimizer.lr": 1e-6,
    "policy.optimizer.schedule": "constant",
    "policy.optimizer.warmup_steps": 0,
    "policy.optimizer.beta1": 0.9,
    "policy.optimizer.beta2": 0.999,
    "policy.optimizer.weight_decay": 0.01,
    "policy.optimizer.clip_grad": 1.0,
    "rollout.concurrency": 1024,
    "rollout.eager": None,  # CUDA graphs
    "rollout.max_turns": 1,
    "rollout.sampling.temperature": 1.0,
    "rollout.sampling.top_p": 1.0,
    "rollout.sampling.top_k": -1,
    "rollout.sampling.stop": [],
    "algorithm.advantage": "grpo",
    "algorithm.normalize": True,
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.2,
    "algorithm.dual_clip": None,
    "algorithm.importance_cap": None,
    "algorithm.kl.coefficient": 0.001,
    "algorithm.kl.estimator": "k3",
    "algorithm.dynamic_sampling.enabled": False,
    "algorithm.overlong.filter": False,
    "algorithm.overlong.buffer": 0,
    "data.samples_per_prompt": 5,
    "evaluation.every": 5,
    "evaluation.before": True,
    "evaluation.samples": 1,
    "evaluation.temperature": 0.0,
    "checkpoint.every": 10,
    "checkpoint.keep": ALL,
    "checkpoint.resume": True,
}
"""SkyRL's base configuration and the common settings of the scripts."""


def tokens_of(samples: int) -> dict[str, Any]:
    """Returns the token mean over micro-batches of these samples; for a single sample, the mean over sequences."""
    if samples == 1:
        return {"algorithm.loss_mean": "sequences"}
    return {"algorithm.loss_mean": "micro_batches", "algorithm.loss_mean_samples": samples}


def gpus(nodes: int, per_node: int, engines: int, tensor: int, memory: float) -> dict[str, Any]:
    """Returns the machine and its engines."""
    keys = ("cluster.nodes", "cluster.gpus_per_node", "rollout.engines", "rollout.tensor", "rollout.memory_fraction")
    return dict(zip(keys, (nodes, per_node, engines, tensor, memory), strict=True))


def megatron(tensor: int, pipeline: int = 1, context: int = 1, expert: int = 1) -> dict[str, Any]:
    """Returns a layout with a single tensor-parallel rank per expert."""
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert, "expert_tensor": None}
    return {f"policy.layout.{name}": size for name, size in sizes.items()}


SEARCH = {
    **COMMON,
    "run.epochs": 1,
    "policy.optimizer.warmup_steps": 94,
    "policy.optimizer.warmup_from_zero": True,
    "policy.optimizer.clip_grad": 0.5,
    "data.prompts_per_step": 512,
    "data.mini_batch_prompts": 256,
    "rollout.max_prompt_tokens": 2048,
    "rollout.max_input_tokens": 4096,
    "rollout.max_length": 4096 + 500,
    "rollout.max_turns": 4,
    "rollout.conversation": "one_message",
    "rollout.sampling.max_tokens": 500,
    "rollout.sampling.stop": ["</search>", "</answer>"],
    "environment.retriever.topk": 3,
    "environment.options.search.invalid": "empty",
    "evaluation.every": 50,
    "evaluation.before": False,
    "checkpoint.every": 20,
    "checkpoint.keep": 5,
}
DAPO = {
    **COMMON,
    "run.epochs": 20,
    "policy.optimizer.warmup_steps": 160,
    "policy.optimizer.warmup_from_zero": True,
    "policy.optimizer.weight_decay": 0.1,
    "data.prompts_per_step": 512,
    "data.mini_batch_prompts": 32,
    "data.samples_per_prompt": 16,
    "rollout.eager": True,
    "rollout.max_prompt_tokens": 2048,
    "rollout.sampling.max_tokens": 8192,
    "algorithm.clip_high": 0.28,
    "algorithm.dual_clip": 10.0,
    "algorithm.kl.coefficient": 0.0,
    "algorithm.overlong.filter": True,
    "algorithm.overlong.buffer": 4096,
    "algorithm.overlong.penalty": 1.0,
    "environment.options.aime.answer": "dapo",
    "evaluation.samples": 32,
    "evaluation.temperature": 1.0,
    "evaluation.top_p": 0.7,
    "checkpoint.keep": 3,
}
GSM8K = {
    **COMMON,
    "model.path": "models/Qwen2.5-1.5B-Instruct",
    "run.epochs": 20,
    **gpus(1, 4, 4, 1, 0.8),
    **tokens_of(64),
    "algorithm.kl.mean": "sequences",
    "data.prompts_per_step": 1024,
    "data.mini_batch_prompts": 256,
    "rollout.max_prompt_tokens": 512,
    "rollout.sampling.max_tokens": 1024,
}
SKYRL_AGENT = {
    **{key: value for key, value in COMMON.items() if key not in ("run.seed", "rollout.eager", "rollout.concurrency")},
    **tokens_of(1),
    "run.epochs": 100,
    "algorithm.dual_clip": 3.0,
    "algorithm.kl.mean": "sequences",
    "data.prompts_per_step": 32,
    "data.mini_batch_prompts": 32 // 8,  # 32 trajectories: the program multiplies by `rollout.n`, which is 1
    "data.samples_per_prompt": 8,
    "rollout.max_prompt_tokens": 12000,
    "rollout.sampling.temperature": 0.6,
    "rollout.sampling.top_p": 0.95,
    "environment.options.swe.command_timeout_s": 300,
    "environment.options.swe.test_timeout_s": 1200,
    "evaluation.every": 0,
    "evaluation.before": False,
    "evaluation.temperature": None,
    "checkpoint.every": 1,
    "checkpoint.keep": 10,
}
"""Settings of SkyRL-v0's scripts of SWE tasks and of the program, a fork of verl."""
NEMO_RL = {
    "run.seed": 42,
    "run.epochs": 100,
    "cluster.shared": False,
    "cluster.device": "cuda",
    "cluster.nodes": 16,
    "model.dtype": "bfloat16",
    "policy.ranks": 64,
    "policy.recompute": "full",
    "policy.moe.aux_loss": 0.0,
    "policy.moe.freeze_router": True,
    "policy.optimizer.lr": 1e-6,
    "policy.optimizer.schedule": "constant",
    "policy.optimizer.warmup_steps": 0,
    "policy.optimizer.beta1": 0.9,
    "policy.optimizer.beta2": 0.999,
    "policy.optimizer.weight_decay": 0.0,
    "policy.optimizer.clip_grad": 1.0,
    "algorithm.advantage": "grpo",
    "algorithm.normalize": True,
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.28,
    "algorithm.dual_clip": None,
    "algorithm.importance_cap": 5.0,
    "algorithm.importance_level": "token",
    "algorithm.loss_mean": "tokens",
    "algorithm.kl.coefficient": 0.0,
    "algorithm.dynamic_sampling.enabled": False,
    "algorithm.overlong.filter": True,
    "asynchrony.mode": "full",
    "asynchrony.max_staleness": 1,
    "data.mini_batch_prompts": None,
    "data.samples_per_prompt": 8,
    "data.shuffle": False,
    "rollout.engines": 32,
    "rollout.tensor": 2,
    "rollout.memory_fraction": 0.8,
    "rollout.max_length": 131072,
    "rollout.sampling.temperature": 1.0,
    "rollout.sampling.top_p": 1.0,
    "rollout.sampling.top_k": -1,
    "evaluation.before": False,
    "checkpoint.every": 5,
    "checkpoint.keep": 2,
}
"""Settings of both stages of NeMo-RL's recipe and of the files that the recipe extends."""

RUNS: dict[str, Run] = {
    "searchr1_30b": Run(
        "SkyRL 9b878cd, skyrl-train/examples/megatron/run_search_megatron.sh",
        {
            **SEARCH,
            "model.path": "models/Qwen3-30B-A3B",
            **gpus(4, 8, 4, 8, 0.6),
            **megatron(2, expert=8),
            **tokens_of(1),
            "policy.recompute": "none",
            "checkpoint.resume": False,
        },
    ),
    "searchr1_3b": Run(
        "SkyRL 05774e8 (before 7cd23ea), skyrl-train/examples/search/run_search.sh",
        {
            **SEARCH,
            "model.path": "models/Qwen2.5-3B-Instruct",
            **gpus(1, 8, 4, 2, 0.5),
            **tokens_of(4),
            "algorithm.kl.mean": "sequences",
        },
    ),
    "skyrl_sql_7b": Run(
        "SkyRL 9b878cd, skyrl-train/examples/text_to_sql/run_skyrl_sql.sh",
        {
            **COMMON,
            "model.path": "models/Qwen2.5-Coder-7B-Instruct",
            **gpus(1, 8, 2, 4, 0.7),
            **tokens_of(1),
            "run.epochs": 30,
            "policy.optimizer.clip_grad": 0.5,
            "algorithm.kl.coefficient": 0.0,
            "data.prompts_per_step": 256,
            "data.mini_batch_prompts": 256,
            "rollout.max_prompt_tokens": 6000,
            "rollout.max_input_tokens": 29000,
            "rollout.max_length": 29000 + 3000,
            "rollout.max_turns": 6,
            "rollout.conversation": "one_message",
            "rollout.sampling.max_tokens": 3000,
            "rollout.sampling.temperature": 0.6,
            "rollout.sampling.top_p": 0.95,
            "rollout.sampling.stop": ["</sql>", "</solution>"],
            "environment.options.text2sql.reward_timeout_s": 30,
            "checkpoint.every": 60,
        },
    ),
    "dapo": Run(
        "SkyRL 8263149, skyrl-train/examples/megatron/run_megatron_dapo_qwen3_30b_a3b.sh",
        {
            **DAPO,
            "model.path": "models/Qwen3-30B-A3B-Base",
            **gpus(2, 8, 2, 8, 0.7),
            **megatron(4, expert=8),
            **tokens_of(2),
            "algorithm.importance_cap": 2.0,
        },
    ),
    "dapo_7b": Run(
        "SkyRL a95b699, skyrl-train/examples/algorithms/dapo/run_dapo_qwen2.5_math_7b_aime.sh",
        {
            **DAPO,
            "model.path": "models/Qwen2.5-Math-7B",
            **gpus(1, 8, 2, 4, 0.8),
            **tokens_of(16),
            "evaluation.every": 10,
        },
    ),
    "dapo_1.7b": Run(
        "SkyRL a95b699, skyrl-train/examples/algorithms/dapo/run_dapo_qwen3_1.7b_aime.sh",
        {**DAPO, "model.path": "models/Qwen3-1.7B-Base", **gpus(2, 8, 16, 1, 0.8), **tokens_of(4)},
    ),
    "dapo_4b": Run(
        "SkyRL a95b699, skyrl-train/examples/algorithms/dapo/run_dapo_aime_qwen3_4b_aime.sh",
        {**DAPO, "model.path": "models/Qwen3-4B-Base", **gpus(2, 8, 16, 1, 0.8), **tokens_of(4)},
    ),
    "dapo_4b_one_node": Run(
        "SkyRL 8263149, skyrl-train/examples/megatron/run_megatron_dapo_qwen3_4b.sh",
        {
            **DAPO,
            "model.path": "models/Qwen3-4B-Base",
            **gpus(1, 8, 4, 2, 0.8),
            **megatron(4, pipeline=2),
            **tokens_of(8),
            "algorithm.importance_cap": 2.0,
            "evaluation.before": False,
        },
    ),
    "swe_8b": Run(
        "SkyRL 65a1db5, examples/sky/swebench/run_skyrl_agent_qwen8b_nt.sh",
        {
            **SKYRL_AGENT,
            "model.path": "models/Qwen3-8B",
            **gpus(1, 8, 8, 1, 0.8),
            "rollout.max_turns": 25,
            "rollout.max_input_tokens": 31232,
            "rollout.max_length": 31232 + 1536,
            "rollout.sampling.max_tokens": 1536,
            "rollout.sampling.top_k": 20,
            "rollout.chat_template_options.enable_thinking": False,
            "environment.slots": 64,
        },
    ),
    "swe_14b": Run(
        "SkyRL 65a1db5, examples/sky/swebench/run_skyrl_agent_qwen14b_t.sh",
        {
            **SKYRL_AGENT,
            "model.path": "models/Qwen3-14B",
            **gpus(1, 8, 4, 2, 0.8),
            "algorithm.advantage": "gae",
            "algorithm.gamma": 1.0,
            "algorithm.gae.lam": 1.0,
            "algorithm.whiten": "batch",
            "algorithm.clip_high": 0.28,
            "algorithm.entropy.coefficient": 0.001,
            "critic.value_clip": 0.5,
            "critic.warmup_steps": 0,
            "critic.epochs": 1,
            "critic.optimizer.lr": 1e-5,
            "critic.optimizer.weight_decay": 0.01,
            "critic.optimizer.clip_grad": 1.0,
            "rollout.max_turns": 35,
            "rollout.max_input_tokens": 31744,
            "rollout.max_length": 31744 + 3072,
            "rollout.sampling.max_tokens": 3072,
            "environment.slots": 192,
        },
    ),
    "swe_30b": Run(
        "NeMo-RL 7ea279a, examples/nemo_gym/grpo_qwen3_30ba3b_thinking_swe2.yaml",
        {
            **NEMO_RL,
            "model.path": "models/Qwen3-30B-A3B-Thinking-2507",
            **megatron(4, pipeline=2, context=4, expert=8),
            "data.prompts_per_step": 8,
            "rollout.max_turns": 200,
            "rollout.trajectory_timeout_s": 1800,
            "environment.options.swe.command_timeout_s": 300,
            "environment.options.swe.test_timeout_s": 1200,
        },
    ),
    "swe_30b_pivot": Run(
        "NeMo-RL 7ea279a, examples/nemo_gym/grpo_qwen3_30ba3b_thinking_swe1.yaml",
        {
            **NEMO_RL,
            "model.path": "models/Qwen3-30B-A3B-Thinking-2507",
            **megatron(2, pipeline=2, context=4, expert=8),
            "data.prompts_per_step": 64,
            "rollout.max_turns": 1,
            "environment.options.tool_choice.similarity": 0,
        },
    ),
    "gsm8k": Run("SkyRL 9b878cd, skyrl-train/examples/gsm8k/run_gsm8k.sh", {**GSM8K, "checkpoint.resume": False}),
    "multiply": Run("SkyRL 9b878cd, skyrl-train/examples/multiply/run_multiply.sh", GSM8K),
}
"""Published runs by the recipe's name."""

LOSS_SAME = "activations are computed again or kept: the loss is the same, only time and memory differ"
GRAPHS = "the published scripts rule graphs out for an instability of their vLLM; here engines use them on GPUs"
CONTINUES = "a run that was stopped continues from its checkpoint; one that was not never reads it"
DISK = "checkpoints with the optimizer's state are large, and the newest is the one to continue from"
HALF_LENGTH = "half of the length, on a quarter of the nodes"
TABLE_SAYS = "the published table says 8 H100s; the script of its commit has two nodes"
HALVED = {
    "cluster.nodes": Deviation(4, HALF_LENGTH),
    "policy.ranks": Deviation(16, HALF_LENGTH),
    "policy.layout.pipeline": Deviation(1, HALF_LENGTH),
    "rollout.engines": Deviation(8, HALF_LENGTH),
    "rollout.max_length": Deviation(65536, HALF_LENGTH),
}

DEVIATIONS: dict[str, dict[str, Deviation]] = {
    "searchr1_30b": {
        "policy.recompute": Deviation("full", LOSS_SAME),
        "checkpoint.resume": Deviation(True, CONTINUES),
    },
    "searchr1_3b": {
        "policy.recompute": Deviation("none", LOSS_SAME),
    },
    "skyrl_sql_7b": {
        "checkpoint.keep": Deviation(2, DISK),
    },
    "dapo": {"rollout.eager": Deviation(None, GRAPHS)},
    "dapo_7b": {"rollout.eager": Deviation(None, GRAPHS)},
    "dapo_1.7b": {
        "rollout.eager": Deviation(None, GRAPHS),
        "cluster.nodes": Deviation(1, TABLE_SAYS),
        "rollout.engines": Deviation(8, TABLE_SAYS),
    },
    "dapo_4b": {"rollout.eager": Deviation(None, GRAPHS)},
    "dapo_4b_one_node": {
        "rollout.eager": Deviation(None, GRAPHS),
    },
    "swe_8b": {},
    "swe_14b": {
        "cluster.nodes": Deviation(2, "the critic has GPUs of its own"),
        "policy.ranks": Deviation(8, "the critic has GPUs of its own"),
    },
    "swe_30b": HALVED,
    "swe_30b_pivot": HALVED,
    "gsm8k": {
        "policy.recompute": Deviation("none", LOSS_SAME),
        "checkpoint.resume": Deviation(True, CONTINUES),
        "checkpoint.keep": Deviation(2, DISK),
    },
    "multiply": {
        "policy.recompute": Deviation("none", LOSS_SAME),
        "rollout.max_turns": Deviation(5, "the script leaves one turn; the text that it belongs to is about several"),
        "checkpoint.keep": Deviation(2, DISK),
    },
}
"""The recipe's value by recipe and setting. docs/recipes.md lists differences beyond settings."""
