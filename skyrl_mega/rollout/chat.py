"""Between messages and tokens: the chat template is applied to the first messages once, and afterwards only to what
is new."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError

MARK = "0assistant0turn0"
"""Stands for the policy's words while a template is rendered; plain, so that no template changes it."""


class Chat:
    """A model's tokenizer and chat template.

    Args:
        path: Hugging Face directory.

    Raises:
        UserError: There is no tokenizer, or it has no chat template.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"model.path={path}: no tokenizer can be loaded: {str(error).splitlines()[0]}") from error
        if not self.tokenizer.chat_template:
            raise UserError(f"model.path={path}: the tokenizer has no chat template; add chat_template.jinja there")
        self.path = path
        self.stop_tokens = stop_tokens(path, self.tokenizer)
        self._first = lru_cache(maxsize=4096)(self._opening)
        self._continue = lru_cache(maxsize=4096)(self._continuation)

    def first(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of the first messages, up to where the policy begins to speak."""
        return list(self._first(json.dumps(messages)))

    def _opening(self, messages: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(json.loads(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    def following(self, last: int, observations: list[dict[str, str]]) -> list[int]:
        """Tokens that stand between the policy's last token and its next turn.

        The template is rendered with a mark in place of the policy's words; what follows the mark closes the turn,
        brings the observations and opens the next turn. So nothing that the policy produced is ever tokenised again.

        Args:
            last: The policy's last token. An end-of-turn token that it produced itself is not repeated.
            observations: The environment's messages.
        """
        text = self._continue(json.dumps(observations))
        if last in self.stop_tokens:
            text = text.removeprefix(self.tokenizer.decode([last], skip_special_tokens=False))
        return self.encode(text)

    def _continuation(self, observations: str) -> str:
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}, *json.loads(observations)]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if MARK not in text:
            raise UserError(f"model.path={self.path}: the chat template leaves out what the assistant said before")
        return text[text.index(MARK) + len(MARK) :]

    def text(self, tokens: list[int]) -> str:
        """What the policy said, without the token that ended it."""
        return self.tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that has its special tokens written out."""
        return self.tokenizer.encode(text, add_special_tokens=False)


def stop_tokens(path: str, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the tokenizer's, and those of generation_config.json (chat models often have two)."""
    found = {tokenizer.eos_token_id}
    file = Path(path) / "generation_config.json"
    if file.is_file():
        ids = json.loads(file.read_text()).get("eos_token_id")
        found |= set(ids) if isinstance(ids, list) else {ids}
    return tuple(sorted(token for token in found if token is not None))
