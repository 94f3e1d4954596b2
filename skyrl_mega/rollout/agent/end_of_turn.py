"""End-of-turn tokens, from the files and the chat template of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import read_json
from skyrl_mega.common.values import shown


class Ends(NamedTuple):
    """The end-of-turn tokens of a model."""

    tokens: tuple[int, ...]
    """All tokens that end a turn, in order."""
    written: int
    """The token that ends turns written by this code: the chat template's own, else the tokenizer's."""


def ends_of(path: str, tokenizer: Any, closing: str) -> Ends:
    """Returns the end-of-turn tokens: of the template, the tokenizer, and generation_config.json or else config.json
    (chat models often have several). With an empty list in generation_config.json only limits end a turn, and
    `Ends.tokens` is empty. Missing files are no error.

    Args:
        path: Directory of the model.
        tokenizer: The model's tokenizer.
        closing: Text written by the chat template after the assistant's words.

    Raises:
        UserError: No source names a token, or a file contains something else than tokens.
    """
    template = _first_added(tokenizer, closing)
    listed = _listed(Path(path) / "generation_config.json")
    by_limits = listed == []
    if listed is None:
        listed = _listed(Path(path) / "config.json") or []
    tokens = [token for token in (template, tokenizer.eos_token_id, *listed) if token is not None]
    if not tokens:
        raise UserError(
            "nothing says which token ends a turn: the chat template writes none behind the "
            "assistant's words, and neither tokenizer_config.json (eos_token) nor "
            "generation_config.json or config.json (eos_token_id) names one; give eos_token_id "
            "in generation_config.json",
            key="model.path",
            value=path,
        )
    return Ends(() if by_limits else tuple(sorted(set(tokens))), tokens[0])


def control_tokens(tokenizer: Any, ends: tuple[int, ...]) -> dict[int, str]:
    """Returns id → text of the tokens that no message may contain: the tokenizer's special tokens, and the tokens
    `ends`, which end a turn."""
    added = {
        token: added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special or token in ends
    }
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def _first_added(tokenizer: Any, closing: str) -> int | None:
    """Returns the added token at the beginning of a text, ignoring leading spaces, or None."""
    tokens = tokenizer.encode(closing.lstrip(), add_special_tokens=False)
    return tokens[0] if tokens and tokens[0] in tokenizer.added_tokens_decoder else None


def _listed(file: Path) -> list[int] | None:
    """Returns the tokens in a file's eos_token_id, or None if the file or the entry is absent."""
    ids = read_json(file, "fetch it again").get("eos_token_id") if file.is_file() else None
    if ids is None:
        return None
    listed = ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
        raise UserError(f"eos_token_id is {shown(ids)}; allowed is a token, or a list of tokens", key=file)
    return listed
