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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from skyrl_mega.config.derived import length_limit
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.safe_read import Malformed
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.config.values import shown
from skyrl_mega.envs.tool_calls import PARSERS, AssistantMessage, calls_of, form_of
from skyrl_mega.hf_checkpoint.tokenizer import load
from skyrl_mega.rollout.chat_template import ChatTemplate, Refused
from skyrl_mega.rollout.end_of_turn import control_tokens, ends_of

MARK = "0assistant0turn0"
"""Stands for the policy's words while a template is rendered; plain, so that no template changes it."""
PROBE = "a_tool_to_look_for"
"""The name of a tool that a template is asked to show."""
SPOKEN = ({"role": "user", "content": "."}, {"role": "assistant", "content": MARK})
"""A conversation in which the policy has spoken."""
BREAK = "\ufdd0"
"""Where a rendered text is cut before it is tokenised. Unicode keeps this code point free of any character."""
LONG = 32
"""Characters a token, above which a text may be one of those that no sequence has room for."""
COMPOSED = 4
"""Characters that a tokenizer may make one of before it looks for tokens (Unicode's composed forms)."""
KEPT_TOKENS = 2**26
"""Tokens of the data's prompts that are kept, 4 bytes each. What comes after them is rendered again when it is played.
"""


class TooLong(UserError):
    """A text of which one can say without tokenising it that no sequence holds it.

    Args:
        tokens: The fewest that it could have.
        most: Those of a sequence.
    """

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"rollout.max_length = {most}: a text has at least {tokens} tokens; give it room, or leave the text out"
        )
        self.tokens = tokens


