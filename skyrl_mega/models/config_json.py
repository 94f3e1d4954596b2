"""Reads keys of a Hugging Face config.json. What is missing or cannot be computed exactly is refused, by key."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.values import shown

Hf = Mapping[str, Any]
"""The content of a Hugging Face config.json."""

LARGEST = 2**31 - 1
MOST = {"num_hidden_layers": 1000, "num_experts": 4096, "num_local_experts": 4096}
"""Whole numbers of a configuration at most: far above any model, and what its tensors can still be listed for."""


def integer(hf: Hf, key: str, default: int | None = None) -> int:
    """A positive integer of the configuration."""
    value = hf.get(key)
    if value is None:
        if default is None:
            raise UserError(f"config.json: {key} is missing; a {hf.get('model_type')} checkpoint has it")
        return default
    most = MOST.get(key, LARGEST)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise unsupported(hf, key, f"a positive integer of at most {most}")
    return value


def number(hf: Hf, key: str, default: float | None = None) -> float:
    """A positive number of the configuration."""
    value = hf.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise unsupported(hf, key, "a positive number")
    return float(value)


def only(hf: Hf, key: str, allowed: Any) -> None:
    """Refuses any other value of `key`; absent is allowed."""
    if hf.get(key, allowed) not in (allowed, None):
        raise unsupported(hf, key, f"{allowed!r}")


def unsupported(hf: Hf, key: str, allowed: str) -> UserError:
    """The error for a value that is not among those `allowed`."""
    return UserError(f"config.json: {key} is {shown(hf.get(key))}; skyrl_mega supports {allowed}; choose another model")
