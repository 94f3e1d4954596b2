"""Masking of passwords and tokens in settings, for every output readable by other people.

A secret taken from the environment is written as a reference, `${oc.env:NAME}`, so that written settings can be used
again. A secret literally present in the settings becomes `***`, and must be given again. Other values from the
environment are ordinary values and are written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skyrl_mega.common.secret_names import MASK, USER, hide_in_text, is_option, is_secret, names_secret, secret_spans

ENV = re.compile(r"oc\.env:\s*([^,}\s]+)")
REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
"""An interpolation of another setting."""
TOKENS = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|nvapi-[\w-]{20,}|gsk_\w{20,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|^[0-9a-f]{40}$"
)
"""Token formats of providers. 40 hexadecimal digits are a Weights & Biases key; inside a path, a commit."""
SHORT = 8
"""Minimum length of secrets masked in any text. A shorter secret may equal an ordinary word and is masked only next to
a setting's value."""
LITERAL = "rollout.sampling.stop"
"""A setting in which `***` is literal text, not a masked secret."""

_text_as_written: dict[str, tuple[str, str]] = {}
"""Key → (text as written, resolved value), for settings with a secret from the environment."""
_from_environment: dict[str, str] = {}
"""Secret → interpolation of the secret in the settings."""
_literal: set[str] = set()
"""Secrets literally present in the settings."""


def note_literal(given: Iterable[tuple[str, Any]]) -> None:
    """Remembers the secrets literally present in settings, before any error can repeat them; forgets earlier ones.

    `hidden` and `masked` then replace these secrets, of at least `SHORT` characters, in every text.

    Args:
        given: Dotted keys and values as given, mappings and lists included.
    """
    _literal.clear()
    for top, tree in given:
        for key, value in leaves(tree, top):
            if is_secret(key, value) and "${" not in str(value) and value != MASK:
                _literal.add(str(value))


def note(settings: Any) -> None:
    """Remembers the secrets taken from the environment, before the settings are resolved; keeps earlier ones.

    Args:
        settings: Nested settings with interpolations such as `${oc.env:HF_TOKEN}` as written.
    """
    for key, raw in leaves(settings):
        for name in ENV.findall(raw) if isinstance(raw, str) else ():
            value = os.environ.get(name)
            hides = any(f"oc.env:{name}" in part for part in (*USER.findall(raw), *_secret_values(raw)))
            if value and (names_secret(name) or is_secret(key, raw) or hides or _looks_like_token(value)):
                _from_environment[value] = f"${{oc.env:{name}}}"


def note_resolved(settings: Any, resolved: Any) -> None:
    """Remembers the text as written of each setting with an interpolated secret; `masked` returns this text.

    To be called after `note` for the same settings; forgets the texts of earlier settings. A variable of the
    environment in a setting whose value is no text, such as a number, no longer counts as a secret.

    Args:
        settings: Nested settings with interpolations as written.
        resolved: The same settings with all interpolations replaced by values.
    """
    _text_as_written.clear()
    values = dict(leaves(resolved))
    for key, raw in leaves(settings):
        value = values.get(key)
        if not isinstance(raw, str) or "${" not in raw or raw == value:
            continue
        if isinstance(value, str) and (
            any(part in value for part in _from_environment) or _contains_literal_secret(raw, value)
        ):
            _text_as_written[key] = raw, value
        elif "oc.env" in raw and not isinstance(value, str):  # a number is not treated as a secret
            for name in ENV.findall(raw):
                _from_environment.pop(os.environ.get(name, ""), None)


def still_masked(settings: Any) -> tuple[str, str] | None:
    """Returns dotted key and value of the first setting with a secret still masked from an earlier output; None without
    any. `***` counts as a whole value, before a host (`://***@`), or after the name of a secret; not below
    `rollout.sampling.stop`, where it is literal text."""
    for key, value in leaves(settings):
        if key.startswith(LITERAL) or not isinstance(value, str):
            continue
        if value == MASK or f"://{MASK}@" in value or MASK in _secret_values(value):
            return key, value
    return None


def masked(value: Any, key: str = "") -> Any:
    """Returns a copy of settings, or of a single setting, without secrets; tuples become lists, numbers and None stay
    unless their key is a secret's.

    A secret from the environment becomes its reference, `${oc.env:NAME}`, if remembered by `note_resolved`; every other
    secret becomes `***`.

    Args:
        value: Mappings, lists and values.
        key: Dotted key of the value.
    """
    if isinstance(value, Mapping):
        return {name: masked(inner, _below(key, name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        parts = [masked(inner, _below(key, index)) for index, inner in enumerate(value)]
        after_option = [False, *map(is_option, value)]
        return [
            MASK if hide and isinstance(part, str) else part for hide, part in zip(after_option, parts, strict=False)
        ]
    if is_secret(key, value) and not isinstance(value, str):
        return MASK
    if not isinstance(value, str) or not value:
        return value
    raw, resolved = _text_as_written.get(key, ("", None))
    if value == resolved:
        return hide_in_text(raw)
    if key.startswith(LITERAL):
        return hidden(value)
    if is_secret(key, value):
        return value if _is_only_reference(value) else MASK
    if TOKENS.search(value) or any(len(secret) >= SHORT and secret in value for secret in _literal):
        return MASK
    return hidden(hide_in_text(value))


def hidden(text: str, short: bool = False) -> str:
    """Returns the text with the settings' secrets replaced: by `${oc.env:NAME}` if from the environment, else by `***`.

    Secrets of less than `SHORT` characters stay, literal ones even with `short`.

    Args:
        text: Text for users.
        short: True to replace also short secrets from the environment, as separate words; for text with little more
            than a setting's value.
    """
    for value in sorted(_from_environment, key=len, reverse=True):
        if len(value) >= SHORT:
            text = text.replace(value, _from_environment[value])
        elif short:
            text = _from_environment[value].join(re.split(rf"(?<!\w){re.escape(value)}(?!\w)", text))
    for value in sorted(_literal, key=len, reverse=True):
        if len(value) >= SHORT:
            text = text.replace(value, MASK)
    return text


def all_hidden(value: Any) -> Any:
    """Returns a copy of nested mappings and lists with `hidden` applied to every text value; keys and other values
    stay, tuples become lists."""
    if isinstance(value, Mapping):
        return {name: all_hidden(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [all_hidden(inner) for inner in value]
    return hidden(value) if isinstance(value, str) else value


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of every entry in nested mappings and lists; an index is a part of the key. An empty
    mapping or list yields nothing; any other value yields itself.

    Args:
        value: Mappings, lists and values.
        key: Dotted key of `value`; empty for the root.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, _below(key, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, _below(key, index))
    else:
        yield key, value


def _below(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _looks_like_token(value: str) -> bool:
    """Returns True if a value looks like a token, or is an address with a password."""
    return bool(TOKENS.search(value) or USER.search(value))


def _secret_values(text: str) -> list[str]:
    """Returns the values in a text after the name of a secret."""
    return [text[start:end] for start, end in secret_spans(text)]


def _contains_literal_secret(raw: str, value: str) -> bool:
    """Returns True if an interpolated value is, or contains, a secret of another setting."""
    named = any(is_secret(key, value) for key in REFERENCE.findall(raw))
    return named or value in _literal or any(len(secret) >= SHORT and secret in value for secret in _literal)


def _is_only_reference(text: str) -> bool:
    return bool(re.fullmatch(r"(?:\w+\s+)?\$\{oc\.env:[^}]*\}", text))
