"""The plugin called in each vLLM process, through the entry point `vllm.general_plugins`."""

from __future__ import annotations

from skyrl_mega.engines.vllm.cpu_drafts import repair_expansion
from skyrl_mega.engines.vllm.cpu_experts import allow_expert_parallelism, allow_replicas
from skyrl_mega.engines.vllm.cpu_router import allow_sigmoid_without_groups
from skyrl_mega.parallel.shared_gloo import share_gloo_threads

BACKEND = "skyrl_mega"
"""Name of our weight-transfer backend in vLLM's `WeightTransferConfig`."""
TOKENIZER = "skyrl_mega"
"""Name of our tokenizers in vLLM's `tokenizer_mode`."""
QWEN3_5 = "Qwen3_5MoeForCausalLM"
"""Architecture of Qwen3.5's text model."""
MAY_HOLD = "skyrl_mega_may_hold"
"""Key in the `extra_args` of a request's sampling parameters: the request's tokens may be sent in groups
(`scheduler`).
"""


def register() -> None:
    """Registers our weight-transfer engine, tokenizers and text model of Qwen3.5 with vLLM.

    On a CPU repairs the router (`cpu_router`), experts on several workers (`cpu_experts`) and the check of draft tokens
    (`cpu_drafts`), and lets gloo groups of a single member share a thread. May be called again in the same process.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers import TokenizerRegistry

    if current_platform.is_cpu():
        allow_sigmoid_without_groups()
        allow_expert_parallelism()
        allow_replicas()
        repair_expansion()
        share_gloo_threads()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "skyrl_mega.engines.vllm.transfer", "ShardTransferEngine")
    ModelRegistry.register_model(QWEN3_5, f"skyrl_mega.engines.vllm.qwen3_5:{QWEN3_5}")
    RENDERER_REGISTRY.renderers[TOKENIZER] = ("vllm.renderers.hf", "HfRenderer")
    TokenizerRegistry.tokenizers[TOKENIZER] = ("skyrl_mega.engines.vllm.tokenizer", "VerifiedTokenizer")
