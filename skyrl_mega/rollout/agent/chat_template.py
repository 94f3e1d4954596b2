"""A model's chat template, with limits on the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from skyrl_mega.common.errors import UserError

MOST_CHARACTERS = 2**26
"""Most characters a template may write in addition to the messages' own texts."""
REPEATS = 8
"""Number of times a template may repeat the input."""


class TemplateError(UserError):
    """The chat template rejects the messages, for example two of the same role in a row."""


class ChatTemplate:
    """The chat template of a tokenizer, run in transformers' sandbox.

    Args:
        path: Directory of the model, for errors.
        tokenizer: A result of `hf_checkpoint.tokenizer.load`.
        options: Further variables of the template.
    """

    def __init__(self, path: str, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.path, self.tokenizer, self.options = path, tokenizer, options

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, generation: bool = True
    ) -> str:
        """Returns the text of a conversation, equal to transformers' `apply_chat_template` without tokenization.

        Args:
            messages: The conversation.
            tools: Tools offered to the policy.
            generation: True to end the text at the point at which the policy generates.

        Raises:
            TemplateError: The template rejects the messages or writes far too much text.
        """
        most = MOST_CHARACTERS + REPEATS * (_characters(messages) + _characters(tools))
        pieces, size = [], 0
        try:
            template = _compiled(self.tokenizer.get_chat_template(None, list(tools) or None))
            for piece in template.generate(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation,
                **{**self.tokenizer.special_tokens_map, **self.options},
            ):
                size += len(piece)
                if size > most:
                    raise ValueError(f"it writes more than {most} characters")
                pieces.append(piece)
        except Exception as error:  # a template is a program: it may even divide by zero
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateError(
                f"model.path={self.path}: the chat template refuses messages of {roles}: {error}"
            ) from error
        return "".join(pieces)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    """Returns the template compiled by transformers, with products limited to MOST_CHARACTERS elements."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def product(context: Any, operator: str, left: Any, right: Any) -> Any:
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > MOST_CHARACTERS:
                raise ValueError(f"it makes a text or list of {len(text) * times} parts")
        return left * right

    environment = _compile_jinja_template(source).environment
    environment.intercepted_binops = frozenset("*")
    environment.call_binop = product
    return environment.from_string(source)


def _characters(value: Any) -> int:
    """Returns the number of characters of all texts in nested mappings and lists."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(name)) + _characters(inner) for name, inner in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
