"""vLLM's text model of Qwen3.5, for checkpoints with or without a vision tower, on machines without torchvision.

vLLM 0.32 has the text model in the same file as the model with a vision tower, which imports image processors.
"""

from __future__ import annotations

import vllm.model_executor.models  # noqa: F401 - looks for torchvision, and must not find the placeholder
from vllm.model_executor.models.utils import WeightsMapper

from skyrl_mega.engines.vllm.torchvision_placeholder import placeholder

with placeholder():
    from vllm.model_executor.models import qwen3_5


class Qwen3_5MoeForCausalLM(qwen3_5.Qwen3_5MoeForCausalLM):
    """vLLM's text model under its own name, which also leaves a checkpoint's vision tower unread."""

    hf_to_vllm_mapper = qwen3_5.Qwen3_5MoeForCausalLM.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_prefix={"model.visual.": None}
    )
