"""Readers for keys of a Hugging Face config.json. Missing or unsupported keys are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown

Hf = Mapping[str, Any]
"""The content of a Hugging Face config.json."""

COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Defaults shared by the transformers classes of all families."""
MAX_NUMBER = 1e30
"""Upper bound of numbers: far above any model's, and a float."""
DEFAULT_UPPER_BOUND = 2**31 - 1
UPPER_BOUNDS = {"num_hidden_layers": 1000, "num_experts": 4096, "num_local_experts": 4096}
"""Upper bounds of whole numbers, by key: far above any model, and low enough to list the model's tensors."""


def with_defaults(hf: Hf, **defaults: Any) -> Hf:
    """Returns a copy of the configuration with absent keys filled from `defaults`, the defaults of the family's
    transformers class, and from `COMMON`.

    A null stays: transformers refuses most nulls. `hf` is not changed.
    """
    return {**COMMON, **defaults, **hf}


def integer(hf: Hf, key: str) -> int:
    """Returns the positive integer `key` of a config.json.

    Raises:
        UserError: The key is missing, or its value is no positive integer or above the key's upper bound.
    """
    value = hf.get(key)
    if key not in hf:
        raise UserError(
            f"{key} is missing; every {hf.get('model_type')} model needs this key: fetch config.json again",
            key="config.json",
        )
    upper_bound = UPPER_BOUNDS.get(key, DEFAULT_UPPER_BOUND)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= upper_bound:
        raise unsupported(hf, key, f"a positive integer of at most {upper_bound}")
    return value


def flag(hf: Hf, key: str) -> bool:
    """Returns the boolean `key` of a config.json.

    Raises:
        UserError: The key is missing, or its value is not true or false.
    """
    value = hf.get(key)
    if not isinstance(value, bool):
        raise unsupported(hf, key, "true or false")
    return value


def number(hf: Hf, key: str) -> float:
    """Returns the positive number `key` of a config.json, as a float.

    Raises:
        UserError: The key is missing, or its value is no positive number below `MAX_NUMBER`.
    """
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_NUMBER:
        raise unsupported(hf, key, "a positive number")
    return float(value)


def require(hf: Hf, key: str, allowed: Any) -> None:
    """Raises an error unless `key` is absent, null or equal to `allowed`.

    Raises:
        UserError: The key has another value.
    """
    if hf.get(key, allowed) not in (allowed, None):
        raise unsupported(hf, key, f"{allowed!r}")


def require_given(hf: Hf, key: str, needed: Any) -> None:
    """Raises an error unless config.json contains `key` with the value `needed`, for keys with other defaults in vLLM.

    Raises:
        UserError: The key is missing, or has another value, null included.
    """
    if key not in hf:
        raise UserError(
            f"{key} is missing, and vLLM would compute another model without this key",
            key="config.json",
            fix=f'add "{key}": {json.dumps(needed)}, as in the published config.json',
        )
    if hf[key] != needed:
        raise unsupported(hf, key, f"{needed!r}")


def unsupported(hf: Hf, key: str, allowed: str) -> UserError:
    """Returns, without raising, the error for an unsupported value of `key`.

    Args:
        hf: Content of config.json.
        key: The key.
        allowed: Description of the allowed values.
    """
    return UserError(
        f"{key} is {shown(hf.get(key))}; skyrl_mega supports {allowed}; choose another model", key="config.json"
    )
