"""Passwords and tokens among settings: whoever writes settings where others may read them writes these masked.

A value that a setting takes from the environment is written as it was taken, `${oc.env:NAME}`, so that the settings can
be given again; one that stands in the settings themselves becomes `***`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
TAKEN = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,[^}]*)?\}")
NAMED = re.compile(r"(?:^|[_.-])(?:token|secret|passwo?r?d|passwd|auth|credentials?|api_?key|key)$", re.IGNORECASE)
"""Names of variables and options that hold a secret; `max_tokens` and `token_variable` do not."""
TOKENS = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|\b[0-9a-f]{40}\b"
)
"""The forms that providers give their tokens; 40 hexadecimal digits are Weights & Biases'."""
IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
SHORTEST = 8
"""Characters of a value from the environment that is taken for a secret though its name does not say so."""

_TAKEN: dict[str, str] = {}
"""Value → the variable that it came from, of this process's settings."""


def note(settings: Any) -> None:
    """Remembers what settings, as written, take from the environment."""
    if isinstance(settings, Mapping):
        for value in settings.values():
            note(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            note(value)
    elif isinstance(settings, str):
        for name in TAKEN.findall(settings):
            value = os.environ.get(name, "")
            if value and (NAMED.search(name) or (len(value) >= SHORTEST and "/" not in value)):
                _TAKEN[value] = f"${{oc.env:{name}}}"


def masked(value: Any, name: str = "") -> Any:
    """Settings, or one of them, without secrets.

    Args:
        value: Mappings, lists and values.
        name: The key that it stands under.
    """
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    for secret, taken in _TAKEN.items():
        if secret in value:
            return value.replace(secret, taken)
    return MASK if NAMED.search(name) else IN_URL.sub(MASK, TOKENS.sub(MASK, value))
