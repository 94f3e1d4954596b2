"""Hints for likely misnamed settings: name → description of the setting to use instead."""

from __future__ import annotations

from collections.abc import Mapping

# Texts of hints. Each follows a setting unknown here, and names the setting to use instead.
_STEPS = "telemetry.profile.steps lists the steps to record; without it, none is recorded"
_GATHERED = "policy.precision.parameters=fp8 stores and gathers weights in FP8 (docs/precision.md)"
_FP8 = "policy.precision.recipe=fp8_blockwise, fp8_current or mxfp8 trains in FP8, and model does not"
_SERVED = "rollout.options.quantization=fp8_per_block makes engines compute in FP8 (docs/precision.md)"
_AGAIN = "policy.recompute=selective, moe or full recomputes activations to save memory (docs/speed.md)"
_AHEAD = "asynchrony.mode=one_step or full lets engines generate while the policy trains (docs/asynchrony.md)"
_AGE = "asynchrony.max_staleness, with asynchrony.mode=full, counts syncs (docs/asynchrony.md)"

_CONTEXT = (
    "policy.layout.context splits sequences over ranks, policy.layout.context_exchange=all_to_all is Ulysses, and "
    "policy.layout.tensor above 1 includes sequence parallelism"
)

_NODES = "cluster.nodes is the number of nodes, and cluster.gpus_per_node that of one node's GPUs"

_LAYOUT_NAMES = {
    "tensor": ("tp", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline": ("pp", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "virtual_pipeline": ("vpp", "vp", "virtual_pipeline_model_parallel_size"),
    "expert": ("ep", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size"),
    "expert_tensor": ("etp", "expert_tensor_parallel_size"),
}
"""Sizes of `policy.layout` → other common names for each size."""
_DATA = "the data parallel size follows: policy.ranks / (tensor · pipeline · context) of policy.layout"

_OFFLOAD = "policy.offload_layers=N keeps the activations of N layers in host memory (docs/speed.md)"

_HOST = "policy.optimizer.streamed=true keeps the optimizer's state in host memory (docs/residency.md)"

_TIMES = (
    "rollout.env_timeout_s bounds one step of an environment, and rollout.trajectory_timeout_s a whole trajectory "
    "(docs/environments.md)"
)


def _optimizer(group: str) -> dict[str, str]:
    """Returns hints for megatron-core's optimizer names in an optimizer group."""
    streamed = _HOST.replace("policy.optimizer", group)
    moments = (
        f"{group}.moments=bfloat16, with {group}.beta1 and beta2 of at most 0.99, makes Adam's moments smaller "
        "(docs/residency.md)"
    )
    of_host = ("optimizer_cpu_offload", "cpu_offload", "offload", "optimizer_offload")
    small = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")
    return {f"{group}.{name}": streamed for name in of_host} | {f"{group}.{name}": moments for name in small}


HINTS: Mapping[str, str] = {
    "telemetry.profile.enabled": _STEPS,
    "telemetry.profile.enable": _STEPS,
    "policy.precision.enabled": _FP8,
    "policy.precision.param_gather": _GATHERED,
    "policy.precision.fp8_param_gather": _GATHERED,
    "policy.precision.fp8_param": _GATHERED,
    "policy.fp8": _FP8,
    "policy.fp8_param": _GATHERED,
    "policy.fp8_param_gather": _GATHERED,
    "fp8_param_gather": _GATHERED,
    "fp8_param": _GATHERED,
    "rollout.quantization": _SERVED,
    "policy.generation.vllm_cfg.precision": _SERVED,
    "policy.optimizer.learning_rate": "policy.optimizer.lr is the learning rate",
    "critic.optimizer.learning_rate": "critic.optimizer.lr is the learning rate",
    "policy.gradient_checkpointing": _AGAIN,
    "policy.activation_checkpointing": _AGAIN,
    "optimizer_cpu_offload": _HOST,
    "policy.megatron_config.optimizer_config_kwargs.optimizer_cpu_offload": _HOST,
    "policy.megatron_cfg.fp8_cfg.fp8_param": _GATHERED,
    "policy.megatron_cfg.fp8_cfg.enabled": _FP8,
    "policy.megatron_cfg.fp8_cfg.fp8_recipe": _FP8,
    "grpo.async_grpo.enabled": _AHEAD,
    "grpo.async_grpo.max_trajectory_age_steps": _AGE,
    "rollout.max_head_offpolicyness": _AGE,
    "max_off_policy_steps": _AGE,
    "orchestrator.max_off_policy_steps": _AGE,
    **_optimizer("policy.optimizer"),
    **_optimizer("critic.optimizer"),
    "policy.optimizer_cpu_offload": _HOST,
    "policy.optimizer_offload": _HOST,
    "policy.activation_offload": _OFFLOAD,
    "policy.offload_activations": _OFFLOAD,
    "policy.fine_grained_activation_offloading": _OFFLOAD,
    "policy.cpu_offloading": _OFFLOAD,
    "policy.cpu_offloading_num_layers": _OFFLOAD,
    "residency.activations": _OFFLOAD,
    "policy.enable_activation_offload": _OFFLOAD,
    **{f"policy.layout.{name}": _CONTEXT for name in ("cp", "ulysses", "sequence", "sequence_parallel")},
    **{f"policy.{name}": _CONTEXT for name in ("context_parallel_size", "sequence_parallel_size", "ulysses")},
    **{
        f"{group}.{name}": f"{group if '.' in group else 'policy.layout'}.{size} is the setting of this size"
        for group in ("policy", "policy.layout", "critic.layout", "reference.layout")
        for size, names in _LAYOUT_NAMES.items()
        for name in names
    },
    **{
        f"{group}.{name}": _DATA
        for group in ("policy", "policy.layout")
        for name in ("dp", "data", "data_parallel", "data_parallel_size")
    },
    "policy.cp": _CONTEXT,
    "rollout.tp": "rollout.tensor is the tensor parallel size of an engine",
    **{f"cluster.{name}": _NODES for name in ("gpus", "num_gpus", "num_nodes", "nnodes", "n_nodes")},
    **{
        f"{group}.{name}": _TIMES
        for group in ("environment", "rollout")
        for name in ("deadline", "deadline_s", "time_limit", "time_limit_s", "timeout", "timeout_s")
    },
    **{f"environment.{name}": _TIMES for name in ("env_timeout_s", "step_timeout_s", "trajectory_timeout_s")},
    "policy.offload_optimizer": _HOST,
    "residency.offload_optimizer": "residency.keep without optimizer keeps its state in host memory while engines work",
    "residency.enabled": "residency.keep lists the parts that stay on the GPU: [] offloads all in turn, null none",
    "residency.offload": "residency.keep lists the parts that stay on the GPU: [] offloads all in turn, null none",
}
