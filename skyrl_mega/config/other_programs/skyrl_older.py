"""The names that SkyRL's keys had in its ppo_base_config.yaml, before its settings were dataclasses."""

from __future__ import annotations

from skyrl_mega.config.other_programs.entry import FROM_CONFIG, UNUSED, Table, none, to
from skyrl_mega.config.other_programs.skyrl import ENGINES

NEW = (
    "num_engines tensor_parallel_size pipeline_parallel_size data_parallel_size expert_parallel_size enable_pd "
    "offload_kv_for_weight_sync num_prefill use_expandable_segments delta_weight_sync.* router_init_kwargs.* "
    "speculative_config enable_return_routed_experts language_model_only distributed_executor_backend"
)
"""Keys of `generator.inference_engine` that did not stand in `generator` before."""

KEYS: Table = {
    "generator.num_inference_engines": to("rollout.engines"),
    "generator.inference_engine_tensor_parallel_size": to("rollout.tensor"),
    "generator.inference_engine_pipeline_parallel_size": none("an engine is cut by rollout.tensor alone"),
    "generator.inference_engine_data_parallel_size": to("rollout.engines", note="as many more engines"),
    "generator.inference_engine_expert_parallel_size": to(
        "rollout.options.enable_expert_parallel=true", note="over the GPUs of an engine"
    ),
    "generator.model_name": to("model.path"),
    "generator.remote_inference_engine_urls": none("engines are the run's own; evaluate --endpoint asks one that runs"),
    "generator.http_endpoint_host": UNUSED,
    "generator.http_endpoint_port": UNUSED,
    "trainer.rope_scaling": FROM_CONFIG,
    "trainer.rope_theta": FROM_CONFIG,
    "generator.rope_scaling": FROM_CONFIG,
    "generator.rope_theta": FROM_CONFIG,
    **{
        key.replace(".inference_engine.", "."): entry
        for key, entry in ENGINES.items()
        if key.removeprefix("generator.inference_engine.") not in NEW.split()
    },
}
