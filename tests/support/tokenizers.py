"""Directories with small tokenizers of common kinds, built by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = ["hello world 123\n\n  def f(x):\n\treturn x", "the user said 42 <answer> 7 </answer>"] * 9
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(special: list[str] = SPECIAL, *, lowercase: bool = False, normalized: bool = False) -> Tokenizer:
    """Returns a tokenizer of GPT-2's kind, also used by Qwen, Llama 3 and DeepSeek."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lowercase:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(text, normalized=normalized) for text in special])
    return tokenizer


def metaspace(*, byte_fallback: bool = True) -> Tokenizer:
    """Returns a tokenizer of SentencePiece's kind, as in Llama 2: spaces are characters, unknown characters are
    bytes."""
    names = ["<unk>", "<s>", "</s>", *([f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else [])]
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁") if letter > " "} | set("▁.6"))
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys([*names, *letters]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in names[:3]])
    return tokenizer


def word_piece() -> Tokenizer:
    """Returns a tokenizer of BERT's kind: lower case, without spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    return tokenizer


def directory(path: Path, tokenizer: Tokenizer, template: str = CHATML, **settings: Any) -> Path:
    """Writes tokenizer.json, tokenizer_config.json with `settings`, and config.json of a Llama."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    kept = {key: value for key, value in settings.items() if key != "model"}
    write(path, "tokenizer_config.json", {"chat_template": template, "clean_up_tokenization_spaces": False, **kept})
    write(path, "config.json", {"model_type": "llama", **settings.get("model", {})})
    return path


def write(path: Path, name: str, content: Mapping[str, Any]) -> None:
    """Writes a JSON file."""
    (path / name).write_text(json.dumps(content))
