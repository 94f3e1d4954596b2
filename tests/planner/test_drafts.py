"""Draft tokens in plans: seconds per token, and the memory of a draft model."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from skyrl_mega.cli.draft_checks import check_draft_weights, check_suffix
from skyrl_mega.cli.dry_run_notes import _on_drafts
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.drafts import EAGLE3_TARGETS
from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.config.schema.drafts import HEADS, DraftsConfig
from skyrl_mega.hf_checkpoint.draft_head import TAKEN
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import ARCHITECTURES, architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.times import decoding
from tests.support.draft_heads import KV_HEADS, WIDTH, add_prediction_layer, build_head

LARGE = BuildConfig(architecture="qwen3", hidden=4096, layers=40, heads=32, kv_heads=8, head_dim=128, ffn=12288)


def described(sizes: BuildConfig) -> Decoder:
    hf = hf_config(sizes)
    return architecture(hf).describe(hf)


def config_of(**drafts: object) -> Config:
    config = Config()
    config.rollout.drafts = DraftsConfig(**drafts)  # type: ignore[arg-type]
    return config


def test_accepted_drafts_save_steps_while_reading_weights_takes_the_time() -> None:
    """Computes one sequence of a dense model: a step with drafts reads the same weights once."""
    model = described(LARGE)
    plain = decoding(config_of(), model, 1000)(1)
    for acceptance in (0, 0.25, 1):
        drafted = decoding(config_of(method="ngram", adaptive=False, acceptance=acceptance), model, 1000)(1)
        assert drafted == pytest.approx(plain / (1 + 4 * acceptance), rel=0.01)


def test_drafts_cost_time_in_large_batches_unless_left_out() -> None:
    model = described(LARGE)
    plain = decoding(config_of(), model, 1000)(4096)
    always, adaptive = (
        decoding(config_of(method="ngram", adaptive=adaptive, acceptance=0.1), model, 1000)(4096)
        for adaptive in (False, True)
    )
    assert always > 1.5 * plain and adaptive == plain


def test_a_draft_model_takes_time_and_memory(tmp_path: Path) -> None:
    build(BuildConfig(architecture="qwen3"), tmp_path / "small")
    model, config = described(LARGE), config_of(method="model", path=str(tmp_path / "small"), acceptance=1.0)
    without, with_model = engine_memory(config_of(), model), engine_memory(config, model)
    size = (tmp_path / "small" / "model.safetensors").stat().st_size // 2  # written in float32
    assert with_model.weights - without.weights == pytest.approx(size, rel=0.05), "the vocabulary is padded"
    assert with_model.per_token - without.per_token == 2 * 2 * 2 * 32 * 2, "layers · (K and V) · heads · width · bytes"
    ngram = replace(config, rollout=replace(config.rollout, drafts=DraftsConfig(method="ngram", acceptance=1.0)))
    assert decoding(config, model, 1000)(1) > decoding(ngram, model, 1000)(1)


def test_a_draft_model_has_the_policys_vocabulary(tmp_path: Path) -> None:
    build(BuildConfig(architecture="qwen3"), tmp_path / "small")
    config, hf = config_of(method="model", path=str(tmp_path / "small")), hf_config(BuildConfig())
    assert check_draft_weights(config, hf) == []
    with pytest.raises(UserError, match=r"rollout.drafts.path = .*small: its vocabulary has \d+ tokens, and the pol"):
        check_draft_weights(config, {**hf, "vocab_size": 7})
    absent = config_of(method="model", path=str(tmp_path / "absent"))
    assert check_draft_weights(absent, hf, planned=True) == [str(tmp_path / "absent")]
    with pytest.raises(UserError):
        check_draft_weights(absent, hf)


@pytest.mark.parametrize("method", HEADS)
def test_a_head_takes_the_memory_of_its_files(tmp_path: Path, method: str) -> None:
    hf = hf_config(BuildConfig(architecture="qwen3"))
    head, policy = build_head(tmp_path / "head", hf, method), architecture(hf).describe(hf)
    config = config_of(method=method, path=str(head), acceptance=1.0)
    without, with_head = engine_memory(config_of(), policy), engine_memory(config, policy)
    numbers = [tensor.numel() for name, tensor in load_file(head / "model.safetensors").items() if name != "d2t"]
    assert with_head.weights - without.weights == 2 * sum(numbers)
    assert with_head.per_token - without.per_token == 2 * KV_HEADS * WIDTH * 2, "K and V · heads · width · bytes"
    assert check_draft_weights(config, hf) == []
    ngram = config_of(method="ngram", adaptive=False, acceptance=1.0)
    assert decoding(config, policy, 1000)(1) > decoding(ngram, policy, 1000)(1)


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("eagle", {"model_type": "qwen3"}, "config.json says model_type = qwen3; heads of Llama layers are allowed"),
        ("eagle", {"vocab_size": 7}, "its vocabulary has 7 tokens, and the policy's"),
        ("eagle", {"hidden_size": 32}, "its hidden states have 32 numbers, and the policy's 64"),
        ("eagle3", {"intermediate_size": 32}, "tensor midlayer.mlp.gate_proj.weight has shape"),
        ("eagle3", {TAKEN: [0, 1, 9]}, r"the head reads the layers \[0, 1, 9\] of the policy, which has 2 layers"),
        ("eagle3", {TAKEN: None}, "the head reads the layers"),
        ("eagle3", {TAKEN: [0, 1]}, "tensor fc.weight has shape"),
    ],
)
def test_a_head_of_another_policy_is_refused(
    tmp_path: Path, method: str, changes: dict[str, object], problem: str
) -> None:
    hf = hf_config(BuildConfig(architecture="qwen3"))
    config = config_of(method=method, path=str(build_head(tmp_path / "head", hf, method, **changes)))
    with pytest.raises(UserError, match=problem):
        check_draft_weights(config, hf)


def test_a_policy_that_gives_no_hidden_states_has_no_eagle3_head(tmp_path: Path) -> None:
    hf = hf_config(BuildConfig(architecture="mixtral"))
    config = config_of(method="eagle3", path=str(tmp_path))
    with pytest.raises(UserError, match="vLLM gives no hidden states of a mixtral model to an EAGLE-3 head"):
        check_draft_weights(config, hf)


def test_layers_of_multi_token_prediction_are_in_the_models_files(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build(BuildConfig(architecture="glm4_moe"), path)
    config, hf = config_of(method="mtp"), read_config(path)
    config.model.path = str(path)
    with pytest.raises(UserError, match="num_nextn_predict_layers = 0: the model has no layer"):
        check_draft_weights(config, hf)
    with pytest.raises(UserError, match=r"the files have no tensor model\.layers\.2"):
        check_draft_weights(config, hf | {"num_nextn_predict_layers": 1})
    add_prediction_layer(path)
    hf = read_config(path)
    assert check_draft_weights(config, hf) == []
    with pytest.raises(UserError, match="this is a qwen3 model"):
        check_draft_weights(config, hf_config(BuildConfig(architecture="qwen3")))
    policy = architecture(hf).describe(hf)
    without, with_layer = engine_memory(config_of(), policy), engine_memory(config, policy)
    layer = [
        t.numel() for name, t in load_file(path / "model.safetensors").items() if name.startswith("model.layers.2.")
    ]
    shared = 2 * hf["vocab_size"] * hf["hidden_size"]
    assert with_layer.weights - without.weights == pytest.approx(2 * (sum(layer) - shared), rel=0.02)
    assert with_layer.per_token - without.per_token == without.per_token / policy.layers


def test_the_named_models_are_those_that_give_hidden_states_in_vllm() -> None:
    """Reads the bases of vLLM's classes from its files: an import of all takes a minute."""
    origin = importlib.util.find_spec("vllm")
    assert origin is not None and origin.origin is not None
    bases: dict[str, list[str]] = {}
    for file in (Path(origin.origin).parent / "model_executor" / "models").glob("*.py"):
        for name, given in re.findall(r"^class (\w+)\(([^)]*)\)", file.read_text(), re.MULTILINE):
            bases[name] = re.findall(r"\w+", given)

    def supports(name: str) -> bool:
        return name == "SupportsEagle3" or any(map(supports, bases.get(name, [])))

    assert supports("LlamaForCausalLM") and not supports("MixtralForCausalLM")
    assert {kind for kind, family in ARCHITECTURES.items() if supports(family.transformers_class)} == {*EAGLE3_TARGETS}


def test_suffix_drafts_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    check_suffix(config_of(method="ngram"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rollout.drafts.method = suffix: vLLM needs the package arctic-inference"):
        check_suffix(config_of(method="suffix"))


def test_a_dry_run_says_what_it_assumes() -> None:
    assert list(_on_drafts(Config())) == []
    (note,) = _on_drafts(config_of(method="ngram"))
    assert note.startswith("rollout.drafts.acceptance=0.2: times assume 0.8 of 4 draft tokens accepted in a step")
