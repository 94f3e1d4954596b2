"""A tokenizer equals its tokenizer.json for any class named in the directory, and keeps all text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint.tokenizer import ALWAYS, KNOWN, load
from skyrl_mega.rollout.agent.renderer import Renderer
from tests.support import stories
from tests.support.chats import qwen
from tests.support.tokenizers import byte_level, directory, metaspace, word_piece, write

TEXT = "  if x:\n\treturn 1234  # 語 🙂 ü\n\n"
WRONG_CLASSES = ["LlamaTokenizerFast", "LlamaTokenizer", "T5TokenizerFast", "BertTokenizerFast", "Qwen2TokenizerFast"]


@pytest.mark.parametrize("named", [*WRONG_CLASSES, "PreTrainedTokenizerFast", "NoSuchTokenizer", None])
def test_a_byte_level_file_beside_any_class(tmp_path: Path, named: str | None) -> None:
    path = directory(tmp_path, byte_level(), tokenizer_class=named, eos_token="<|im_end|>")
    chat, file = Renderer(str(path)), Tokenizer.from_file(str(path / "tokenizer.json"))
    assert chat.encode(TEXT) == file.encode(TEXT, add_special_tokens=False).ids
    assert chat.text(chat.encode(TEXT)) == TEXT
    rendered = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
    assert list(chat.first([{"role": "user", "content": TEXT}])) == file.encode(rendered, add_special_tokens=False).ids
    assert chat.stop_tokens == (file.token_to_id("<|im_end|>"),)


def test_the_case_is_real(tmp_path: Path) -> None:
    """Shows that transformers itself loses spaces with DeepSeek-R1-Distill-Llama-8B's pair of files."""
    path = directory(tmp_path, byte_level(), tokenizer_class="LlamaTokenizerFast")
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer.encode("a b\nc", add_special_tokens=False)) == "abc"


def test_kinds_that_models_have(tmp_path: Path, real_data: Path) -> None:
    for path in (
        directory(tmp_path / "metaspace", metaspace(), eos_token="</s>", tokenizer_class="LlamaTokenizerFast"),
        qwen(real_data, tmp_path / "qwen"),  # only vocab.json and merges.txt
        stories.write(real_data / "data" / "stories260k", tmp_path / "stories"),
    ):
        tokenizer = load(path, "model.path")
        assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT
        if (path / "tokenizer.json").exists():
            file = Tokenizer.from_file(str(path / "tokenizer.json"))
            assert tokenizer.encode(TEXT, add_special_tokens=False) == file.encode(TEXT, add_special_tokens=False).ids


def test_a_tokenizer_of_digits_and_one_that_takes_a_first_space_are_kept(tmp_path: Path) -> None:
    letters = ["<unk>", "<|im_end|>", *"0123456789+= \n"]
    digits = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(letters)}, unk_token="<unk>"))
    digits.pre_tokenizer, digits.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    digits.add_special_tokens(letters[:2])
    chat = Renderer(str(directory(tmp_path / "digits", digits, unk_token="<unk>", eos_token="<|im_end|>")))
    assert chat.text(chat.encode("12 + 34 = 46\n")) == "12 + 34 = 46\n"
    first = metaspace()  # like Llama 2's and Mistral's files since transformers 4.40
    first.normalizer = None
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    chat = Renderer(str(directory(tmp_path / "first", first, unk_token="<unk>", eos_token="</s>")))
    assert chat.text(chat.encode("if x:\n  y")) == "if x:\n  y"


@pytest.mark.parametrize("kind", ["word piece", "no bytes for newlines", "wrong class without a file"])
def test_text_that_gets_lost_is_refused(tmp_path: Path, real_data: Path, kind: str) -> None:
    if kind == "word piece":
        path = directory(tmp_path, word_piece(), unk_token="[UNK]")
    elif kind == "no bytes for newlines":
        path = directory(tmp_path, metaspace(byte_fallback=False), unk_token="<unk>")
    else:
        path = qwen(real_data, tmp_path)
        named = json.loads((path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
        write(path, "tokenizer_config.json", named)
        write(path, "config.json", {"model_type": "llama"})
    with pytest.raises(UserError, match=r"model.path ?= ?.*(loses text|no tokenizer can be loaded).*fetch") as refused:
        Renderer(str(path))
    assert "\n" not in str(refused.value)


def test_an_embedding_models_tokenizer_may_lose_case_but_is_its_file(tmp_path: Path) -> None:
    file = word_piece()
    saved = Tokenizer.from_str(file.to_str())
    saved.enable_padding(length=64)  # as in all-MiniLM-L6-v2's file
    saved.enable_truncation(8)
    path = directory(tmp_path, saved, unk_token="[UNK]", tokenizer_class="LlamaTokenizerFast")
    for text in (*ALWAYS, *KNOWN, TEXT):
        tokens = load(path, "--model", lossless=False).encode(text, add_special_tokens=False)
        assert tokens == file.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("value", [{"initializer_range": "wide"}, {"hidden_size": "x"}, {"rope_parameters": 5}])
def test_errors_of_config_json_are_its_own(tmp_path: Path, value: dict[str, object]) -> None:
    path = directory(tmp_path, byte_level(), eos_token="<|im_end|>", model=value)
    with pytest.raises(UserError, match=r"config\.json cannot be used: .*; fetch it again") as refused:
        Renderer(str(path))
    assert "tokenizer" not in str(refused.value).removeprefix(f"model.path = {path}")
