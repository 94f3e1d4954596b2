"""Hints for likely misnamed settings: name → description of the setting to use instead."""

from __future__ import annotations

from collections.abc import Mapping

# Texts of hints. Each follows a setting unknown here, and names the setting to use instead.
_STEPS = "telemetry.profile.steps lists the steps to record; without it, none is recorded"
_GATHERED = "policy.precision.parameters=fp8 stores and gathers weights in FP8 (docs/precision.md)"
_FP8 = "policy.precision.recipe=fp8_blockwise, fp8_current or mxfp8 trains in FP8, and model does not"
_SERVED = "rollout.options.quantization=fp8_per_block makes engines compute in FP8 (docs/precision.md)"
_AGAIN = "policy.recompute=selective, moe or full recomputes activations to save memory (docs/speed.md)"
_AGE = "asynchrony.max_staleness, with asynchrony.mode=full, counts syncs (docs/asynchrony.md)"

_CONTEXT = (
    "policy.layout.context splits sequences over ranks, policy.layout.context_exchange=all_to_all is Ulysses, and "
    "policy.layout.tensor above 1 includes sequence parallelism"
)

_NODES = "cluster.nodes is the number of nodes, and cluster.gpus_per_node that of one node's GPUs"

_LAYOUT_NAMES = {
    "tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "pipeline": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
    "virtual_pipeline": "vpp vp virtual_pipeline_model_parallel_size",
    "expert": "ep expert_parallel expert_parallel_size expert_model_parallel_size",
    "expert_tensor": "etp expert_tensor_parallel_size",
}
"""Sizes of `policy.layout` → other common names for each size."""
_DATA = "the data parallel size follows: policy.ranks / (tensor · pipeline · context) of policy.layout"

_OFFLOAD = "policy.offload_layers=N keeps the activations of N layers in host memory (docs/speed.md)"

_HOST = "policy.optimizer.streamed=true keeps the optimizer's state in host memory (docs/residency.md)"

_TIMES = (
    "rollout.env_timeout_s bounds one step of an environment, and rollout.trajectory_timeout_s a whole trajectory "
    "(docs/environments.md)"
)


_PARTS = "residency.keep lists the parts that stay on the GPU: [] offloads all in turn, null none"


def _each(hint: str, names: str, *groups: str) -> dict[str, str]:
    """Returns setting → hint, for the settings in `names` separated by spaces: complete names, or names in each of
    `groups`."""
    return {f"{group}.{name}".lstrip("."): hint for group in groups or ("",) for name in names.split()}


def _optimizer(group: str) -> dict[str, str]:
    """Returns hints for megatron-core's optimizer names in an optimizer group."""
    streamed = _HOST.replace("policy.optimizer", group)
    moments = (
        f"{group}.moments=bfloat16, with {group}.beta1 and beta2 of at most 0.99, makes Adam's moments smaller "
        "(docs/residency.md)"
    )
    return {
        f"{group}.learning_rate": f"{group}.lr is the learning rate",
        **_each(streamed, "optimizer_cpu_offload cpu_offload offload optimizer_offload", group),
        **_each(moments, "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype", group),
    }


def _layout(group: str, setting: str) -> dict[str, str]:
    """Returns hints for other names of a layout's sizes in a group; `setting` is the layout with these sizes."""
    hints = (_each(f"{setting}.{size} is the setting of this size", n, group) for size, n in _LAYOUT_NAMES.items())
    return {name: hint for each in hints for name, hint in each.items()}


HINTS: Mapping[str, str] = {
    **_each(_STEPS, "enabled enable", "telemetry.profile"),
    **_each(_FP8, "policy.precision.enabled policy.fp8"),
    **_each(_GATHERED, "param_gather fp8_param_gather fp8_param", "policy.precision"),
    **_each(_GATHERED, "policy.fp8_param policy.fp8_param_gather fp8_param_gather fp8_param"),
    **_each(_SERVED, "rollout.quantization"),
    **_each(_AGAIN, "gradient_checkpointing activation_checkpointing", "policy"),
    **_each(_AGE, "rollout.max_head_offpolicyness max_off_policy_steps"),
    **_each(_AGE, "orchestrator.max_off_policy_steps"),
    **_optimizer("policy.optimizer"),
    **_optimizer("critic.optimizer"),
    **_each(_HOST, "optimizer_cpu_offload optimizer_offload offload_optimizer", "policy"),
    **_each(_HOST, "optimizer_cpu_offload policy.megatron_config.optimizer_config_kwargs.optimizer_cpu_offload"),
    **_each(_OFFLOAD, "activation_offload offload_activations enable_activation_offload", "policy"),
    **_each(_OFFLOAD, "fine_grained_activation_offloading cpu_offloading cpu_offloading_num_layers", "policy"),
    **_each(_OFFLOAD, "residency.activations"),
    **_each(_CONTEXT, "cp ulysses sequence sequence_parallel", "policy.layout"),
    **_each(_CONTEXT, "cp ulysses context_parallel_size sequence_parallel_size", "policy"),
    **_layout("policy", "policy.layout"),
    **_layout("policy.layout", "policy.layout"),
    **_layout("critic.layout", "critic.layout"),
    **_layout("reference.layout", "reference.layout"),
    **_each(_DATA, "dp data data_parallel data_parallel_size", "policy", "policy.layout"),
    **_each("rollout.tensor is the tensor parallel size of an engine", "rollout.tp"),
    **_each(_NODES, "gpus num_gpus nnodes n_nodes", "cluster"),
    **_each(_TIMES, "deadline deadline_s time_limit time_limit_s timeout timeout_s", "environment", "rollout"),
    **_each(_TIMES, "env_timeout_s step_timeout_s trajectory_timeout_s", "environment"),
    **_each(_PARTS, "enabled offload", "residency"),
    "residency.offload_optimizer": "residency.keep without optimizer keeps its state in host memory while engines work",
}
