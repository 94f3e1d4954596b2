"""What a vLLM engine is made of: its process's environment, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.config.derived import eager, fp8_weights
from skyrl_mega.config.deterministic import ENGINE_ENVIRONMENT
from skyrl_mega.config.limits import ENGINE_STEP_TOKENS
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.engines.base import Facts

ROUTER = r"re:.*\.mlp\.gate$"
"""Stays as it is in an engine that quantises what it loads, as in FP8 checkpoints: rounded, it picks other experts."""
RESTARTED_FRACTION = 0.01
"""`gpu_memory_utilization` where the cache's size is given. vLLM then uses it for nothing but a check that this share
of the GPU is free at start, which it need not be: the policy that shares the GPU has taken some of it since the first
start."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of."""

    path: str
    """Hugging Face directory: config.json, and tokenizer files where stop strings are used."""
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    rollout: RolloutConfig
    max_length: int
    """Longest sequence, prompt and response."""
    weights: str = "dummy"
    """`dummy` (the first sync brings them) or `auto` (read from the directory)."""
    seed: int = 0
    routes: bool = False
    """Whether completions bring the experts that the model's tokens were routed to (`engines.vllm.routes`)."""
    updated_under_way: bool = False
    """Whether weights change while requests are under way (`asynchrony.mode: full`)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More vLLM engine arguments; `rollout.options` goes before them."""
    sleeps: tuple[str, ...] = ()
    """Parts of it (`config.residency.ENGINE`) that its device does not hold in every phase."""
    deterministic: bool = False
    """On a GPU: kernels whose results do not depend on the batch."""


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables of the engine's process, set before it starts."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": "127.0.0.1",  # its own processes are all on this node
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "skyrl_mega",
    }
    if spec.routes and spec.device == "cuda":
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the runner that can give them
    if spec.device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(spec.rollout.threads),
            # Policy and engine share the cores and take turns: pinned threads would queue for one of them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if spec.rollout.tensor == 1:
            # Else vLLM puts its one worker into a third process: 7 s more to start.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if eager(spec.rollout, spec.device):
            # vLLM compiles a helper of its sampler even in eager mode: 18 s at the first request.
            env["TORCHDYNAMO_DISABLE"] = "1"
    elif spec.deterministic:
        env |= ENGINE_ENVIRONMENT
    return env


def scales(spec: EngineSpec, hopper: bool) -> dict[str, str]:
    """Environment variables by which a block's FP8 scale stays the float32 number that policy and wire have.

    DeepGEMM in vLLM rounds scales to powers of two, and the weights with them, where it is not told otherwise. Only
    Blackwell needs that.
    """
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if hopper and fp8_weights(spec.rollout) else {}


def arguments(spec: EngineSpec, former: Facts | None = None) -> dict[str, Any]:
    """vLLM's engine arguments.

    Without `former` vLLM measures, on a GPU, what `rollout.memory_fraction` leaves for the cache; nobody may take
    or give back memory of the GPU meanwhile. One that is started again takes what the first found.
    """
    from vllm.config import WeightTransferConfig

    from skyrl_mega.engines.vllm.plugin import BACKEND, TOKENIZER

    rollout = spec.rollout
    arguments: dict[str, Any] = {
        "model": spec.path,
        "dtype": spec.dtype,
        "load_format": spec.weights,
        "seed": spec.seed,
        "tensor_parallel_size": rollout.tensor,
        "max_model_len": spec.max_length,
        "max_num_seqs": rollout.concurrency,
        # A whole wave of prompts may be prefilled in one step, but never less than the longest sequence.
        "max_num_batched_tokens": max(spec.max_length, ENGINE_STEP_TOKENS),
        "enforce_eager": eager(rollout, spec.device),
        "skip_tokenizer_init": not rollout.sampling.stop,
        "generation_config": "vllm",  # nothing of the directory's sampling defaults
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": "skyrl_mega.engines.vllm.transfer.WorkerExtension",
    }
    if rollout.sampling.stop:
        arguments["tokenizer_mode"] = TOKENIZER
    if spec.device == "cpu":
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)
        arguments["distributed_executor_backend"] = "uni" if rollout.tensor == 1 else "mp"
        # On CUDA vLLM schedules asynchronously, and packs tokens on a core of its own.
        arguments["scheduler_cls"] = "skyrl_mega.engines.vllm.scheduler.HoldingScheduler"
        # The draw after half a prompt is taken back; vLLM cannot do that to a seeded CPU generator, and dies.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["distributed_executor_backend"] = "mp"
        if spec.routes:
            arguments["enable_return_routed_experts"] = True
        if spec.sleeps:
            arguments["enable_sleep_mode"] = True  # weights and cache lie in memory that can be given back by tags
        if former is None:
            arguments["gpu_memory_utilization"] = rollout.memory_fraction
        else:
            arguments["gpu_memory_utilization"] = RESTARTED_FRACTION
            arguments["kv_cache_memory_bytes"] = former.cache_bytes
    if str(rollout.options.get("quantization", "")).startswith("fp8_"):
        arguments["quantization_config"] = {"ignore": [ROUTER]}
    return arguments | spec.extra | rollout.options
