"""Passwords and tokens among settings: whoever writes settings where others may read them writes these masked.

A secret that a setting takes from the environment is written as it was taken, `${oc.env:NAME}`, so that the settings
can be given again; a password or a token that stands in the settings themselves becomes `***`, which nobody can give
again. Whatever else comes from the environment is an ordinary value, and written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skyrl_mega.config.secret_names import MASK, USER, hide_in_text, is_option, is_secret, names_secret, secret_spans

ENV = re.compile(r"oc\.env:\s*([^,}\s]+)")
REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
"""A setting that another one interpolates."""
TOKENS = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|nvapi-[\w-]{20,}|gsk_\w{20,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|^[0-9a-f]{40}$"
)
"""The forms that providers give their tokens. 40 hexadecimal digits are Weights & Biases'; within a path, a commit."""
SHORT = 8
"""Characters below which a secret may as well be a word of any line, and is looked for only where a value is shown."""
LITERAL = "rollout.sampling.stop"
"""A setting in which three stars mean three stars."""

_written: dict[str, tuple[str, str]] = {}
"""Key → what was written there and what it stands for, where a setting has a secret from the environment."""
_taken: dict[str, str] = {}
"""Secret → the interpolation that it came from."""
_literal: set[str] = set()
"""Secrets that stand in the settings themselves."""


def note_literal(given: Iterable[tuple[str, Any]]) -> None:
    """Remembers the secrets that settings hold literally, before an error can repeat one.

    Args:
        given: Dotted keys and values as they were given, mappings and lists included.
    """
    _literal.clear()
    for top, tree in given:
        for key, value in leaves(tree, top):
            if is_secret(key, value) and "${" not in str(value) and value != MASK:
                _literal.add(str(value))


def note(settings: Any) -> None:
    """Remembers the secrets that settings, as written, take from the environment, before anything is made of them."""
    for key, raw in leaves(settings):
        for name in ENV.findall(raw) if isinstance(raw, str) else ():
            value = os.environ.get(name)
            hides = any(f"oc.env:{name}" in part for part in (*USER.findall(raw), *_paired(raw)))
            if value and (names_secret(name) or is_secret(key, raw) or hides or _has_form(value)):
                _taken[value] = f"${{oc.env:{name}}}"


def note_resolved(settings: Any, resolved: Any) -> None:
    """Remembers, of the same settings, what is to be written in place of what they stand for."""
    _written.clear()
    values = dict(leaves(resolved))
    for key, raw in leaves(settings):
        value = values.get(key)
        if not isinstance(raw, str) or "${" not in raw or raw == value:
            continue
        if isinstance(value, str) and (any(part in value for part in _taken) or _is_of_literal(raw, value)):
            _written[key] = raw, value
        elif "oc.env" in raw and not isinstance(value, str):  # a number: nothing that hides
            for name in ENV.findall(raw):
                _taken.pop(os.environ.get(name, ""), None)


def still_masked(settings: Any) -> tuple[str, str] | None:
    """Key and value of a secret that was masked when settings were written, and not given again."""
    for key, value in leaves(settings):
        if key.startswith(LITERAL) or not isinstance(value, str):
            continue
        if value == MASK or f"://{MASK}@" in value or MASK in _paired(value):
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
        parts = [masked(inner, _below(key, place)) for place, inner in enumerate(value)]
        after_option = [False, *map(is_option, value)]
        return [
            MASK if hide and isinstance(part, str) else part for hide, part in zip(after_option, parts, strict=False)
        ]
    if is_secret(key, value) and not isinstance(value, str):
        return MASK
    if not isinstance(value, str) or not value:
        return value
    raw, resolved = _written.get(key, ("", None))
    if value == resolved:
        return hide_in_text(raw)
    if key.startswith(LITERAL):
        return hidden(value)
    if is_secret(key, value):
        return value if _only_taken(value) else MASK
    if TOKENS.search(value) or any(len(secret) >= SHORT and secret in value for secret in _literal):
        return MASK
    return hidden(hide_in_text(value))


def hidden(text: str, short: bool = False) -> str:
    """A text in which no secret of the settings stands.

    Args:
        text: For people.
        short: Short secrets too, where they are words: for a text that shows a setting's value, and little else.
    """
    for value in sorted(_taken, key=len, reverse=True):
        if len(value) >= SHORT:
            text = text.replace(value, _taken[value])
        elif short:
            text = _taken[value].join(re.split(rf"(?<!\w){re.escape(value)}(?!\w)", text))
    for value in sorted(_literal, key=len, reverse=True):
        if len(value) >= SHORT:
            text = text.replace(value, MASK)
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


def _has_form(value: str) -> bool:
    """Whether a value looks like a token, or is an address with a password."""
    return bool(TOKENS.search(value) or USER.search(value))


def _paired(text: str) -> list[str]:
    """Returns the values of a text that stand behind the name of a secret."""
    return [text[start:end] for start, end in secret_spans(text)]


def _is_of_literal(raw: str, value: str) -> bool:
    """True if a value that was interpolated is, or holds, a secret of another setting."""
    named = any(is_secret(key, value) for key in REFERENCE.findall(raw))
    return named or value in _literal or any(len(secret) >= SHORT and secret in value for secret in _literal)


def _only_taken(text: str) -> bool:
    return bool(re.fullmatch(r"(?:\w+\s+)?\$\{oc\.env:[^}]*\}", text))
