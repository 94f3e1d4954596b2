"""The text of tokens, for the view that shows them one by one.

Only `tokenizer.json` of the run's model is read, so that no model library has to be loaded. Without it tokens are shown
by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer

from skyrl_mega.config import safe_read
from skyrl_mega.config.errors import UserError

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not yet a character."""
LONGEST = 8
"""Tokens that may share one character, or a few."""


FIX = "bring back the file that the run had, or move it away: tokens are then shown by their numbers"


class Decoder:
    """A tokenizer's texts of single tokens.

    Args:
        tokenizer: From `tokenizer.json`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop a space at the start of a text; after a letter it stays.
        letter = tokenizer.encode("a", add_special_tokens=False).ids
        self._before = letter[-1:] if tokenizer.decode(letter[-1:], skip_special_tokens=False) == "a" else []
        self._one = cache(self._text)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token; together they are the text of all. Where several tokens make up one character, the first
        has it and the others are empty."""
        texts, i = [], 0
        while i < len(ids):
            taken = 1
            text = self._one((ids[i],))
            while REPLACEMENT in text and taken < min(LONGEST, len(ids) - i):
                taken += 1
                text = self._text(tuple(ids[i : i + taken]))
            if REPLACEMENT in text:  # not the bytes of a character at all
                taken, text = 1, self._one((ids[i],))
            texts += [text, *[""] * (taken - 1)]
            i += taken
        return texts

    def _text(self, ids: tuple[int, ...]) -> str:
        text: str = self._tokenizer.decode([*self._before, *ids], skip_special_tokens=False)
        return text[1:] if self._before else text


def decoder_of(run: Path) -> Decoder | None:
    """The decoder of a run's model; None where the run's folder names none that is there.

    A relative `model.path` was relative to where the run was started: it is looked for from here, then from each folder
    above the run's.
    """
    config = run / "config.yaml"
    if not config.is_file():
        return None
    try:
        tree = yaml.safe_load(safe_read.read(config, FIX))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{config}: it is not YAML: {' '.join(str(error).split())}; {FIX}") from error
    try:
        model = OmegaConf.select(OmegaConf.create(tree), "model.path") if isinstance(tree, dict) else None
    except OmegaConfBaseException:  # it names a variable that is not set here
        return None
    if not isinstance(model, str) or not model or "\0" in model:
        return None
    return _first(folder / model for folder in (Path.cwd(), *run.absolute().parents))


def _first(models: Iterable[Path]) -> Decoder | None:
    for model in models:
        file = model / "tokenizer.json"
        if file.is_file():
            try:
                return Decoder(Tokenizer.from_file(str(file)))
            except Exception as error:  # tokenizers raises nothing narrower
                raise UserError(f"{file}: it is no tokenizer ({error}); {FIX}") from error
    return None
