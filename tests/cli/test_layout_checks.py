"""Engine settings that change the model: refused if the engine would compute another model than the policy."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli.layout_checks import CUT_SHARED, check_engine, check_layouts
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.schema import Config, RolloutConfig
from skyrl_mega.models.published import KNOWN, known
from skyrl_mega.models.registry import architecture


def check(model: str, overrides: dict[str, Any]) -> None:
    rollout = RolloutConfig(options={"hf_overrides": overrides}, max_length=1024)
    check_engine(Config(rollout=rollout), known(model))


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("DeepSeek-V3", "moe_router_dtype", "bfloat16"),
        ("DeepSeek-V3", "topk_method", "greedy"),
        ("DeepSeek-V3", "topk_group", 8),
        ("Moonlight-16B-A3B", "scoring_func", "softmax"),
        ("GLM-4.5-Air", "routed_scaling_factor", 2.5),
        ("GLM-4.5-Air", "num_experts_per_tok", 4),
        ("MiniMax-M2", "use_routing_bias", False),
        ("Qwen3-30B-A3B", "norm_topk_prob", False),
        ("Qwen3-30B-A3B", "num_hidden_layers", 2),
        ("Qwen3-30B-A3B", "sliding_window", 128),
        ("Qwen3-30B-A3B", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("Qwen3-30B-A3B", "is_causal", False),
    ],
)
def test_overrides_that_change_the_model_are_refused(model: str, key: str, value: Any) -> None:
    subject = rf"^rollout.options.hf_overrides.{key} = {re.escape(shown(value))}"
    line = f"{subject}: engines would compute another model than the policy"
    with pytest.raises(UserError, match=line):
        check(model, {"max_position_embeddings": 4096, key: value})


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("DeepSeek-V3", {"moe_router_dtype": "float32", "scoring_func": "sigmoid", "n_group": 8}),
        ("GLM-4.5-Air", {"max_position_embeddings": 2048, "architectures": ["Glm4MoeForCausalLM"]}),
        ("Kimi-K2-Instruct", {"model_type": "deepseek_v3"}),
    ],
)
def test_overrides_that_leave_the_model_as_it_is_pass(model: str, overrides: dict[str, Any]) -> None:
    check(model, overrides)


SHARED = {
    hf["model_type"]: name
    for name, hf in KNOWN.items()
    if getattr(architecture(hf).describe(hf).experts, "shared", None)
}
"""`model_type` → a published model, of those with shared experts."""


@pytest.mark.parametrize("model", SHARED.values(), ids=SHARED)
def test_shared_experts_are_whole_in_the_models_whose_vllm_class_says_so(model: str) -> None:
    """Compares with the sources of vLLM's classes."""
    hf = known(model)
    shared = architecture(hf).describe(hf).experts.shared  # type: ignore[union-attr]
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    name = architecture(hf).transformers_class
    [source] = [
        text
        for file in Path(spec.origin).with_name("model_executor").joinpath("models").glob("*.py")
        if f"\nclass {name}(" in (text := file.read_text())
    ]
    assert ("use_sequence_parallel_moe" in source) == (shared is not None and shared.engine_whole)


@pytest.mark.parametrize("option", ["disable_hybrid_kv_cache_manager", "disable_sliding_window"])
def test_caches_of_bounded_size_stay_bounded(option: str) -> None:
    """Refuses options with which layers with windows or states would take another size than planned."""
    config = Config(rollout=RolloutConfig(options={option: True}, max_length=1024))
    for model in ("gpt-oss-20b", "Qwen3.5-35B-A3B"):
        with pytest.raises(UserError, match=rf"^rollout.options.{option} = true: .* windows or states.*; leave it out"):
            check_engine(config, known(model))
    check_engine(config, known("Qwen3-30B-A3B"))
    config.rollout.options[option] = False
    check_engine(config, known("gpt-oss-20b"))


def test_replicas_with_whole_shared_experts_need_an_exchange_that_keeps_them_whole() -> None:
    """Compares with the list in vLLM's source: only these exchanges keep shared experts whole in every worker."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).with_name("config").joinpath("parallel.py").read_text()
    known_names = re.search(r"^All2AllBackend = Literal\[(.*?)^\]", source, re.DOTALL | re.MULTILINE)
    whole = re.search(r"def use_sequence_parallel_moe.*?in \((.*?)\)", source, re.DOTALL)
    assert known_names and whole
    replaced = {"naive", "pplx"}  # vLLM takes the default in their place
    cut = {*re.findall(r'"(\w+)"', known_names[1])} - {*re.findall(r'"(\w+)"', whole[1])} - replaced
    assert cut == {*CUT_SHARED}
    options = {"data_parallel_size": 2, "enable_expert_parallel": True, "all2all_backend": "moonep"}
    rollout = RolloutConfig(options=options, tensor=2, max_length=1024)
    with pytest.raises(
        UserError, match=r'^rollout.options.all2all_backend = "?moonep"?: .*shared experts.*leave it out'
    ):
        check_engine(Config(rollout=rollout), known("DeepSeek-V3"))
    check_engine(Config(rollout=rollout), known("Qwen3-30B-A3B"))
    rollout.options["all2all_backend"] = "deepep_low_latency"
    check_engine(Config(rollout=rollout), known("DeepSeek-V3"))


def test_models_that_read_a_sequence_from_its_first_token_share_no_prefixes() -> None:
    config = Config(rollout=RolloutConfig(max_length=1024))
    config.policy.share_prefixes = True
    for model, why in (("DeepSeek-V3", "multi-head latent attention"), ("Qwen3.5-35B-A3B", "gated delta nets")):
        with pytest.raises(UserError, match=rf"^policy.share_prefixes = true: .*{why}.*; give false$"):
            check_layouts(config, known(model))
    check_layouts(config, known("Qwen3-30B-A3B"))
