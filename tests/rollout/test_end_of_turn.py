"""The tokens that end a turn, read from all files of a model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from skyrl_mega.common.errors import UserError
from skyrl_mega.data.rows import Demonstration
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.sft_warmup import encode
from tests.support.chats import CHATML as CHARACTERS_CHATML
from tests.support.chats import characters
from tests.support.tokenizers import CHATML, byte_level, directory, write

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LLAMA2 = "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} <|im_end|>{% else %}"
LLAMA2 += "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
END, TEXT_END = "<|im_end|>", "<|endoftext|>"


def ends(path: Path, template: str, *, generation: Any = None, model: Any = None, eos: str | None = None) -> list[str]:
    """Returns the texts of the stop tokens, starting with the token written by the template."""
    more = {"eos_token_id": model} if model is not None else {}
    directory(path, byte_level(), template, model=more, **({"eos_token": eos} if eos else {}))
    if generation is not None:
        write(path, "generation_config.json", {"eos_token_id": generation})
    chat, file = Renderer(str(path)), Tokenizer.from_file(str(path / "tokenizer.json"))
    others = [token for token in chat.stop_tokens if token != chat.end]
    return [str(file.id_to_token(token)) for token in (chat.end, *others)]


IDS = {text: number for number, text in enumerate([TEXT_END, "<|im_start|>", END], 280)}


def test_each_place_counts(tmp_path: Path) -> None:
    ids = {text: byte_level().token_to_id(text) for text in (TEXT_END, END)}
    assert ends(tmp_path / "a", CHATML) == [END]
    assert ends(tmp_path / "b", CHATML, eos=TEXT_END) == [END, TEXT_END]
    assert ends(tmp_path / "c", PLAIN, eos=TEXT_END) == [TEXT_END]
    assert ends(tmp_path / "d", PLAIN, model=[ids[END], ids[TEXT_END]]) == [END, TEXT_END]
    assert ends(tmp_path / "e", PLAIN, generation=ids[TEXT_END], model=[ids[END]]) == [TEXT_END]
    assert ends(tmp_path / "f", LLAMA2, eos=TEXT_END) == [END, TEXT_END]


def test_nothing_that_ends_a_turn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing says which token ends a turn: .*give eos_token_id in generation_c"):
        ends(tmp_path, PLAIN)


@pytest.mark.parametrize("listed", ["x", [1, None], {"a": 1}, -1, True])
def test_what_is_no_token_is_refused_in_config_json_too(tmp_path: Path, listed: Any) -> None:
    with pytest.raises(UserError, match=r"(config\.json: eos_token_id is|config\.json cannot be used: .*eos_token_id)"):
        ends(tmp_path, PLAIN, model=listed)


def test_an_empty_list_says_that_turns_end_by_their_limits(tmp_path: Path) -> None:
    directory(tmp_path, byte_level(), CHATML, eos_token=END)
    write(tmp_path, "generation_config.json", {"eos_token_id": []})
    assert Renderer(str(tmp_path)).stop_tokens == ()


@pytest.mark.parametrize("eos", [TEXT_END, None])
def test_warm_up_teaches_the_templates_end(tmp_path: Path, eos: str | None) -> None:
    """Encodes with another `eos_token` in the tokenizer, or with null."""
    path = directory(tmp_path, byte_level(), CHATML, eos_token=eos)
    chat = Renderer(str(path))
    turns = [{"role": "assistant", "content": "5"}, {"role": "user", "content": "and"},
             {"role": "assistant", "content": "6"}]  # fmt: skip
    batch = encode([Demonstration([{"role": "user", "content": "2+3"}], turns)], chat)
    expected = chat.tokenizer.apply_chat_template([{"role": "user", "content": "2+3"}, *turns], tokenize=False)
    assert chat.tokenizer.decode(batch.tokens) + "\n" == expected
    assert chat.tokenizer.decode(batch.tokens[batch["mask"] == 1]) == f"5{END}6{END}"


def test_a_space_before_the_end_token_is_not_said_twice(tmp_path: Path) -> None:
    chat = Renderer(str(directory(tmp_path, byte_level(), LLAMA2, eos_token=END)))
    following = chat.following(chat.end, [{"role": "user", "content": "more"}])
    assert chat.tokenizer.decode(following) == "[INST] more [/INST]"
    assert chat.tokenizer.decode(chat.following(5, [{"role": "user", "content": "x"}])) == f" {END}[INST] x [/INST]"


def test_a_template_that_is_changed_later_keeps_its_end(tmp_path: Path) -> None:
    chat = characters(tmp_path / "characters", CHARACTERS_CHATML)
    assert chat.stop_tokens == (chat.end,) == (chat.tokenizer.eos_token_id,)
