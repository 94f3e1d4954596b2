"""Models with a tiktoken vocabulary and Python code of their own: refused with the command that makes tokenizer.json,
whose tokens are tiktoken's."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tiktoken import Encoding
from transformers.convert_slow_tokenizer import bytes_to_unicode

from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint import tokenizer_json
from skyrl_mega.hf_checkpoint.tokenizer import load
from skyrl_mega.hf_checkpoint.tokenizer_json import check_equal, convert, main
from skyrl_mega.rollout.agent.renderer import Renderer
from tests.support.tokenizers import CHATML, byte_level, write

WORDS = (r"[\p{Han}]+", r"[^\s\d\p{Han}]+", r"\d{1,2}", r"\s+(?!\S)", r"\s+")
"""Pattern of words unlike the converter's own, with runs of Chinese characters as in Kimi's."""
CODE = f"""
raise SystemExit("the model's code runs")


class TinyTokenizer:
    pat_str = "|".join([{", ".join(f'r"{word}"' for word in WORDS)}])
"""


@pytest.fixture(autouse=True)
def fewer_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_json, "JOINED", 200)


END, CALL = "<|im_end|>", "<|call|>"


def vocabulary() -> dict[bytes, int]:
    """Returns a trained vocabulary of 290 tokens."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    trained = json.loads(byte_level([]).to_str())["model"]["vocab"]
    ordered = sorted(trained, key=lambda token: (len(token) > 1, trained[token]))
    return {bytes(byte_of[letter] for letter in token): rank for rank, token in enumerate(ordered)}


def model(path: Path, ranks: dict[bytes, int], code: str = CODE, **config: Any) -> Path:
    """Writes a model's directory as Moonlight's: no tokenizer.json, and four tokens beyond the vocabulary."""
    first = len(ranks)
    lines = (b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    path.mkdir(exist_ok=True)
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (path / "tokenization_tiny.py").write_text(code)
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        first: plain | {"content": "<|im_start|>", "special": True},
        first + 1: plain | {"content": END, "special": True},
        first + 3: plain | {"content": CALL, "special": False},
    }
    settings = {"tokenizer_class": "TinyTokenizer", "eos_token": END, "chat_template": CHATML}
    auto = {"AutoTokenizer": ["tokenization_tiny.TinyTokenizer", None]}
    write(path, "tokenizer_config.json", settings | {"auto_map": auto, "added_tokens_decoder": added})
    hf = {"model_type": "deepseek_v3", "vocab_size": first + 6, "auto_map": {"AutoConfig": "configuration_tiny.Tiny"}}
    write(path, "config.json", hf | config)
    return path


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_its_tokens_are_tiktokens(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str) -> None:
    ranks = vocabulary()
    path, first = model(tmp_path / "model", ranks, model_type=model_type), len(ranks)
    command = f"python -m skyrl_mega.hf_checkpoint.tokenizer_json {path}"
    with pytest.raises(UserError, match=rf"^model.path = .*tiktoken.model .* not run; `{command}` makes") as refused:
        Renderer(str(path))
    assert "\n" not in str(refused.value)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"{path / 'tokenizer.json'}\n"

    names = ["<|im_start|>", END, f"<|reserved_token_{first + 2}|>", CALL]
    names += [f"<|reserved_token_{first + number}|>" for number in (4, 5)]
    special = {name: first + number for number, name in enumerate(names)}
    expected = Encoding("tiny", pat_str="|".join(WORDS), mergeable_ranks=ranks, special_tokens=special)
    text = "def f(x):\n\treturn 12345  # 漢字abc 語, aaaaaaaa 🙂\n\n the user said 42"
    chat = Renderer(str(path))
    assert chat.encode(text) == expected.encode(text)
    assert chat.text(chat.encode(text)) == text
    rendered = f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"
    assert list(chat.first([{"role": "user", "content": text}])) == expected.encode(rendered, allowed_special="all")
    assert chat.stop_tokens == (special[END],)
    tokenizer = load(path, "model.path")
    assert [tokenizer.convert_tokens_to_ids(name) for name in names] == [special[name] for name in names]
    assert tokenizer.decode([special["<|im_start|>"], special[CALL]], skip_special_tokens=True) == CALL
    with pytest.raises(UserError, match=r"tokenizer\.json: it exists; remove it"):
        main([str(path)])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"code": "pat_str = compute()"}, "tokenization_tiny.py: pat_str is not constant text"),
        ({"code": 'words = r"a"'}, "no tokenization_.*py there assigns pat_str"),
        ({"code": 'pat_str = "("'}, "pat_str cannot be used"),
        ({"gap": True}, "tiktoken.model: its tokens lack single bytes"),
    ],
    ids=["computed", "absent", "invalid", "vocabulary"],
)
def test_files_that_cannot_be_converted_are_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    ranks = vocabulary()
    if change.get("gap"):
        del ranks[b"a"]
    path = model(tmp_path / "model", ranks, change.get("code", CODE))
    with pytest.raises(UserError, match=problem):
        main([str(path)])
    assert not (path / "tokenizer.json").exists()


def test_another_pattern_is_noticed() -> None:
    ranks = vocabulary()
    tokenizer = convert(ranks, "|".join(WORDS), {})
    check_equal(tokenizer, ranks, "|".join(WORDS), {})
    with pytest.raises(UserError, match=r"to another tokenizer: .* has the tokens \[.* instead of \["):
        check_equal(tokenizer, ranks, r"\p{L}+|\s+|[^\s\p{L}]", {})
