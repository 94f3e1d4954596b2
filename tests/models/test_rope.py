"""Tests of YaRN in grouped-query attention, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.megatron.model import transformer_config
from skyrl_mega.models.blocks.rope import Rope
from skyrl_mega.models.published import known
from tests.megatron.layouts import layout

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The published values of gpt-oss."""


@pytest.mark.parametrize(
    "changes",
    [{}, {"truncate": True}, {"factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0}, {"factor": 1.0}],
    ids=["published", "truncated", "other betas", "no scaling"],
)
def test_angles_and_their_factor_are_transformers(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the angles that megatron-core reads from its configuration, far beyond the original length."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor_from_config,
    )
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    from skyrl_mega.megatron.config_classes import config_class

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    hf = {"rope_parameters": YARN | changes}
    rope = Rope.read(hf, yarn=True)
    assert rope.yarn is not None and rope.megatron_args()["position_embedding_type"] == "yarn"
    kind, needed = config_class(rope.yarn.megatron_fields())
    config = kind(num_layers=1, hidden_size=64, num_attention_heads=1, **rope.yarn.megatron_fields(), **needed)
    assert not config.apply_rope_fusion, "megatron-core's fused rotation of packed rows leaves the factor out"
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    angles = YarnRotaryEmbedding(
        64,
        rotary_base=rope.megatron_args()["rotary_base"],
        use_cpu_initialization=True,
        scaling_factor=config.yarn_rotary_scaling_factor,
        correction_range_round_to_int=config.yarn_correction_range_round_to_int,
        **{name: getattr(config, f"yarn_{name}") for name in names},
    )
    positions = torch.arange(0, 20_000, 37)
    factor = _yarn_get_concentration_factor_from_config(config)
    embedding, other_factor = angles.get_emb(20_000)
    assert factor == other_factor
    expected = GptOssRotaryEmbedding(GptOssConfig(head_dim=64, **hf))(torch.zeros(1, 1, 8), positions[None])
    actual = embedding[positions, 0, 0, :32]
    for function, wanted in zip((torch.cos, torch.sin), expected, strict=True):
        torch.testing.assert_close(function(actual) * factor, wanted[0], atol=3e-3, rtol=0)


def test_two_descriptions_of_positions_must_be_equal() -> None:
    """Refuses differing ones: transformers takes `rope_scaling` then."""
    assert Rope.read({"rope_parameters": YARN, "rope_scaling": YARN}, yarn=True) == Rope.read(
        {"rope_parameters": YARN}, yarn=True
    )
    with pytest.raises(UserError, match="rope_scaling is"):
        Rope.read({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 4.0}}, yarn=True)


def test_an_option_that_would_lose_the_factor_is_refused() -> None:
    policy = PolicyConfig(options={"apply_rope_fusion": True})
    with pytest.raises(UserError, match=r"^policy\.options\.apply_rope_fusion = True: .*; give False$"):
        transformer_config(known("gpt-oss-20b"), policy, layout(1), torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_type": "default"}, "rope_type yarn"),
        ({"attention_factor": 1.2}, "attention_factor is 1.2"),
        ({"mscale": 1.0}, "mscale is 1.0"),
        ({"beta_fast": None}, "beta_fast is null"),
        ({"truncate": None}, "truncate is null"),
        ({"factor": -1}, "factor is -1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor of 1"),
    ],
)
def test_values_that_an_engine_would_read_differently_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Rope.read({"rope_parameters": YARN | changes}, yarn=True)
