"""Scores on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, at_least, between


@dataclass
class EvaluationConfig:
    """Scores on held-out prompts."""

    every: int = at_least(0, 10)
    """RL steps between evaluations; 0 never evaluates between start and end."""
    before: bool = True
    """Also before the first RL step."""
    samples: int = between(1, MOST, 1)
    """Samples per prompt: pass@n and average."""
    limit: Optional[int] = at_least(1, None)
    """Prompts of each set at most."""
    temperature: Optional[float] = at_least(0, None)
    """None takes rollout.sampling.temperature."""
    top_p: Optional[float] = between(0, 1, None)
    """None takes rollout.sampling.top_p."""
    max_tokens: Optional[int] = at_least(1, None)
    """Tokens of one turn at most; None takes rollout.sampling.max_tokens."""
