"""Tests of latent attention: cuts against torch operations on whole tensors, rotary positions and operations against
transformers, and configurations that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from skyrl_mega.common.errors import UserError
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.blocks.mla import LatentAttention
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.engine_weights import kv_bytes_per_token
from tests.weights.grids import cut, global_tensors

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rope_theta": 50_000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 163_840,
}
MOONLIGHT = DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_scaling": None}
FLASH = {key: value for key, value in DEEPSEEK.items() if key not in ("scoring_func", "topk_method", "rope_scaling")}
FLASH |= {"model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1}
V2_LITE = DEEPSEEK | {"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy"}
V2_LITE |= {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}


def attention(hf: dict[str, Any]) -> LatentAttention:
    block = architecture(hf).describe(hf).layer(0)[0]
    assert isinstance(block, LatentAttention)
    return block


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("hf", [DEEPSEEK, MOONLIGHT], ids=["deepseek_v3", "moonlight"])
def test_projections_up_are_cut_by_heads_and_those_down_are_whole(hf: dict[str, Any], spec: Any) -> None:
    policy = architecture(hf).megatron_layout(hf, ParallelDims(2, tensor=2, expert=2), spec)
    engines = architecture(hf).engine_layout(hf, 2)
    whole = global_tensors(policy.tensors)
    q = {name: whole[f"model.layers.1.self_attn.{name}.weight"] for name in names(hf)}
    fused = {"q_layernorm": "linear_q_up_proj.layer_norm_weight", "kv_layernorm": "linear_kv_up_proj.layer_norm_weight"}
    for rank in range(2):
        megatron, engine = cut(policy.shards[rank], whole), cut(engines.shards[rank], whole)
        for name, local in names(hf).items():
            tensor = q[name]
            if name.endswith(("b_proj", "q_proj")):
                tensor = tensor.view(4, -1, tensor.shape[1])[2 * rank : 2 * rank + 2].flatten(0, 1)
            elif name == "o_proj":
                tensor = tensor.view(48, 4, 10)[:, 2 * rank : 2 * rank + 2].flatten(1)
            place = fused.get(local) if spec == "te" else None
            assert torch.equal(megatron[f"0.decoder.layers.1.self_attention.{place or f'{local}.weight'}"], tensor), (
                name
            )
            if hf["q_lora_rank"] is None or name not in ("q_a_proj", "kv_a_proj_with_mqa"):
                assert torch.equal(engine[f"model.layers.1.self_attn.{name}.weight"], tensor), name
        if hf["q_lora_rank"] is not None:
            down = engine["model.layers.1.self_attn.fused_qkv_a_proj.weight"]
            assert torch.equal(down, torch.cat([q["q_a_proj"], q["kv_a_proj_with_mqa"]]))


def names(hf: dict[str, Any]) -> dict[str, str]:
    """Returns the name on disk → megatron-core's name of every tensor of the attention."""
    queries = {"q_proj": "linear_q_proj"}
    if hf["q_lora_rank"] is not None:
        queries = {"q_a_proj": "linear_q_down_proj", "q_a_layernorm": "q_layernorm", "q_b_proj": "linear_q_up_proj"}
    return queries | {
        "kv_a_proj_with_mqa": "linear_kv_down_proj",
        "kv_a_layernorm": "kv_layernorm",
        "kv_b_proj": "linear_kv_up_proj",
        "o_proj": "linear_proj",
    }


@pytest.mark.parametrize("hf", [DEEPSEEK, FLASH], ids=["yarn", "default"])
def test_rotary_angles_and_scales_are_transformers(hf: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares megatron-core's angles, their factor, and the factor of the scores."""
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding, _yarn_get_mscale
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, yarn_apply_mscale

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    args = dict(architecture(hf).megatron_settings(hf).transformer)
    config = AutoConfig.for_model(**hf)
    positions = torch.arange(0, 9000, 37)
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1, 1, 8), positions[None])
    if args["rope_type"] == "rope":
        angles = RotaryEmbedding(8, 1.0, rotary_base=args["rotary_base"], use_cpu_initialization=True, cp_group=1)
        freqs, factor = angles.get_freqs_non_repeated(9000)[positions], 1.0
        scale = 1.0
    else:
        chosen = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        yarn = YarnRotaryEmbedding(
            8,
            rotary_base=args["rotary_base"],
            scaling_factor=args["rotary_scaling_factor"],
            use_cpu_initialization=True,
            **{name: args[name] for name in chosen},
        )
        emb, factor = yarn.get_emb(9000)
        freqs = emb[positions, 0, 0, :4]
        scale = _yarn_get_mscale(args["rotary_scaling_factor"], args["mscale_all_dim"]) ** 2
    torch.testing.assert_close(freqs.cos() * factor, cos[0, :, :4], atol=2e-4, rtol=0)
    torch.testing.assert_close(freqs.sin() * factor, sin[0, :, :4], atol=2e-4, rtol=0)
    assert scale == pytest.approx(yarn_apply_mscale(config.rope_parameters, 1.0))
    assert (factor != 1.0) == (scale != 1.0) == ("rope_scaling" in hf)


@pytest.mark.parametrize("hf", [DEEPSEEK, MOONLIGHT], ids=["deepseek_v3", "moonlight"])
def test_operations_are_those_that_torch_counts(hf: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = AutoConfig.for_model(**hf)
    config._attn_implementation = "eager"
    module, tokens = DeepseekV3Attention(config, 0), 7
    hidden = torch.randn(1, tokens, 48)
    angles = DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(tokens)[None])
    with FlopCounterMode(display=False) as counter:
        module(hidden, angles, None)
    work = attention(hf).flops()  # without a mask every token attends to all tokens
    assert counter.get_total_flops() == tokens * (work.matrices + tokens * work.attention)
    # Scores of queries with latent vectors and shared keys, then sums of latent vectors, for every head.
    assert work.decoding == 4 * (2 * (40 + 8) + 2 * 40)


