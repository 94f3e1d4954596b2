"""The definition of a vLLM engine: environment of the process, and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from skyrl_mega.common.limits import ENGINE_STEP_TOKENS
from skyrl_mega.config.derived import ENGINE_ENVIRONMENT, eager, fp8_weights, replica_concurrency
from skyrl_mega.config.drafts import WEIGHTLESS, draft_method, speculative_config
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.engines.base import Facts
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.registry import architecture

ADAPTIVE = "skyrl_mega_adaptive_drafts"
"""Key in vLLM's `additional_config`: True to draft tokens only where drafts save time (`engines.vllm.drafts`)."""
ROUTER = r"re:.*\.mlp\.gate$"
"""Layers left unquantised by quantisation on loading, as in FP8 checkpoints: a rounded router picks other experts."""
RESTARTED_FRACTION = 0.01
"""`gpu_memory_utilization` for a given cache size. vLLM then only checks that this share of the GPU is free at start.
It is small because a policy on the same GPU may since have taken memory that was free at the first start.
"""


@dataclass(frozen=True)
class EngineSpec:
    """Everything that decides the environment and the arguments of a vLLM engine."""

    path: str
    """Hugging Face directory: config.json, and tokenizer files if stop strings are used."""
    dtype: str
    """Type of the model's parameters, such as `bfloat16`."""
    device: str
    """`cpu` or `cuda`."""
    rollout: RolloutConfig
    """The settings of the engines."""
    max_length: int
    """Maximum length of a sequence, prompt and response."""
    weights: str = "dummy"
    """`dummy` (delivered by the first sync) or `auto` (read from the directory)."""
    dequantised: bool = False
    """True if the directory is in block FP8 or MXFP4, and the engine computes with the dequantised weights."""
    seed: int = 0
    """vLLM's global seed, in addition to the seed of every request."""
    routes: bool = False
    """True if completions contain the experts of every token (`engines.vllm.routes`)."""
    updated_under_way: bool = False
    """True if weights change while requests are under way (`asynchrony.mode: full`)."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More vLLM engine arguments; `rollout.options` takes precedence."""
    transport: str = "group"
    """Way of new weights to the engine (`weights.transport`)."""
    sleeps: tuple[str, ...] = ()
    """Parts (`config.residency.ENGINE`) absent from the device in some phases."""
    deterministic: bool = False
    """On a GPU: kernels with results independent of the batch."""


def adapts(spec: EngineSpec) -> bool:
    """Returns True if an engine drafts tokens only where drafts save time: `rollout.drafts.adaptive` is set, the drafts
    need no weights of their own, and the engine need not be deterministic."""
    weightless = draft_method(spec.rollout) in WEIGHTLESS
    return weightless and spec.rollout.drafts.adaptive and not spec.deterministic


