"""Settings of draft tokens (speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import Refusals, at_least, between, one_of

HEADS = ("eagle", "eagle3")
"""Methods with a head that reads the policy's hidden states."""


@dataclass
class DraftsConfig:
    """Draft tokens (docs/drafts.md): an engine guesses the next tokens of a sequence and checks all of them in one
    step. Tokens and log-probs follow the policy's distribution, with any drafts."""

    method: str = one_of("none", "ngram", "suffix", "model", *HEADS, "mtp")
    """Origin of the draft tokens. none: no drafts. ngram: the continuation of an earlier occurrence of the last tokens
    in the same sequence. suffix: the likeliest continuation in this sequence and in the engine's earlier answers; needs
    the package `arctic-inference`. model: a small model with the same vocabulary, read from `path`. eagle, eagle3: a
    head that reads the policy's hidden states, read from `path`. mtp: layers of multi-token prediction in the files of
    `model.path`. Weights of drafts are never trained. With a method other than none, the same seed gives other tokens
    than without drafts."""
    max_tokens: int = between(1, 32, 4)
    """Maximum number of draft tokens per sequence and step."""
    shortest: int = at_least(1, 2)
    """`ngram`: minimum number of last tokens that must have occurred before."""
    longest: int = at_least(1, 5)
    """`ngram`: maximum number of last tokens compared; the longest match counts."""
    path: Optional[str] = None
    """`model`, `eagle`, `eagle3`: Hugging Face directory of the draft model or head."""
    adaptive: bool = True
    """`ngram` and `suffix`: an engine measures the seconds per token with and without drafts, for each range of batch
    sizes, and drafts only where drafts save time. Tokens then depend on the speed of the machine;
    `run.deterministic=true` ignores this setting and always drafts."""
    acceptance: float = between(0, 1, 0.2)
    """Assumption of estimated times (dry run, simulation): accepted draft tokens of a step, divided by `max_tokens`."""

    def refusals(self) -> Refusals:
        """Yields refusals of a draft model or head without a directory, a directory without use, and of `shortest`
        above `longest`."""
        reads = self.method in ("model", *HEADS)
        if reads and not self.path:
            kind = "head" if self.method in HEADS else "draft model"
            why = f"rollout.drafts.method={self.method} needs the directory of the {kind}"
            yield "rollout.drafts.path", why, "give a Hugging Face directory with the same vocabulary"
        if not reads and self.path:
            why = f"rollout.drafts.method={self.method} reads no directory of drafts"
            yield "rollout.drafts.path", why, "leave it out, or give rollout.drafts.method=model"
        if self.shortest > self.longest:
            yield "rollout.drafts.shortest", f"allowed is at most rollout.drafts.longest = {self.longest}"
