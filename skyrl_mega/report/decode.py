"""Text of single tokens, for the token view.

Only `tokenizer.json` of the run's model is read, so no model library is loaded. Without the file, tokens are shown as
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError

REPLACEMENT = "\ufffd"
"""Output of a decoder for bytes of an incomplete character."""
LONGEST = 8
"""Most tokens decoded together to complete a character."""


FIX = "bring back the file that the run had, or move it away: tokens are then shown by their numbers"


class TokenDecoder:
    """Decoder of token ids to the text of each single token.

    Args:
        tokenizer: The tokenizer of `tokenizer.json`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop a leading space, but not after a letter.
        letter = tokenizer.encode("a", add_special_tokens=False).ids
        self._before = letter[-1:] if tokenizer.decode(letter[-1:], skip_special_tokens=False) == "a" else []
        self._one = cache(self._text)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Returns a text for each token; joined, the text of all tokens. If several tokens form a character, the first
        token gets the character and the others are empty."""
        texts, i = [], 0
        while i < len(ids):
            taken = 1
            text = self._one((ids[i],))
            while REPLACEMENT in text and taken < min(LONGEST, len(ids) - i):
                taken += 1
                text = self._text(tuple(ids[i : i + taken]))
            if REPLACEMENT in text:  # the bytes never form a character
                taken, text = 1, self._one((ids[i],))
            texts += [text, *[""] * (taken - 1)]
            i += taken
        return texts

    def _text(self, ids: tuple[int, ...]) -> str:
        text: str = self._tokenizer.decode([*self._before, *ids], skip_special_tokens=False)
        return text[1:] if self._before else text


def decoder_of(run: Path) -> TokenDecoder | None:
    """Returns the decoder of a run's model, from `tokenizer.json` in the run's `model.path`.

    Returns None if the run's folder names no model, or the model or its `tokenizer.json` is absent. A relative
    `model.path` is searched in the current directory first, then in each parent of the run's folder.

    Raises:
        UserError: `config.yaml` or `tokenizer.json` cannot be read.
    """
    config = run / "config.yaml"
    if not config.is_file():
        return None
    try:
        tree = yaml.safe_load(safe_read.read(config, FIX))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"it is not YAML: {' '.join(str(error).split())}", key=config, fix=FIX) from error
    try:
        model = OmegaConf.select(OmegaConf.create(tree), "model.path") if isinstance(tree, dict) else None
    except OmegaConfBaseException:  # the value refers to an unset variable
        return None
    if not isinstance(model, str) or not model or "\0" in model:
        return None
    return _first(folder / model for folder in (Path.cwd(), *run.absolute().parents))


def _first(models: Iterable[Path]) -> TokenDecoder | None:
    for model in models:
        file = model / "tokenizer.json"
        if file.is_file():
            try:
                return TokenDecoder(Tokenizer.from_file(str(file)))
            except Exception as error:  # tokenizers raises nothing narrower
                raise UserError(f"it is no tokenizer ({error})", key=file, fix=FIX) from error
    return None
