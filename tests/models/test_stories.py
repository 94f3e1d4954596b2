"""Tests of the trained 260k-parameter model: the text must equal the output of the authors' program."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.stories import BOS


def reference_text(real_data: Path) -> str:
    """Returns the output of llama2.c at temperature 0."""
    page = (real_data / "data" / "stories260k" / "reference_output_stories260K.md").read_text(encoding="utf-8")
    start = page.index("-t 0.0\n") + len("-t 0.0\n")
    return page[start : page.index("\n```", start)]


def test_it_tells_the_reference_story_word_for_word(stories: Path, real_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = AutoModelForCausalLM.from_pretrained(stories)
    assert model.dtype == torch.float32
    tokens = model.generate(torch.tensor([[BOS]]), max_new_tokens=256, do_sample=False)[0]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == reference_text(real_data)


def test_its_tokenizer_goes_there_and_back(stories: Path, real_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    model = AutoModelForCausalLM.from_pretrained(stories)
    tokens = model.generate(torch.tensor([[BOS]]), max_new_tokens=256, do_sample=False)[0].tolist()
    for text in (reference_text(real_data), "Once  upon\na café, 日本 <3"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # A trained model writes in the tokenizer's pieces: encoding the text gives the same tokens.
    same = sum(a == b for a, b in zip(tokenizer(reference_text(real_data))["input_ids"], tokens[1:], strict=False))
    assert same > 0.9 * len(tokens)
