"""The tokenizer of a Hugging Face directory, verified by use.

`tokenizer_config.json` names a class, and under transformers 5 a class has a pipeline of its own: with a
`tokenizer.json` of another kind, spaces and newlines are lost silently. The model was trained with `tokenizer.json`
itself. Both therefore encode and decode the same texts, and after any difference the file takes precedence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import check_folder, read_json
from skyrl_mega.common.values import shown
from skyrl_mega.models.registry import ARCHITECTURES

ALWAYS = ("two  words, and\n\nlines\n", "  if x:\n        y = 0\n", "0123456789 2026 3.14")
"""Texts of spaces, newlines, digits and lower-case ASCII. Any tokenizer usable by a policy returns these unchanged,
except for letters reported as unknown.
"""
KNOWN = ("\ta\tb\r\n", "ü ñ ж", "語 中文、日本語 한국어", "🙂 👩‍👩‍👧")
"""Texts returned unchanged, or reported as partly unknown."""
FETCH = "fetch tokenizer.json and tokenizer_config.json again"
TIKTOKEN = "tiktoken.model"
"""Vocabulary of Moonlight and Kimi-K2, read by Python code in the directory."""


def load(path: Path, key: str, *, lossless: bool = True) -> Any:
    """Returns a directory's tokenizer as loaded by transformers, with special tokens and chat template.

    If the class named by the directory encodes differently from tokenizer.json, tokenizer.json is loaded without the
    class.

    Args:
        path: Directory.
        key: Setting or option for the directory, named in errors.
        lossless: True if texts must come back unchanged. False for an embedding model, whose tokenizer may write lower
            case.

    Raises:
        UserError: A file is not regular, config.json cannot be used, nothing can be loaded, the tokenizer still differs
            from tokenizer.json, text is lost, or the vocabulary is tiktoken's, without a tokenizer.json.
    """
    if path.is_dir():
        check_folder(path, FETCH)
    if (path / TIKTOKEN).is_file() and not (path / "tokenizer.json").is_file():
        # transformers would split words by Llama 3's pattern, without an error
        raise UserError(
            f"its tokenizer is {TIKTOKEN} with Python code of the model's own, which is not run",
            key=key,
            value=path,
            fix=f"`python -m skyrl_mega.hf_checkpoint.tokenizer_json {path}` makes tokenizer.json",
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config, file_tokenizer = _config(path, key), _file(path, key)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, config=config
        )
        if file_tokenizer is not None and difference(tokenizer, file_tokenizer):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        tokenizer.decode(tokenizer.encode(ALWAYS[0]))  # some faults appear only in use
    except Exception as error:  # two libraries and the directory's own files may raise anything
        if file_tokenizer is None:
            raise _unusable(path, key, error) from error
        try:  # the class may fail on a file of another kind
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            tokenizer.decode(tokenizer.encode(ALWAYS[0]))
        except Exception as second:
            raise _unusable(path, key, second) from second
    if file_tokenizer is not None and (differs := difference(tokenizer, file_tokenizer)):
        raise UserError(
            f"the tokenizer by tokenizer_config.json differs from tokenizer.json: {differs}",
            key=key,
            value=path,
            fix=FETCH,
        )
    if lossless:
        _check_lossless(tokenizer, f"{key}={path}: {'tokenizer.json' if file_tokenizer else 'the tokenizer'}")
    return tokenizer


def difference(tokenizer: Any, file_tokenizer: Tokenizer) -> str | None:
    """Returns a description of the first difference between a tokenizer and its tokenizer.json: a test text encoded or
    decoded differently, or an added token with another number. None if all are equal.

    Args:
        tokenizer: The tokenizer, as loaded by transformers.
        file_tokenizer: The tokenizer of tokenizer.json alone.
    """
    for probe in (*ALWAYS, *KNOWN):
        ids, expected = (
            tokenizer.encode(probe, add_special_tokens=False),
            file_tokenizer.encode(probe, add_special_tokens=False),
        )
        if ids != expected.ids:
            return f"{probe!a} has the tokens {ids[:8]}… instead of {expected.ids[:8]}…"
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded != file_tokenizer.decode(ids, skip_special_tokens=False):
            return f"the tokens of {probe!a} become {ascii(decoded)[:100]}"
    for number, token in file_tokenizer.get_added_tokens_decoder().items():
        if (actual := tokenizer.convert_tokens_to_ids(token.content)) != number:
            return f"the added token {shown(token.content)} is {actual} instead of {number}"
    return None


def _check_lossless(tokenizer: Any, where: str) -> None:
    unknown = tokenizer.unk_token_id
    for probe in (*(_without_unknown(tokenizer, probe) for probe in ALWAYS), *KNOWN):
        ids = tokenizer.encode(probe, add_special_tokens=False)
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Pipelines like SentencePiece's add a space at the start of a text, or take the text's own for it.
        if decoded.lstrip(" ") != probe.lstrip(" ") and not (probe in KNOWN and unknown is not None and unknown in ids):
            raise UserError(
                f"{where} loses text: {probe!a} comes back as {ascii(decoded)[:100]}; {FETCH}, or set "
                "tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json if the class does not belong to "
                "this tokenizer.json"
            )


def _without_unknown(tokenizer: Any, probe: str) -> str:
    """Returns a text without the characters unknown to the tokenizer, as letters are to a tokenizer of digits; white
    space stays.
    """
    unknown = tokenizer.unk_token_id

    def knows(letter: str) -> bool:
        return letter.isspace() or unknown not in tokenizer.encode(letter, add_special_tokens=False)

    return probe if unknown is None else "".join(filter(knows, probe))


def _config(path: Path, key: str) -> Any:
    """Returns config.json as read by transformers, the basis for the tokenizer's class; None without the file, and for
    a `model_type` that transformers does not know."""
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        return None
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its values can make a model's classes raise anything
        if isinstance(error, ValueError) and _only_known_here(path / "config.json"):
            return None
        raise UserError(
            f"config.json cannot be used: {_error_text(error)}", key=key, value=path, fix="fetch it again"
        ) from error


def _only_known_here(file: Path) -> bool:
    """Returns True if a config.json has a `model_type` of this program that transformers does not know (kimi_k2)."""
    from transformers import CONFIG_MAPPING

    model_type = read_json(file, FETCH).get("model_type")
    return isinstance(model_type, str) and model_type in ARCHITECTURES and model_type not in CONFIG_MAPPING


def _file(path: Path, key: str) -> Tokenizer | None:
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise _unusable(path, key, error) from error
    tokenizer.no_padding()  # embedding models keep both settings of their training run in the file
    tokenizer.no_truncation()
    return tokenizer


def _unusable(path: Path, key: str, error: Exception) -> UserError:
    return UserError(
        f"no tokenizer can be loaded: {type(error).__name__}: {_error_text(error)}", key=key, value=path, fix=FETCH
    )


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return shown(text[:300]) if text else "?"
