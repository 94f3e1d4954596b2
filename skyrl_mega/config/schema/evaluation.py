"""Settings of evaluation on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, Refusals, at_least, between


@dataclass
class EvaluationConfig:
    """Evaluation on held-out prompts: interval, number of samples, and sampling."""

    every: int = at_least(0, 10)
    """RL steps between evaluations; the last of `run.steps` is evaluated as well. 0 evaluates only before the first
    step, if `before` is set."""
    before: bool = True
    """Evaluates also before the first RL step."""
    samples: int = between(1, MOST, 1)
    """Samples per prompt, for pass@n and the average."""
    limit: Optional[int] = at_least(1, None)
    """Maximum number of prompts per evaluation set."""
    temperature: Optional[float] = at_least(0, None)
    """Sampling temperature; null uses rollout.sampling.temperature."""
    top_p: Optional[float] = between(0, 1, None)
    """Nucleus mass; null uses rollout.sampling.top_p."""
    max_tokens: Optional[int] = at_least(1, None)
    """Maximum number of tokens per turn; null uses rollout.sampling.max_tokens."""

    def refusals(self) -> Refusals:
        """Yields a refusal if `top_p` is 0, which keeps no token."""
        if self.top_p == 0:
            yield "evaluation.top_p", "allowed is a number above 0 and at most 1"
