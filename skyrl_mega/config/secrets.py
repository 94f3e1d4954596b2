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
NAMED = re.compile(
    r"(?:^|[_.-])(?:(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)token|secret|passwo?r?d|passwd|auth|credentials?"
    r"|(?:api|access|secret|private|auth|wandb)_?key)$",
    re.IGNORECASE,
)
"""Names of variables and options that hold a secret; `max_tokens`, `eos_token` and `answer_key` do not."""
TOKENS = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|^[0-9a-f]{40}$"
)
"""The forms that providers give their tokens. 40 hexadecimal digits are Weights & Biases'; within a path, a commit."""
IN_URL = re.compile(r"(?<=://)(?:[^/@\s$]|\$(?!\{oc\.env:))+(?=@)|(?<=://)[^/@\s$]+:(?=\$\{oc\.env:)")
"""What stands before a host, but for what was taken from the environment."""

_TAKEN: dict[str, str] = {}
"""Value → the variable that it came from, of this process's settings."""


def note(settings: Any, key: str = "") -> None:
    """Remembers which secrets settings, as written, take from the environment.

    Args:
        settings: Mappings, lists and values.
        key: The key that they stand under.
    """
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            note(value, str(name))
    elif isinstance(settings, list | tuple):
        for value in settings:
            note(value, key)
    elif isinstance(settings, str):
        for name in TAKEN.findall(settings):
            value = os.environ.get(name, "")
            if value and (NAMED.search(name) or NAMED.search(key) or TOKENS.search(value)):
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
    kept = value
    for secret in sorted(_TAKEN, key=len, reverse=True):
        kept = kept.replace(secret, _TAKEN[secret])
    if NAMED.search(name):
        return kept if TAKEN.fullmatch(kept) else MASK
    return IN_URL.sub(MASK, TOKENS.sub(MASK, kept))
