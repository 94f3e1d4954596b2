"""Configuration that vLLM derives from an engine's arguments on a node of H100s. A program, because the simulation
changes vLLM's platform for the whole process.

    python -m tests.cuda.engine_config inspect
    python -m tests.cuda.engine_config '[[RECIPE, [SETTING, …], BYTES], …]'

The second command prints the result of `resolve` for each entry as JSON. vLLM's own configuration classes compute the
result: the CPU build has the same Python files as the CUDA build. Replaced are the platform's answers about the device
(`H100`), compiled operators (an empty module), and Triton's check for a driver.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

MODELS = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Architectures of the GPU recipes."""
TOTAL = int(79.1 * 2**30)
"""Memory of an H100 as reported by CUDA."""


def pretend() -> None:
    """Makes vLLM treat this machine as a node with eight H100s. Must run before the import of vLLM."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in a Ray actor before its devices are set: no driver is searched
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda part: False  # this build's version contains "cpu"
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):
        """Platform with eight H100s."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return TOTAL

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

    platforms._current_platform = H100()


def inspect() -> None:
    """Makes vLLM inspect the models' classes and cache the results in `VLLM_CACHE_ROOT`. vLLM imports the classes,
    normally in a process per model; after `pretend` the classes cannot be imported."""
    from vllm.model_executor.models import registry

    from skyrl_mega.engines.vllm.plugin import register

    register()
    registry._run_in_subprocess = lambda look: look()
    for name in MODELS:
        registry.ModelRegistry.models[name].inspect_model_cls()


def resolve(recipe: Path, settings: list[str], former: int | None = None) -> dict[str, Any]:
    """Returns the configuration of a recipe's vLLM engine.

    Args:
        recipe: A file of `configs/`.
        settings: Changes of the recipe.
        former: Cache bytes of an earlier engine in this place; None for a first start.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from skyrl_mega.config.compose import compose
    from skyrl_mega.config.derived import length_limit
    from skyrl_mega.engines.base import Facts
    from skyrl_mega.engines.vllm.plugin import register
    from skyrl_mega.engines.vllm.spec import EngineSpec, arguments
    from skyrl_mega.models.published import known
    from skyrl_mega.trainer.start_actors import length_arguments

    register()
    config = compose(recipe, settings)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(known(config.model.path)))
        spec = EngineSpec(
            path=folder,
            dtype=config.model.dtype,
            device="cuda",
            rollout=config.rollout,
            max_length=length_limit(config.rollout),
            seed=config.run.seed,
            extra=length_arguments(config),
        )
        engine_arguments = arguments(spec, None if former is None else Facts(cache_tokens=0, cache_bytes=former))
        # The tokenizer is missing here; no tested field depends on the tokenizer.
        vllm_arguments = AsyncEngineArgs(**engine_arguments | {"skip_tokenizer_init": True})
        resolved = tested_fields(vllm_arguments.create_engine_config(UsageContext.ENGINE_CONTEXT))
    plain = {key: value for key, value in engine_arguments.items() if isinstance(value, (int, float, str, bool))}
    return {"arguments": plain, "limit": length_limit(config.rollout)} | resolved


def tested_fields(v: Any) -> dict[str, Any]:
    """Returns the tested fields of vLLM's configuration as plain values."""
    compilation, scheduler = v.compilation_config, v.scheduler_config
    return {
        "v2": v.use_v2_model_runner,
        "eager": v.model_config.enforce_eager,
        "compilation": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "largest_graph": compilation.max_cudagraph_capture_size,
        "async": scheduler.async_scheduling,
        "chunked": scheduler.enable_chunked_prefill,
        "batched_tokens": scheduler.max_num_batched_tokens,
        "sequences": scheduler.max_num_seqs,
        "prefixes": v.cache_config.enable_prefix_caching,
        "fraction": v.cache_config.gpu_memory_utilization,
        "cache_bytes": v.cache_config.kv_cache_memory_bytes,
        "logprobs": v.model_config.logprobs_mode,
        "seed": v.model_config.seed,
        "generation_config": v.model_config.generation_config,
        "length": v.model_config.max_model_len,
        "transfer": v.weight_transfer_config.backend,
        "extension": v.parallel_config.worker_extension_cls,
        "worker": v.parallel_config.worker_cls,
        "executor": v.parallel_config.distributed_executor_backend,
        "tensor": v.parallel_config.tensor_parallel_size,
        "expert_parallel": v.parallel_config.enable_expert_parallel,
        "device": str(v.device_config.device_type),
    }


if __name__ == "__main__":
    if sys.argv[1] == "inspect":
        inspect()
        sys.exit()
    pretend()
    asked = json.loads(sys.argv[1])
    json.dump([resolve(Path(recipe), settings, former) for recipe, settings, former in asked], sys.stdout)
