"""The counts of draft tokens of a finished request."""

from __future__ import annotations

from typing import Any

from skyrl_mega.engines.base import Drafts


def request_drafts(tokens: int, metrics: Any) -> Drafts:
    """Returns the counts of a finished request; `steps` and `suppressed` stay 0, and without `metrics` all but
    `written`.

    Args:
        tokens: Number of tokens of the answer.
        metrics: vLLM's `RequestSpecDecodeMetrics`; None if no draft was checked.
    """
    if metrics is None:
        return Drafts(written=tokens)
    checks = sum(metrics.histogram)
    accepted = sum(drafts * steps for drafts, steps in enumerate(metrics.histogram))
    # vLLM counts before it cuts the answer at its end. The prompt and each check give a token that is no draft.
    return Drafts(tokens, metrics.num_draft_tokens, max(0, min(accepted, tokens - 1 - checks)))