def environment(spec: EngineSpec) -> dict[str, str]:
    """Returns the environment variables to set in the engine's process before its start. Sets nothing itself.

    Always `VLLM_NO_USAGE_STATS`, `DO_NOT_TRACK`, `HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`, `TOKENIZERS_PARALLELISM`,
    `VLLM_HOST_IP`, `VLLM_LOGGING_LEVEL` and `VLLM_PLUGINS`. On CUDA `VLLM_USE_V2_MODEL_RUNNER` with routes, and those
    of `ENGINE_ENVIRONMENT` if deterministic. On a CPU `OMP_NUM_THREADS` and `VLLM_CPU_OMP_THREADS_BIND`; with drafts by
    ngram `NUMBA_NUM_THREADS` and `NUMBA_THREADING_LAYER`; with `rollout.tensor` 1 `VLLM_ENABLE_V1_MULTIPROCESSING`; in
    eager mode `TORCHDYNAMO_DISABLE`."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": "127.0.0.1",  # all of its processes are on this node
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "skyrl_mega",
    }
    if spec.routes and spec.device == "cuda":
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the runner that returns routes
    if spec.device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(spec.rollout.threads),
            # Policy and engine take turns on the same cores: pinned threads would queue for one of them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if draft_method(spec.rollout) == "ngram":
            # vLLM searches the text with numba, which would otherwise raise the number of torch's threads as well:
            # each step then waits for the cores of other processes.
            env |= {"NUMBA_NUM_THREADS": "1", "NUMBA_THREADING_LAYER": "workqueue"}
        if spec.rollout.tensor == 1:
            # Otherwise vLLM puts the only worker of a replica into a further process: 7 s more to start.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if eager(spec.rollout, spec.device):
            # vLLM compiles a helper of its sampler even in eager mode: 18 s at the first request.
            env["TORCHDYNAMO_DISABLE"] = "1"
    elif spec.deterministic:
        env |= ENGINE_ENVIRONMENT
    return env


def scales(spec: EngineSpec, hopper: bool) -> dict[str, str]:
    """Returns the environment variables with which vLLM keeps a block's FP8 scale equal to the float32 number of policy
    and wire; {} unless the engine computes in FP8 on a Hopper GPU.

    By default DeepGEMM in vLLM rounds scales to powers of two, and the weights accordingly. Only Blackwell needs that.

    Args:
        spec: The engine's definition.
        hopper: True if the engine's GPU is a Hopper.
    """
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if hopper and fp8_weights(spec.rollout) else {}


def arguments(spec: EngineSpec, former: Facts | None = None) -> dict[str, Any]:
    """Returns vLLM's engine arguments: ours, changed by what the model's blocks need, and `rollout.options`, which win.
    Without `former` vLLM measures, on a GPU, the memory left for the cache by `rollout.memory_fraction`; meanwhile no
    process may allocate or free memory of the GPU. Raises UserError if config.json is missing or cannot be used.

    Args:
        spec: The engine's definition.
        former: Facts of the previous engine here, to use its cache size again; None for the first, and on a CPU.
    """
    from vllm.config import WeightTransferConfig

    from skyrl_mega.engines.vllm.plugin import BACKEND, TOKENIZER

    rollout = spec.rollout
    arguments: dict[str, Any] = {
        "model": spec.path,
        "dtype": spec.dtype,
        # vLLM would read a directory in FP8 as FP8; the workers read it after the start (`transfer.load_files`).
        "load_format": "dummy" if spec.dequantised else spec.weights,
        "seed": spec.seed,
        "tensor_parallel_size": rollout.tensor,
        "max_model_len": spec.max_length,
        "max_num_seqs": replica_concurrency(rollout),  # vLLM counts each replica
        # A step may prefill a whole wave of prompts, and always fits the longest sequence.
        "max_num_batched_tokens": max(spec.max_length, ENGINE_STEP_TOKENS),
        "enforce_eager": eager(rollout, spec.device),
        "skip_tokenizer_init": not rollout.sampling.stop,
        "generation_config": "vllm",  # without the directory's sampling defaults
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
        # vLLM discards the sample after half a prompt, but cannot rewind a seeded CPU generator, and dies.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["distributed_executor_backend"] = "mp"
        if spec.routes:
            arguments["enable_return_routed_experts"] = True
        if spec.sleeps:
            arguments["enable_sleep_mode"] = True  # puts weights and cache into memory that can be freed by tags
        if former is None:
            arguments["gpu_memory_utilization"] = rollout.memory_fraction
        else:
            arguments["gpu_memory_utilization"] = RESTARTED_FRACTION
            arguments["kv_cache_memory_bytes"] = former.cache_bytes
    if str(rollout.options.get("quantization", "")).startswith("fp8_"):
        arguments["quantization_config"] = {"ignore": [ROUTER]}
    if spec.dequantised:
        arguments["hf_overrides"] = {"quantization_config": None}
    return reduce(_merged, (arguments, _block_arguments(spec), _draft_arguments(spec), spec.extra, rollout.options))


def _draft_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Returns the arguments for draft tokens; {} without drafts."""
    drafts = speculative_config(spec.rollout)
    if not drafts:
        return {}
    arguments = {"speculative_config": drafts, "per_request_spec_decode_metrics": "summary"}
    if adapts(spec):
        arguments["additional_config"] = {ADAPTIVE: True}
    if spec.device != "cpu":  # on a CPU `HoldingScheduler` does the same
        arguments["scheduler_cls"] = "skyrl_mega.engines.vllm.drafts.draft_scheduler"
    return arguments


def _block_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Returns the arguments that the model's blocks need on this device, and the text model's class for a checkpoint
    of a larger model."""
    hf = read_config(Path(spec.path))
    kind, needed = architecture(hf), dict[str, Any]()
    if hf.get("architectures") and kind.transformers_class not in hf["architectures"]:
        needed["hf_overrides"] = {"architectures": [kind.transformers_class]}
    for block in kind.describe(hf).parts:
        needed = _merged(needed, block.engine_arguments(spec.device))
    return needed


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both; of two mappings under a name, such as `hf_overrides`, the entries of both. The
    second takes precedence."""
    both = {
        name: {**first[name], **value}
        for name, value in second.items()
        if isinstance(value, Mapping) and isinstance(first.get(name), Mapping)
    }
    return {**first, **second, **both}