def test_every_worker_caches_the_whole_latent_vector() -> None:
    decoder = architecture(DEEPSEEK).describe(DEEPSEEK)
    assert {kv_bytes_per_token(decoder, tensor, 2) for tensor in (1, 2, 4)} == {3 * 2 * (40 + 8)}


def test_engines_on_a_cpu_need_the_kernels_widths_and_torchs_rotation() -> None:
    with pytest.raises(
        UserError, match=r"model.path = m: kv_lora_rank = 40: .* allowed is 512, or cluster.device=cuda"
    ):
        attention(DEEPSEEK).check_cpu_engine("model.path = m: ", "float32")
    attention(DEEPSEEK | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}).check_cpu_engine("", "float32")
    assert attention(DEEPSEEK).engine_arguments("cpu")["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    assert attention(DEEPSEEK).engine_arguments("cuda") == {}
    for hf in (DEEPSEEK, V2_LITE):
        experts = architecture(hf).describe(hf).layer(1)[1]
        assert experts.engine_arguments("cuda") == {"hf_overrides": {"moe_router_dtype": "float32"}}


def test_kimi_k2_is_deepseek_v3_and_flash_differs_in_router_shared_experts_and_rope() -> None:
    kimi = DEEPSEEK | {"model_type": "kimi_k2"}
    assert architecture(kimi).describe(kimi) == architecture(DEEPSEEK).describe(DEEPSEEK)
    moonlight = MOONLIGHT | {"q_lora_rank": 24}
    flash = FLASH | {"rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5}
    of_flash, of_moonlight = (architecture(hf).describe(hf) for hf in (flash, moonlight))
    assert of_moonlight.experts and of_moonlight.experts.shared and of_flash.layer(0) == of_moonlight.layer(0)
    shared = replace(of_moonlight.experts.shared, engine_whole=False)  # vLLM's class of Flash always cuts them
    assert of_flash.experts == replace(of_moonlight.experts, engine_float32_router=True, shared=shared)


@pytest.mark.parametrize(
    ("hf", "changes", "words"),
    [
        (DEEPSEEK, {"scoring_func": None}, "scoring_func is null; skyrl_mega supports 'sigmoid'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method is greedy"),
        (DEEPSEEK, {"num_experts_per_tok": 3}, "topk_group is 2; skyrl_mega supports half of num_experts_per_tok 3"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob is false"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias is true"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads is 2; skyrl_mega supports 4"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave is false"),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk is 2048"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (DEEPSEEK, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type default or yarn"),
        (DEEPSEEK, {"rope_scaling": YARN | {"mscale_all_dim": 0}}, "mscale_all_dim is 0"),
        (DEEPSEEK, {"rope_scaling": {k: v for k, v in YARN.items() if k != "mscale"}}, "a YaRN with mscale"),
        (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor is 1.0"),
        (FLASH, {"first_k_dense_replace": None}, "first_k_dense_replace is null"),
        (FLASH, {"mlp_layer_types": ["dense", "dense", "sparse"]}, "mlp_layer_types is"),
        (V2_LITE, {"topk_method": "group_limited_greedy"}, "DeepSeek-V2 ranks a group by its best expert"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is noaux_tc; skyrl_mega supports 'greedy'"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is sigmoid"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true"),
        (V2_LITE, {"routed_scaling_factor": 16.0}, "routed_scaling_factor is 16.0"),
        (V2_LITE, {"n_group": None}, "n_group is null; skyrl_mega supports 1"),
    ],
)
def test_what_a_library_computes_otherwise_is_refused(hf: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    changed = hf | changes
    with pytest.raises(UserError) as error:
        architecture(changed).describe(changed)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("hf", [DEEPSEEK, FLASH, V2_LITE], ids=["deepseek_v3", "glm4_moe_lite", "deepseek_v2"])
def test_absent_keys_are_transformers_defaults(hf: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[hf["model_type"]]()
    ours = "rms_norm_eps tie_word_embeddings max_position_embeddings q_lora_rank n_shared_experts norm_topk_prob "
    own = "topk_method first_k_dense_replace" if hf is V2_LITE else "rope_interleave"
    for key in f"{ours} routed_scaling_factor attention_bias {own}".split():
        absent = {name: value for name, value in hf.items() if name != key}
        given = absent | {key: getattr(defaults, key)}
        assert architecture(absent).describe(absent) == architecture(given).describe(given), key
    if hf is V2_LITE:
        return  # must be given, as defaults of transformers and vLLM differ
    groups = ("n_group", "topk_group", "num_experts_per_tok")
    routed = hf | {name: getattr(defaults, name) for name in groups} | {"n_routed_experts": 64}
    absent = {name: value for name, value in routed.items() if name not in groups[:2]}
    assert architecture(absent).describe(absent) == architecture(routed).describe(routed)


def test_sizes_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(UserError, match=r"policy\.layout\.tensor: 3 does not divide the model's 4 attention heads"):
        architecture(DEEPSEEK).check_layout(DEEPSEEK, ParallelDims(3, tensor=3, expert_tensor=3))
    with pytest.raises(UserError, match=r"rollout\.tensor: 8 does not divide the model's 4 attention heads"):
        architecture(DEEPSEEK).check_engine(DEEPSEEK, 8)
    assert attention(DEEPSEEK).engine_row(EngineCut(2), 1) == {"heads": "2-3"}
    with pytest.raises(UserError, match="FP8 has not been tested with multi-head latent attention"):
        attention(DEEPSEEK).check_fp8("weights.wire")
