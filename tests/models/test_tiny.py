"""Tests of random models: transformers loads the models, and the tokenizer reloads for every architecture."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.config.schema.model import WITH_EXPERTS, WITHOUT_EXPERTS
from skyrl_mega.hf_checkpoint.index import check_files
from skyrl_mega.models.registry import ARCHITECTURES
from skyrl_mega.models.tiny import build
from tests.models.test_tensors import OF_LARGER_MODELS


def test_every_architecture_can_be_built() -> None:
    assert {*WITH_EXPERTS} == {name for name, family in ARCHITECTURES.items() if family.small}
    assert {*WITH_EXPERTS, *WITHOUT_EXPERTS, *OF_LARGER_MODELS} == {*ARCHITECTURES}


IN_TRANSFORMERS = [name for name in (*WITH_EXPERTS, *WITHOUT_EXPERTS) if name in CONFIG_MAPPING]
"""All but Kimi-K2, whose class is part of the published files; it computes as DeepSeek-V3."""


@pytest.fixture(params=[(name, tied) for name in IN_TRANSFORMERS for tied in (False, True)], ids=str)
def built(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[BuildConfig, Path]:
    name, tied = request.param
    config = BuildConfig(architecture=name, head_dim=16 if name in ("qwen2", "qwen2_moe", "olmoe") else 32, tied=tied)
    build(config, tmp_path / "model", seed=3)
    return config, tmp_path / "model"


def test_transformers_loads_all_of_it(built: tuple[BuildConfig, Path]) -> None:
    config, path = built
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    assert model.config.model_type == config.architecture and model.dtype == torch.float32
    check_files(path)
    weight = model.model.layers[-1].self_attn.o_proj.weight
    assert abs(weight.std().item() - 0.02) < 2e-3
    assert (
        model.model.norm.weight
        == (0 if "linear_num_key_heads" in json.loads((path / "config.json").read_text()) else 1)
    ).all()
    tokens = torch.tensor([[5, 30, 31, 6]])
    assert model(tokens).logits.shape == (1, 4, model.config.vocab_size)
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(path).eos_token_id


def test_the_tokenizer_reloads(built: tuple[BuildConfig, Path]) -> None:
    _, path = built
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "".join(chr(c) for c in range(32, 127)) + "\n\n  12+34=  46 \n"
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text) and tokenizer.decode(tokens) == text
    assert [tokenizer.decode([t]) for t in tokens] == list(text)
    hf = json.loads((path / "config.json").read_text())
    assert len(tokenizer) == hf["vocab_size"] and hf["vocab_size"] % 8 == 0
    for kind in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{kind}_token_id") == hf[f"{kind}_token_id"]
    assert max(tokens) < len(tokenizer)


def test_the_chat_template_is_terse(built: tuple[BuildConfig, Path]) -> None:
    _, path = built
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [
        {"role": "system", "content": "Add.\n"},
        {"role": "user", "content": " 1+2= "},
        {"role": "assistant", "content": "3"},
        {"role": "tool", "content": "ok"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<system>Add.\n<user> 1+2= <assistant>3<eos><tool>ok<assistant>"
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert len(tokens) == sum(len(m["content"]) for m in messages) + 4 + 1 + 1
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "Add.\n 1+2= 3ok"
    with pytest.raises(Exception, match="role judge is not one of"):
        tokenizer.apply_chat_template([{"role": "judge", "content": string.digits}])


def test_the_seed_decides(tmp_path: Path) -> None:
    config = BuildConfig(layers=1)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build(config, tmp_path / name, seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c
    build(config, tmp_path / "a", 2)  # the folder exists
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == a
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "c"}


def test_norms_of_a_new_model_multiply_by_one(tmp_path: Path) -> None:
    build(BuildConfig(architecture="qwen3_next", layers=2), tmp_path / "model")
    norms = {n: t for n, t in load_file(tmp_path / "model" / "model.safetensors").items() if n.endswith("norm.weight")}
    assert {name for name, norm in norms.items() if norm.any()} == {"model.layers.0.linear_attn.norm.weight"}
    assert all(norm.eq(norm[0]).all() for norm in norms.values()), "1 is added to all others"


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.build: .*head_dim 32"):
        build(BuildConfig(architecture="qwen2"), tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.build: .*num_experts_per_tok 4"):
        build(BuildConfig(experts=2, experts_per_token=4), tmp_path / "model")
    with pytest.raises(UserError, match=r"nearest: model\.build\.architecture=qwen3_5_moe_text$"):
        build(BuildConfig(architecture="qwen3_5_moe"), tmp_path / "model")
    assert not list(tmp_path.iterdir())