class Renderer:
    """A model's tokenizer and chat template.

    Args:
        path: Hugging Face directory.
        rollout: How conversations are rendered; None takes the defaults.

    Raises:
        UserError: There is no tokenizer that keeps all text, it has no chat template, or nothing ends a turn.
    """

    def __init__(self, path: str, rollout: RolloutConfig | None = None) -> None:
        rollout = rollout or RolloutConfig()
        self.one_message = rollout.conversation == "one_message"
        """Whether all that follows the first messages is inside one message of the assistant."""

        self.tokenizer: Any = load(Path(path), "model.path")
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
        self.template = ChatTemplate(path, self.tokenizer, self.options)
        self.longest = length_limit(rollout)
        """Tokens of a sequence at most."""
        self.stop_tokens, self.end = ends_of(path, self.tokenizer, self._closing())
        self.control = control_tokens(self.tokenizer, self.stop_tokens)
        spelled = "|".join(map(re.escape, sorted(self.control.values(), key=len, reverse=True))) or "(?!)"
        self._spelled = re.compile(f"(?=(?:{spelled})).", re.DOTALL)
        self._written = re.compile(spelled)
        unknown = self.tokenizer.unk_token_id
        self._unknown = None if unknown in self.stop_tokens else unknown
        """Stands for characters that the tokenizer does not know, and makes no turn."""
        self._prompts: dict[bytes, array[int]] = {}
        """Openings of the data's prompts, int32, by `_key`."""
        self._room = KEPT_TOKENS
        """Tokens that there is room for in `_prompts`."""
        self._first = lru_cache(maxsize=4096)(self._opening)
        self._continue = lru_cache(maxsize=4096)(self._continuation)
        if MARK not in self.template.render([{"role": "user", "content": MARK}]):
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
        shown = PROBE in self.template.render([{"role": "user", "content": "."}], [_probe()])
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
    ) -> Sequence[int] | None:
        """Returns `render` of a prompt of the data; None where that has more than `most` tokens. It is kept while there
        is room (`KEPT_TOKENS`): `render` of the same messages and tools then has no more to do.

        Args:
            messages: The prompt.
            place: Its file and row, for the error.
            tools: What the environment's policy may call.
            most: Tokens of a prompt that will be played; None plays all.

        Raises:
            UserError: The model has no such token.
        """
        given = json.dumps([messages, list(tools)])
        try:
            tokens = self._opening(given)
        except TooLong:
            return None
        if most is not None and len(tokens) > most:
            return None
        if self.vocabulary is not None and (largest := max(tokens, default=0)) >= self.vocabulary:
            raise UserError(
                f"{place}: its token {largest} is not below config.json's vocab_size = {self.vocabulary}; the "
                f"tokenizer of model.path={self.path} is another model's, fetch it again"
            )
        key = _key(given)
        if key not in self._prompts and len(tokens) <= self._room:
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
            TooLong: No sequence has room for it.
        """
        given = json.dumps([messages, list(tools)])
        kept = self._prompts.get(_key(given))
        return self._first(given) if kept is None else kept

    def first(self, messages: list[dict[str, Any]]) -> Sequence[int]:
        """`render` without tools."""
        return self.render(messages)

    def turn(self, message: Mapping[str, Any], *, ends: bool = True) -> list[int]:
        """Returns a turn of the assistant as the policy has to say it: its words as they are, its tool calls and the
        end of the turn as the chat template writes them.

        Args:
            message: The assistant's.
            ends: The turn's end token is a part of it.

        Raises:
            UserError: The template does not write the message's tool calls.
            TooLong: No sequence has room for it.
        """
        words, calls = self._broken(message["content"]), calls_of(message)
        if calls:
            asked, said = {"role": "user", "content": "."}, {**message, "content": MARK, "tool_calls": calls}
            text = self._render([asked, said], generation=False)
            written = text.partition(MARK)[2].partition(self._decode([self.end]))[0]
            # Templates put a line break between words and calls, and none where there are no words.
            words += written if words else written.lstrip()
            found = self.parse(words.replace(BREAK, "")).tool_calls[-len(calls) :]
            asked_for = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
            if [(call.name, call.arguments) for call in found] != asked_for:
                raise UserError(
                    f"model.path={self.path}: the chat template does not write the tool_calls of a demonstration so "
                    f"that they can be read again ({shown(asked_for)} became {shown(written)}); allowed is a template "
                    f"that has tools called in one of the forms {', '.join(PARSERS)}, or calls in the content"
                )
        return [*self._encode(words), *([self.end] if ends else [])]

    def _closing(self) -> str:
        """Returns what the template writes behind the assistant's words; nothing where it refuses such messages."""
        try:
            text = self.template.render(SPOKEN, generation=False)
        except Refused:
            return ""
        return text.partition(MARK)[2]

    def _opening(self, given: str) -> list[int]:
        return self._tokens(*json.loads(given))

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
            return [token for message in observations for token in self._words(message["content"])]
        return self._continue(json.dumps([observations, list(tools)]), last if last in self.stop_tokens else None)

    def _continuation(self, given: str, ended: int | None) -> list[int]:
        observations, tools = json.loads(given)
        end = "" if ended is None else self._decode([ended])

        def cut(text: str) -> str:
            before, mark, text = text.partition(MARK)
            if not mark:
                raise UserError(f"model.path={self.path}: the chat template leaves out what the assistant said before")
            before, _, after = text.partition(end) if end else (text, "", "")
            return text if before.strip() else after  # some templates put a space before the end token

        return self._tokens([*SPOKEN, *observations], tools, cut)

    def _tokens(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], cut: Callable[[str], str] = str
    ) -> list[int]:
        """Returns the tokens of a conversation as the template writes it, or of the part that `cut` leaves of its text.

        A tokenizer that normalises text reads a control token out of other characters (`<|IM_END|>`) too. Where there
        are more control tokens than the text has, the messages that spell them are tokenised letter by letter.
        """
        text = cut(self._render(messages, tools))
        tokens = self._encode(text)
        if self._is_forged(text, tokens):
            tokens = self._encode(cut(self._render(messages, tools, by_letters=True)))
        return tokens

    def _words(self, content: str) -> list[int]:
        """Returns the tokens of a text in which no control token is meant."""
        text = self._broken(content)
        tokens = self._encode(text)
        return self._encode(self._broken(content, by_letters=True)) if self._is_forged(text, tokens) else tokens

    def _is_forged(self, text: str, tokens: Sequence[int]) -> bool:
        """Returns True if there are control tokens among a text's that are not written in it."""
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
        """Returns the template's text, with a BREAK in every special token that a message or a tool spells."""

        def plain(message: Mapping[str, Any]) -> dict[str, Any]:
            try:
                calls = calls_of(message)
            except Malformed as error:
                raise Refused(f"a message's tool_calls: {error}") from error
            readable = {**message, "tool_calls": calls} if calls else message
            return {**self._broken_in(readable, by_letters), "role": message["role"]}

        shown = self._broken_in(list(tools), by_letters)
        return self.template.render([plain(message) for message in messages], shown, generation=generation)

    def _broken(self, content: str, by_letters: bool = False) -> str:
        """Returns a text with a BREAK behind the first character of every special token; one of a single character is
        left out. With `by_letters` a text that still has some has a BREAK behind every character."""
        singles = self.control.values()
        text = self._spelled.sub(lambda found: BREAK if found[0] in singles else found[0] + BREAK, content)
        if by_letters and self._is_forged("", self._encode(text)):
            text = BREAK.join(letter for letter in content if not self._is_forged("", self.encode(letter)))
        return text

    def _broken_in(self, value: Any, by_letters: bool = False) -> Any:
        """Returns nested mappings and lists with `_broken` of all texts, the names of their entries included."""
        if isinstance(value, str):
            return self._broken(value, by_letters)
        if isinstance(value, Mapping):
            return {self._broken(str(name)): self._broken_in(inner, by_letters) for name, inner in value.items()}
        return [self._broken_in(inner, by_letters) for inner in value] if isinstance(value, list | tuple) else value

    def _encode(self, rendered: str) -> list[int]:
        """Returns the tokens of a rendered text. Parts between BREAKs are tokenised each by itself, so that none spans
        one. TooLong where no sequence has room for it: a text of hundreds of megabytes takes minutes."""
        if len(rendered) > LONG * self.longest and (fewest := len(rendered) // self._widest) > self.longest:
            raise TooLong(fewest, self.longest)
        return [token for part in rendered.split(BREAK) for token in self.encode(part)]

    @cached_property
    def _widest(self) -> int:
        """Characters of a text that one token can stand for at most."""
        return COMPOSED * max(map(len, self.tokenizer.get_vocab()))

    def text(self, tokens: Sequence[int]) -> str:
        """What the policy said, without the token that ended it."""
        own = tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens
        return self._decode(own)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
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
