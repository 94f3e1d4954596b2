"""Tests of megatron-core's settings against transformers' computation: rotary frequencies and the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from skyrl_mega.models.registry import architecture
from tests.weights.grids import MODELS

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    ids=["default", "llama3, transformers 4", "llama3, transformers 5", "linear", "default, transformers 5"],
)
def test_rotary_angles_are_transformers(changes: dict[str, Any]) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    hf = {k: v for k, v in {**MODELS["llama"], "head_dim": 64, **changes}.items() if v is not None}
    gpt = dict(architecture(hf).megatron_settings(hf).gpt)
    for other in ("vocab_size", "max_sequence_length", "share_embeddings_and_output_weights"):
        gpt.pop(other)
    assert gpt.pop("position_embedding_type") == "rope"
    ours = RotaryEmbedding(kv_channels=64, rotary_percent=1.0, use_cpu_initialization=True, cp_group=1, **gpt)
    positions = torch.arange(0, 9000, 37)
    angles = ours.get_freqs_non_repeated(9000)[positions]
    config = AutoConfig.for_model(**hf)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 64), positions[None])
    torch.testing.assert_close(angles.cos(), cos[0, :, :32], rtol=0, atol=2e-3)
    torch.testing.assert_close(angles.sin(), sin[0, :, :32], rtol=0, atol=2e-3)


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_weights_are_transformers(renormalize: bool) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    hf = {**MODELS["qwen3_moe"], "norm_topk_prob": renormalize}
    settings = architecture(hf).megatron_settings(hf).transformer
    router = Qwen3MoeTopKRouter(AutoConfig.for_model(**hf))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        hidden = torch.randn(50, hf["hidden_size"], generator=generator)
        _, weights, chosen = router(hidden)
        probs, taken = topk_routing_with_score_function(
            hidden @ router.weight.T,
            settings["moe_router_topk"],
            use_pre_softmax=settings["moe_router_pre_softmax"],
        )
    wanted = torch.zeros_like(probs).scatter(1, chosen, weights)
    torch.testing.assert_close(probs, wanted)
    assert torch.equal(taken, wanted > 0)
