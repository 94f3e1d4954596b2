"""Conversion between messages and tokens. The chat template is applied once to the first messages, and afterwards only
to new messages.

A message is plain text. A special token spelled in a message (such as `<|im_end|>` in a web page) is tokenised as
ordinary characters: only the template creates turns.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed
from skyrl_mega.common.values import shown
from skyrl_mega.config.derived import length_limit
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.envs.tool_calls import PARSERS, AssistantMessage, calls_of, form_of
from skyrl_mega.hf_checkpoint.tokenizer import load
from skyrl_mega.rollout.agent.chat_template import ChatTemplate, TemplateError
from skyrl_mega.rollout.agent.end_of_turn import control_tokens, ends_of

MARK = "0assistant0turn0"
"""Placeholder for the policy's words while a template is rendered; plain text, so no template changes it."""
PROBE = "a_tool_to_look_for"
"""Name of a tool used to test if a template shows tools."""
SPOKEN = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})
"""A conversation with an answer of the policy."""
BREAK = "\ufdd0"
"""Marks a cut in a rendered text before tokenisation. Unicode guarantees that this code point is never a character."""
LONG = 32
"""Characters per token above which a text may be too long for any sequence."""
COMPOSED = 4
"""Most characters merged into a single character by a tokenizer's normalisation (Unicode's composed forms)."""
KEPT_TOKENS = 2**26
"""Most prompt tokens cached, at 4 bytes each. Further prompts are rendered again at each use."""


class TooLong(UserError):
    """A text so long that it surely has more tokens than a sequence may have, found without tokenising.

    Args:
        tokens: Lower bound of the number of tokens.
        most: Most tokens of a sequence.
    """

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"rollout.max_length = {most}: a text has at least {tokens} tokens; give a larger limit, or leave "
            "the text out"
        )
        self.tokens = tokens


