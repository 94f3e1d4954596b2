"""One row of the data, as every room above knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One row of the data: what the policy is asked and what the environment needs to judge it."""

    uid: int
    """Position in the data; the same across epochs and restarts."""
    messages: list[dict[str, Any]]
    """Chat messages: role and content."""
    env_class: str
    """Registered environment name."""
    extras: dict[str, Any]
    """`reward_spec`, `extra_info`, `data_source` as in the row, and every further column."""
