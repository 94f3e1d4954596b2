"""A model's chat template: what it writes of messages, bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from skyrl_mega.config.errors import UserError

MOST_CHARACTERS = 2**26
"""What a template may write beside the messages' own texts."""
REPEATS = 8
"""How often a template may write what it is given."""


class Refused(UserError):
    """The chat template refuses messages, such as two of one role in a row."""


class ChatTemplate:
    """The chat template of a tokenizer, in transformers' own sandbox.

    Args:
        path: The model's directory, for errors.
        tokenizer: As `hf_checkpoint.tokenizer.load` gives it.
        options: Further variables of the template.
    """

    def __init__(self, path: str, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self.path, self.tokenizer, self.options = path, tokenizer, options

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, generation: bool = True
    ) -> str:
        """Returns the text of a conversation, as `apply_chat_template` has it.

        Args:
            messages: The conversation.
            tools: What the policy may call.
            generation: The text ends where the policy speaks.

        Raises:
            Refused: The template refuses the messages, or writes far more than they have.
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
        except Exception as error:  # the template is a program of its own: it may divide by zero
            roles = ", ".join(str(message["role"]) for message in messages)
            raise Refused(f"model.path={self.path}: the chat template refuses messages of {roles}: {error}") from error
        return "".join(pieces)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    """Returns a template that transformers has compiled, in which no product has more than MOST_CHARACTERS."""
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
    """Returns the characters of all texts in nested mappings and lists."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(name)) + _characters(inner) for name, inner in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