class Renderer:
    """A model's tokenizer and chat template.

    Args:
        path: Hugging Face directory.
        rollout: Settings for rendering conversations; None takes the defaults.

    Raises:
        UserError: There is no lossless tokenizer, no chat template, or no token that ends a turn.
    """

    def __init__(self, path: str, rollout: RolloutConfig | None = None) -> None:
        rollout = rollout or RolloutConfig()
        self.one_message = rollout.conversation == "one_message"
        """True if everything after the first messages forms one assistant message."""

        self.tokenizer: Any = load(Path(path), "model.path")
        if not self.tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template; add chat_template.jinja there", key="model.path", value=path
            )
        self.form = form_of(str(self.tokenizer.chat_template))
        """Format of tool calls in the template; None if unknown."""
        self.options = rollout.chat_template_options
        """Further variables of the template."""
        for name in self.options:
            if not re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)):
                raise UserError(
                    f"the chat template of model.path={path} has no such variable",
                    key=f"rollout.chat_template_options.{name}",
                    value=shown(self.options[name]),
                    fix="fix the name, or leave it out",
                )
        self.path = path
        self.vocabulary: int | None = None
        """The model's `vocab_size`, set by `check_vocabulary`."""
        self.template = ChatTemplate(path, self.tokenizer, self.options)
        self.longest = length_limit(rollout)
        """Most tokens of a sequence."""
        self.stop_tokens, self.end = ends_of(path, self.tokenizer, self._closing())
        self.control = control_tokens(self.tokenizer, self.stop_tokens)
        spelled = "|".join(map(re.escape, sorted(self.control.values(), key=len, reverse=True))) or "(?!)"
        self._spelled = re.compile(f"(?=(?:{spelled})).", re.DOTALL)
        self._written = re.compile(spelled)
        unknown = self.tokenizer.unk_token_id
        self._unknown = None if unknown in self.stop_tokens else unknown
        """Token for characters unknown to the tokenizer; None if the token ends a turn."""
        self._prompts: dict[bytes, array[int]] = {}
        """`_key` → tokens of a rendered prompt of the data, int32."""
        self._free = KEPT_TOKENS
        """Tokens still free in `_prompts`."""
        self._first = lru_cache(maxsize=4096)(self._opening)
        self._continue = lru_cache(maxsize=4096)(self._continuation)
        if MARK not in self.template.render([{"role": "user", "content": MARK}]):
            raise UserError("the chat template leaves out what the user says; fix it", key="model.path", value=path)

    def check_vocabulary(self, size: int) -> None:
        """Sets the size of the model's vocabulary, for the checks of later `prompt` calls. Raises an error unless the
        model can produce every token that ends a turn.

        Args:
            size: The model's `vocab_size`.

        Raises:
            UserError: An end-of-turn token is outside the vocabulary.
        """
        self.vocabulary = size
        if beyond := [token for token in self.stop_tokens if token >= size]:
            raise UserError(
                f"the end-of-turn token {beyond[0]} is not below config.json's vocab_size = {size}"
                "; the tokenizer (generation_config.json) is another model's, fetch it again",
                key="model.path",
                value=self.path,
            )

    def check_tools(self, environment: str) -> None:
        """Raises an error unless the chat template shows tools and writes tool calls in a known format.

        Args:
            environment: Name of the environment, for the error.

        Raises:
            UserError: The template rejects or does not show tools, or the format of tool calls is unknown, or
                `rollout.conversation: one_message` is set.
        """
        if self.one_message:
            raise UserError(one_message_refused(environment))
        if self.tools_refused:
            raise UserError(
                f"environment {environment} has tools, and the chat template {self.tools_refused}; allowed is a "
                "template that takes `tools` and has them called in one of the forms "
                f"{', '.join(PARSERS)}",
                key="model.path",
                value=self.path,
            )

    @cached_property
    def tools_refused(self) -> str | None:
        """The reason for which the chat template cannot offer tools, after the words "the chat template"; None if it
        can. Raises TemplateError if the template rejects a tool."""
        if PROBE not in self.template.render([{"role": "user", "content": "."}], [_probe()]):
            return "shows no tools"
        return None if self.form else "writes calls in a form that is not known"

    def parse(self, answer: Sequence[int] | str, turn: int = 1) -> AssistantMessage:
        """Returns the policy's answer with the tool calls parsed in the template's format, or without calls if the
        template has no known format. An unreadable call becomes a `ToolCall` with `error`.

        Args:
            answer: Tokens or text of the answer.
            turn: Number of the turn, used to make the ids of the calls unique.
        """
        text = answer if isinstance(answer, str) else self.text(answer)
        return PARSERS[self.form](text, turn) if self.form else AssistantMessage(text)

    def prompt(
        self,
        messages: list[dict[str, Any]],
        place: str,
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
    ) -> Sequence[int] | None:
        """Returns the tokens of a prompt of the data, as `render` does, or None if the prompt has more than `most`
        tokens, or is a text so long that it surely has more tokens than a sequence may have. The result is cached
        within `KEPT_TOKENS`, so that `render` of the same messages and tools is free.

        Args:
            messages: The prompt.
            place: File and row of the prompt, for the error.
            tools: Tools offered by the environment.
            most: Most tokens of a usable prompt; None sets no limit.

        Raises:
            TemplateError: The template rejects the messages.
            UserError: A token is outside the model's vocabulary.
        """
        conversation = json.dumps([messages, list(tools)])
        try:
            tokens = self._opening(conversation)
        except TooLong:
            return None
        if most is not None and len(tokens) > most:
            return None
        if self.vocabulary is not None and (largest := max(tokens, default=0)) >= self.vocabulary:
            raise UserError(
                f"its token {largest} is not below config.json's vocab_size = {self.vocabulary}; "
                f"the tokenizer of model.path={self.path} is another model's, fetch it again",
                key=place,
            )
        key = _key(conversation)
        if key not in self._prompts and len(tokens) <= self._free:
            self._prompts[key] = array("i", tokens)
            self._free -= len(tokens)
        return tokens

    def render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, cached: bool = True
    ) -> Sequence[int]:
        """Returns the tokens of a conversation's first messages, up to the point at which the policy generates. Do not
        modify the result.

        Args:
            messages: The conversation.
            tools: Tools offered to the policy, in the format of chat templates.
            cached: True to keep the result for the next call with the same messages and tools.

        Raises:
            TemplateError: The template rejects the messages.
            TooLong: The text is so long that it surely has more tokens than a sequence may have.
        """
        conversation = json.dumps([messages, list(tools)])
        if (kept := self._prompts.get(_key(conversation))) is not None:
            return kept
        return self._first(conversation) if cached else self._opening(conversation)

    def first(self, messages: list[dict[str, Any]]) -> Sequence[int]:
        """Returns the tokens of a conversation's first messages, without tools, up to the point at which the policy
        generates. Do not modify the result. Raises TemplateError or TooLong as `render` does."""
        return self.render(messages)

    def turn(self, message: Mapping[str, Any], *, ends: bool = True) -> list[int]:
        """Returns the tokens of an assistant message as the policy should produce them: the content, then the tool
        calls and the end of the turn as written by the chat template.

        Args:
            message: The assistant message; `content` is a str, also if empty.
            ends: True to end with the token that ends a turn.

        Raises:
            UserError: The template rejects the message, or does not write the tool calls so that they can be parsed.
            Malformed: `tool_calls` is invalid.
            TooLong: The text surely has more tokens than `rollout.max_length`; shorter texts are not checked.
        """
        words, calls = self._broken(message["content"]), calls_of(message)
        if calls:
            question, message_with_mark = (
                {"role": "user", "content": "."},
                {**message, "content": MARK, "tool_calls": calls},
            )
            text = self._render([question, message_with_mark], generation=False)
            written = text.partition(MARK)[2].partition(self._decode([self.end]))[0]
            # Templates put a line break between words and calls, but none before a call without words.
            words += written if words else written.lstrip()
            parsed = self.parse(words.replace(BREAK, "")).tool_calls[-len(calls) :]
            asked_for = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            if [(call.name, call.arguments) for call in parsed] != asked_for:
                raise UserError(
                    "the chat template does not write the tool_calls of a demonstration so that "
                    f"they can be read again ({shown(asked_for)} became {shown(written)}); "
                    "allowed is a template that has tools called in one of the forms "
                    f"{', '.join(PARSERS)}, or calls in the content",
                    key="model.path",
                    value=self.path,
                )
        return [*self._encode(words), *([self.end] if ends else [])]

    def _closing(self) -> str:
        """Returns the text written by the template after the assistant's words; empty if the template rejects such
        messages."""
        try:
            text = self.template.render(SPOKEN, generation=False)
        except TemplateError:
            return ""
        return text.partition(MARK)[2]

    def _opening(self, conversation: str) -> list[int]:
        return self._tokens(*json.loads(conversation))

    def following(
        self,
        last: int,
        observations: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        cached: bool = True,
    ) -> list[int]:
        """Returns the tokens between the policy's last token and the next turn. Do not modify the result.

        The template is rendered with a mark in place of the policy's words. The text after the mark closes the turn,
        contains the observations and opens the next turn. So no token of the policy is ever tokenised again. With
        `rollout.conversation: one_message` there is nothing to close or open: each observation is tokenised separately.

        Args:
            last: The policy's last token. An end-of-turn token produced by the policy is not repeated.
            observations: Messages of the environment.
            tools: Tools given to `render`.
            cached: True to keep the result for the next call with the same messages and tools.

        Raises:
            TemplateError: The template rejects the messages.
            TooLong: The text is so long that it surely has more tokens than a sequence may have.
            UserError: The template leaves out the assistant's words.
        """
        if self.one_message:
            return [token for message in observations for token in self._words(message["content"])]
        conversation, ended = json.dumps([observations, list(tools)]), last if last in self.stop_tokens else None
        return self._continue(conversation, ended) if cached else self._continuation(conversation, ended)

    def _continuation(self, conversation: str, ended: int | None) -> list[int]:
        observations, tools = json.loads(conversation)
        end = "" if ended is None else self._decode([ended])

        def cut(text: str) -> str:
            before, mark, text = text.partition(MARK)
            if not mark:
                raise UserError(
                    "the chat template leaves out earlier messages of the assistant",
                    key="model.path",
                    value=self.path,
                    fix="take a model with a chat template that shows all messages",
                )
            before, _, after = text.partition(end) if end else (text, "", "")
            return text if before.strip() else after  # -

        return self._tokens([*SPOKEN, *observations], tools, cut)

    def _tokens(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], cut: Callable[[str], str] = str
    ) -> list[int]:
        """Returns the tokens of a conversation as written by the template, or of the part of the text selected by
        `cut`.

        A normalising tokenizer may read a control token from other characters (`<|IM_END|>`). If there are more control
        tokens than the text contains, such messages are tokenised letter by letter.
        """
        text = cut(self._render(messages, tools))
        tokens = self._encode(text)
        if self._is_forged(text, tokens):
            tokens = self._encode(cut(self._render(messages, tools, by_letters=True)))
        return tokens

    def _words(self, content: str) -> list[int]:
        """Returns the tokens of a text without any control token."""
        text = self._broken(content)
        tokens = self._encode(text)
        return self._encode(self._broken(content, by_letters=True)) if self._is_forged(text, tokens) else tokens

    def _is_forged(self, text: str, tokens: Sequence[int]) -> bool:
        """Returns True if the tokens contain more control tokens than the text."""
        control = Counter(token for token in tokens if token in self.control and token != self._unknown)
        if not control:
            return False
        written = Counter(self._written.findall(text))
        return any(count > written[self.control[token]] for token, count in control.items())

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool = True,
        by_letters: bool = False,
    ) -> str:
        """Returns the template's text, with a BREAK inside every special token spelled by a message or a tool."""

        def plain(message: Mapping[str, Any]) -> dict[str, Any]:
            try:
                calls = calls_of(message)
            except Malformed as error:
                raise TemplateError(f"a message of role {message['role']} has invalid tool_calls: {error}") from error
            readable = {**message, "tool_calls": calls} if calls else message
            return {**self._broken_in(readable, by_letters), "role": message["role"]}

        shown = self._broken_in(list(tools), by_letters)
        return self.template.render([plain(message) for message in messages], shown, generation=generation)

    def _broken(self, content: str, by_letters: bool = False) -> str:
        """Returns a text with a BREAK after the first character of every special token; special tokens of a single
        character are dropped. With `by_letters`, a text that still contains control tokens gets a BREAK after every
        character."""
        singles = self.control.values()
        text = self._spelled.sub(lambda match: BREAK if match[0] in singles else match[0] + BREAK, content)
        if by_letters and self._is_forged("", self._encode(text)):
            text = BREAK.join(letter for letter in content if not self._is_forged("", self.encode(letter)))
        return text

    def _broken_in(self, value: Any, by_letters: bool = False) -> Any:
        """Applies `_broken` to all texts in nested mappings and lists, including the keys."""
        if isinstance(value, str):
            return self._broken(value, by_letters)
        if isinstance(value, Mapping):
            return {self._broken(str(name)): self._broken_in(inner, by_letters) for name, inner in value.items()}
        return [self._broken_in(inner, by_letters) for inner in value] if isinstance(value, list | tuple) else value

    def _encode(self, rendered: str) -> list[int]:
        """Returns the tokens of a rendered text. Parts between BREAKs are tokenised separately, so that no token spans
        a BREAK. Raises TooLong early for a text too long for any sequence, as hundreds of megabytes take minutes."""
        if len(rendered) > LONG * self.longest and (fewest := len(rendered) // self._widest) > self.longest:
            raise TooLong(fewest, self.longest)
        return [token for part in rendered.split(BREAK) for token in self.encode(part)]

    @cached_property
    def _widest(self) -> int:
        """Most characters of text covered by a token."""
        return COMPOSED * max(map(len, self.tokenizer.get_vocab()))

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of a turn's tokens, without the end-of-turn token if the last token is one. Special tokens
        are written out."""
        tokens_said = tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens
        return self._decode(tokens_said)

    def _decode(self, tokens: Sequence[int]) -> str:
        ids = np.asarray(tokens, np.int64)  # transformers inspects a list token by token
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text. A special token spelled in the text becomes the special token; nothing is added
        at the ends. For texts from outside use `render`."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _key(conversation: str) -> bytes:
    """Returns a 16-byte hash of messages and tools given as JSON."""
    return hashlib.blake2b(conversation.encode(), digest_size=16).digest()


def one_message_refused(environment: str) -> str:
    """Returns the error text for an environment with tools and `rollout.conversation: one_message`."""
    return (
        f"rollout.conversation = one_message: environment {environment} has tools, and their results are messages of "
        "their own; give rollout.conversation=messages"
    )


def _probe() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "description": "."}}, "required": ["x"]}
    return {"type": "function", "function": {"name": PROBE, "description": ".", "parameters": parameters}}
