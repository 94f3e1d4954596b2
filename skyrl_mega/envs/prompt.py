"""The `Prompt` record: a row of the data, as used by all higher packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """A row of the data: the question for the policy and the information for judging the answer."""

    uid: int
    """Position in the data; the same across epochs and restarts."""
    messages: list[dict[str, Any]]
    """Chat messages: role and content."""
    env_class: str
    """Registered environment name."""
    extras: dict[str, Any]
    """`reward_spec`, `extra_info`, `data_source` as in the row, and every further column."""
