"""Between messages and tokens: the chat template is applied to the first messages once, and afterwards only to what
is new.

A message is text. Where it spells a token that the tokenizer holds special (`<|im_end|>` in a page that was found), it
gets the tokens of those characters: only the template makes turns.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.outside import json_object
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.config.values import shown
from skyrl_mega.envs.tool_calls import PARSERS, AssistantMessage, form_of

MARK = "0assistant0turn0"
"""Stands for the policy's words while a template is rendered; plain, so that no template changes it."""
PROBE = "a_tool_to_look_for"
"""The name of a tool that a template is asked to show."""
BREAK = "\ufdd0"
"""Where a rendered text is cut before it is tokenised. Unicode keeps this code point free of any character."""
KEPT_TOKENS = 2**26
"""Tokens of the data's prompts that are kept, 4 bytes each. What comes after them is rendered again when it is played.
"""


class Refused(UserError):
    """The chat template refuses messages, such as two of one role in a row."""


class Renderer:
    """A model's tokenizer and chat template.

    Args:
        path: Hugging Face directory.
        rollout: How conversations are rendered; None takes the defaults.

    Raises:
        UserError: There is no tokenizer, or it has no chat template.
    """

    def __init__(self, path: str, rollout: RolloutConfig | None = None) -> None:
        from transformers import AutoTokenizer

        rollout = rollout or RolloutConfig()
        self.one_message = rollout.conversation == "one_message"
        """Whether all that follows the first messages is inside one message of the assistant."""

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
            self.tokenizer.decode(self.encode(MARK))  # some faults show when it is first used
        except Exception as error:  # whatever two libraries and the directory's own files make of each other
            said = (str(error).splitlines() or [""])[0] or "?"
            raise UserError(
                f"model.path={path}: no tokenizer can be loaded: {type(error).__name__}: {said}; fetch its "
                "tokenizer.json and tokenizer_config.json again"
            ) from error
        if not self.tokenizer.chat_template:
            raise UserError(f"model.path={path}: the tokenizer has no chat template; add chat_template.jinja there")
        self.form = form_of(str(self.tokenizer.chat_template))
        """The form in which the template has tools called; None where it is not known."""
        self.options = rollout.chat_template_options
        """Further variables of the template."""
        for name in self.options:
            if not re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)):
                raise UserError(
                    f"rollout.chat_template_options.{name} = {shown(self.options[name])}: the chat template of "
                    f"model.path={path} has no such variable; fix the name, or leave it out"
                )
        self.path = path
        self.vocabulary: int | None = None
        """The model's `vocab_size`, once `check_vocabulary` was told."""
        self.stop_tokens = stop_tokens(path, self.tokenizer)
        self.control = control_tokens(self.tokenizer, self.stop_tokens)
        spelled = "|".join(re.escape(text) for text in self.control.values()) or "(?!)"
        self._spelled = re.compile(f"(?=(?:{spelled})).", re.DOTALL)
        self._prompts: dict[bytes, array[int]] = {}
        """Openings of the data's prompts, int32, by `_key`."""
        self._room = KEPT_TOKENS
        """Tokens that there is room for in `_prompts`."""
        self._first = lru_cache(maxsize=4096)(self._opening)
        self._continue = lru_cache(maxsize=4096)(self._continuation)
        if MARK not in self._render([{"role": "user", "content": MARK}]):
            raise UserError(f"model.path={path}: the chat template leaves out what the user says; fix it")

    def check_vocabulary(self, size: int) -> None:
        """Refuses a token that ends a turn and that the model cannot say.

        Args:
            size: The model's `vocab_size`.

        Raises:
            UserError: There is one.
        """
        self.vocabulary = size
        if beyond := [token for token in self.stop_tokens if token >= size]:
            raise UserError(
                f"model.path={self.path}: the end-of-turn token {beyond[0]} is not below config.json's vocab_size = "
                f"{size}; the tokenizer (generation_config.json) is another model's, fetch it again"
            )

    def check_tools(self, environment: str) -> None:
        """Refuses an environment with tools where the template cannot show them or nothing here reads its calls.

        Args:
            environment: Its name, for the error.

        Raises:
            UserError: It does.
        """
        if self.one_message:
            raise UserError(one_message_refused(environment))
        shown = PROBE in self._render([{"role": "user", "content": "."}], [_probe()])
        if not shown or self.form is None:
            what = "writes calls in a form that is not known" if shown else "shows no tools"
            raise UserError(
                f"model.path={self.path}: environment {environment} has tools, and the chat template {what}; allowed "
                f"is a template that takes `tools` and has them called in one of the forms {', '.join(PARSERS)}"
            )

    def parse(self, said: Sequence[int] | str, turn: int = 1) -> AssistantMessage:
        """What the policy said, with the tool calls in it, as the template has it write them.

        Args:
            said: Its tokens, or their text.
            turn: The number of the turn, which makes the calls' ids unique.
        """
        text = said if isinstance(said, str) else self.text(said)
        return PARSERS[self.form](text, turn) if self.form else AssistantMessage(text)

    def prompt(
        self,
        messages: list[dict[str, Any]],
        place: str,
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
    ) -> Sequence[int]:
        """`render`, of a prompt of the data, which is kept while there is room (`KEPT_TOKENS`): `render` of the same
        messages and tools then has no more to do.

        Args:
            messages: The prompt.
            place: Its file and row, for the error.
            tools: What the environment's policy may call.
            most: One of more tokens is not kept, as it will not be played; None keeps all.

        Raises:
            UserError: The model has no such token.
        """
        given = json.dumps([messages, list(tools)])
        tokens = self._opening(given)
        if self.vocabulary is not None and (largest := max(tokens, default=0)) >= self.vocabulary:
            raise UserError(
                f"{place}: its token {largest} is not below config.json's vocab_size = {self.vocabulary}; the "
                f"tokenizer of model.path={self.path} is another model's, fetch it again"
            )
        key = _key(given)
        if key not in self._prompts and len(tokens) <= self._room and (most is None or len(tokens) <= most):
            self._prompts[key] = array("i", tokens)
            self._room -= len(tokens)
        return tokens

    def render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Sequence[int]:
        """Tokens of a conversation's first messages, up to where the policy begins to speak; not to be changed.

        Args:
            messages: The conversation.
            tools: What the policy may call, each as a chat template takes it.

        Raises:
            Refused: By the template.
        """
        given = json.dumps([messages, list(tools)])
        kept = self._prompts.get(_key(given))
        return self._first(given) if kept is None else kept

    def first(self, messages: list[dict[str, Any]]) -> Sequence[int]:
        """`render` without tools."""
        return self.render(messages)

    def _opening(self, given: str) -> list[int]:
        return self._encode(self._render(*json.loads(given)))

    def following(
        self, last: int, observations: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Tokens that stand between the policy's last token and its next turn.

        The template is rendered with a mark in place of the policy's words; what follows the mark closes the turn,
        brings the observations and opens the next turn. So nothing that the policy produced is ever tokenised again.
        Inside one message there is nothing to close or open: each observation is its own tokens.

        Args:
            last: The policy's last token. An end-of-turn token that it produced itself is not repeated.
            observations: The environment's messages.
            tools: As in the opening.

        Raises:
            Refused: By the template.
        """
        if self.one_message:
            return [token for message in observations for token in self._encode(self._broken(message["content"]))]
        text = self._continue(json.dumps([observations, list(tools)]))
        if last in self.stop_tokens:
            text = text.removeprefix(self.tokenizer.decode([last], skip_special_tokens=False))
        return self._encode(text)

    def _continuation(self, given: str) -> str:
        observations, tools = json.loads(given)
        text = self._render(
            [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}, *observations], tools
        )
        if MARK not in text:
            raise UserError(f"model.path={self.path}: the chat template leaves out what the assistant said before")
        return text[text.index(MARK) + len(MARK) :]

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The template's text, with a BREAK in every special token that a message or a tool spells."""
        plain = [{**self._broken_in(message), "role": message["role"]} for message in messages]
        shown = {"tools": self._broken_in(list(tools))} if tools else {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True, **shown, **self.options
            )
        except Exception as error:  # the template is a program of its own: it may divide by zero
            roles = ", ".join(message["role"] for message in messages)
            raise Refused(f"model.path={self.path}: the chat template refuses messages of {roles}: {error}") from error
        return text

    def _broken(self, content: str) -> str:
        """A BREAK behind the first character of every special token; one of a single character is left out."""
        singles = self.control.values()
        return self._spelled.sub(lambda found: BREAK if found[0] in singles else found[0] + BREAK, content)

    def _broken_in(self, value: Any) -> Any:
        """`_broken` of all texts in nested mappings and lists, the names of their entries included."""
        if isinstance(value, str):
            return self._broken(value)
        if isinstance(value, Mapping):
            return {self._broken(str(name)): self._broken_in(inner) for name, inner in value.items()}
        return [self._broken_in(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _encode(self, rendered: str) -> list[int]:
        """Tokens of a rendered text. Parts between BREAKs are tokenised each by itself, so that none spans one."""
        return [token for part in rendered.split(BREAK) for token in self.encode(part)]

    def text(self, tokens: Sequence[int]) -> str:
        """What the policy said, without the token that ended it."""
        own = tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens
        text: str = self.tokenizer.decode(list(own), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that has its special tokens written out."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _key(given: str) -> bytes:
    """Stands for messages and tools, given as JSON, in 16 bytes."""
    return hashlib.blake2b(given.encode(), digest_size=16).digest()


def one_message_refused(environment: str) -> str:
    """What to say of an environment with tools and `rollout.conversation: one_message`."""
    return (
        f"rollout.conversation = one_message: environment {environment} has tools, and their results are messages of "
        "their own; give rollout.conversation=messages"
    )


def _probe() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "."}}, "required": ["x"]}
    return {"type": "function", "function": {"name": PROBE, "description": ".", "parameters": parameters}}


def stop_tokens(path: str, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the tokenizer's, and those of generation_config.json (chat models often have two)."""
    found = {tokenizer.eos_token_id}
    file = Path(path) / "generation_config.json"
    if file.is_file():
        ids = json_object(file, "fetch it again").get("eos_token_id")
        listed = ids if isinstance(ids, list) else [ids]
        if not all(token is None or (type(token) is int and 0 <= token < 2**31) for token in listed):
            raise UserError(f"{file}: eos_token_id is {shown(ids)}; allowed is a token, or a list of tokens")
        found |= set(listed)
    return tuple(sorted(token for token in found if token is not None))


def control_tokens(tokenizer: Any, stop: tuple[int, ...]) -> dict[int, str]:
    """Id → text of the tokens that only a template may write: those that are marked special, and those that end a
    turn."""
    added = {
        token: added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special or token in stop
    }
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
