"""Passwords and tokens among settings: whoever writes settings where others may read them writes these masked.

A secret that a setting takes from the environment is written as it was taken, `${oc.env:NAME}`, so that the settings
can be given again; a password or a token that stands in the settings themselves becomes `***`, which nobody can give
again. Whatever else comes from the environment is an ordinary value, and written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
ENV = re.compile(r"oc\.env:\s*([^,}\s]+)")
NAMED = re.compile(
    r"(?:^|[_.-])(?:(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)token|secret|passwo?r?d|passwd|passphrase|pwd|auth"
    r"|(?:db|database|user|root|admin|mail|smtp|mysql|postgres|pg|redis|proxy|http|ssh)_pass"
    r"|authori[sz]ation|credentials?|cookie|bearer|apikey|(?:api|access|secret|private|auth|wandb)_?key)$",
    re.IGNORECASE,
)
"""Names of variables and options that hold a secret; `max_tokens`, `eos_token`, `two_pass` and `answer_key` do not."""
TOKENS = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|^[0-9a-f]{40}$"
)
"""The forms that providers give their tokens. 40 hexadecimal digits are Weights & Biases'; within a path, a commit."""
IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""What stands before a host."""
SHORT = 8
"""Characters below which a secret may as well be a word of any line, and is looked for only where a value is shown."""
LITERAL = "rollout.sampling.stop"
"""A setting in which three stars mean three stars."""

_written: dict[str, tuple[str, str]] = {}
"""Key → what was written there and what it stands for, where a setting has a secret from the environment."""
_taken: dict[str, str] = {}
"""Secret → the interpolation that it came from."""


def note(settings: Any) -> None:
    """Remembers the secrets that settings, as written, take from the environment, before anything is made of them."""
    for key, raw in leaves(settings):
        for name in ENV.findall(raw) if isinstance(raw, str) else ():
            value = os.environ.get(name)
            before_host = any(f"oc.env:{name}" in part for part in IN_URL.findall(raw))
            if value and (_is_named(name) or _is_named(key) or before_host or _has_form(value)):
                _taken[value] = f"${{oc.env:{name}}}"


def note_resolved(settings: Any, resolved: Any) -> None:
    """Remembers, of the same settings, what is to be written in place of what they stand for."""
    _written.clear()
    values = dict(leaves(resolved))
    for key, raw in leaves(settings):
        value = values.get(key)
        if not isinstance(raw, str) or "${" not in raw or raw == value:
            continue
        if isinstance(value, str) and any(part in value for part in _taken):
            _written[key] = raw, value
        elif "oc.env" in raw and not isinstance(value, str):  # a number: nothing that hides
            for name in ENV.findall(raw):
                _taken.pop(os.environ.get(name, ""), None)


def still_masked(settings: Any) -> tuple[str, str] | None:
    """Key and value of a secret that was masked when settings were written, and not given again."""
    for key, value in leaves(settings):
        in_url = isinstance(value, str) and f"://{MASK}@" in value
        if (value == MASK or in_url) and not key.startswith(LITERAL):
            return key, value
    return None


def masked(value: Any, key: str = "") -> Any:
    """Settings, or one of them, without secrets.

    Args:
        value: Mappings, lists and values.
        key: The key that it stands under, dotted from the top.
    """
    if isinstance(value, Mapping):
        return {name: masked(inner, _below(key, name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, _below(key, place)) for place, inner in enumerate(value)]
    if not isinstance(value, str) or not value:
        return value
    raw, resolved = _written.get(key, ("", None))
    if value == resolved:
        return IN_URL.sub(lambda found: _but_taken(found[0]), raw)
    if _is_named(key):
        return value if _only_taken(value) else MASK
    if TOKENS.search(value):
        return MASK
    return hidden(IN_URL.sub(lambda found: _but_taken(found[0]), value))


def hidden(text: str, short: bool = False) -> str:
    """A text in which no secret stands that settings took from the environment.

    Args:
        text: For people.
        short: Short secrets too, where they are words: for a text that shows a setting's value, and little else.
    """
    for value in sorted(_taken, key=len, reverse=True):
        if len(value) >= SHORT:
            text = text.replace(value, _taken[value])
        elif short:
            text = _taken[value].join(re.split(rf"(?<!\w){re.escape(value)}(?!\w)", text))
    return text


def all_hidden(value: Any) -> Any:
    """`hidden`, of every text in mappings and lists."""
    if isinstance(value, Mapping):
        return {name: all_hidden(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [all_hidden(inner) for inner in value]
    return hidden(value) if isinstance(value, str) else value


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in mappings and lists."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, _below(key, name))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from leaves(inner, _below(key, place))
    else:
        yield key, value


def _below(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _is_named(name: str) -> bool:
    """Whether a variable or a key, also one within a list, has the name of a secret."""
    return bool(NAMED.search(_words(re.sub(r"(\.\d+)+$", "", name))))


def _has_form(value: str) -> bool:
    """Whether a value looks like a token, or is an address with a password."""
    return bool(TOKENS.search(value) or IN_URL.search(value))


def _words(name: str) -> str:
    """dbPass → db_Pass."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)


def _only_taken(text: str) -> bool:
    return bool(re.fullmatch(r"(?:\w+\s+)?\$\{oc\.env:[^}]*\}", text))


def _but_taken(text: str) -> str:
    """What stands before a host, where it is not from the environment altogether."""
    return text if re.fullmatch(r"(?:[\w.-]+:)?(?:\$\{oc\.env:[^}]*\}:?)+", text) else MASK
