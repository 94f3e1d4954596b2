"""Texts of single tokens add up to the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from skyrl_mega.report.decode import TokenDecoder, decoder_of
from tests.report.cases import run_folder

WORDS = ["the cat sat on the mat", "naïve café, 中文 and 🙂", "  two  spaces\n\tand a tab"]


def byte_level() -> Tokenizer:
    """Returns a tokenizer like Qwen's and Llama 3's: any bytes are tokens, a character may take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Returns a tokenizer like Llama 2's: the decoder drops the first space of a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


BYTES, SPACES = byte_level(), metaspace()


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abc é中🙂\n\x00", max_size=20))
def test_every_text_adds_up(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False).ids
    texts = TokenDecoder(BYTES).texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_bytes_that_are_no_character_do_not_swallow_what_follows() -> None:
    broken = BYTES.encode("🙂", add_special_tokens=False).ids[:1]
    word = BYTES.encode("the cat", add_special_tokens=False).ids
    texts = TokenDecoder(BYTES).texts([*broken, *word, *broken])
    assert "".join(texts[1:-1]) == "the cat"
    assert "\ufffd" in texts[0] and "\ufffd" in texts[-1]


def test_special_tokens_are_seen() -> None:
    assert TokenDecoder(BYTES).texts([BYTES.token_to_id("<|end|>")]) == ["<|end|>"]


def test_spaces_at_the_start_of_a_word_stay() -> None:
    ids = SPACES.encode("the cat sat").ids
    assert "".join(TokenDecoder(SPACES).texts(ids)).split() == ["the", "cat", "sat"]
    assert "".join(TokenDecoder(SPACES).texts(ids)).count(" ") == 3, "also the first token's own"


def test_the_model_is_found_from_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "runs" / "deep" / "r", model="models/m")
    assert decoder_of(run) is None
    assert decoder_of(tmp_path) is None
    (tmp_path / "models" / "m").mkdir(parents=True)
    BYTES.save(str(tmp_path / "models" / "m" / "tokenizer.json"))
    monkeypatch.chdir("/")
    decoder = decoder_of(run)
    assert decoder and decoder.texts(BYTES.encode("the").ids) == TokenDecoder(BYTES).texts(BYTES.encode("the").ids)
