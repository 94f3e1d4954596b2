"""Draft tokens of engines, in vLLM's terms: `rollout.drafts` merged with `rollout.options.speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.config.schema import RolloutConfig

OPTION = "speculative_config"
"""vLLM's engine argument."""
WEIGHTLESS = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods without weights."""
METHODS = {"ngram": "ngram", "suffix": "suffix", "model": "draft_model"}
"""`rollout.drafts.method` → vLLM's method."""


def speculative_config(rollout: RolloutConfig) -> dict[str, Any]:
    """Returns vLLM's `speculative_config`; {} without draft tokens. Entries of `rollout.options.speculative_config`
    take precedence over `rollout.drafts`.

    The weights of a draft model are read from its own directory; vLLM would otherwise initialise them like the
    policy's, which a sync delivers.
    """
    drafts, given = rollout.drafts, rollout.options.get(OPTION)
    settings: dict[str, Any] = {}
    if drafts.method != "none":
        settings = {"method": METHODS[drafts.method], "num_speculative_tokens": drafts.max_tokens}
    if drafts.method == "ngram":
        settings |= {"prompt_lookup_min": drafts.shortest, "prompt_lookup_max": drafts.longest}
    if drafts.method == "model":
        settings |= {"model": drafts.path, "draft_load_config": {"load_format": "auto"}}
    return {**settings, **given} if isinstance(given, Mapping) else settings


def draft_method(rollout: RolloutConfig) -> str:
    """Returns vLLM's name of the method of draft tokens: `ngram`, `suffix`, `draft_model`, or the method given in
    `rollout.options.speculative_config`; "" without drafts."""
    return str(speculative_config(rollout).get("method", ""))


def draft_tokens(rollout: RolloutConfig) -> int:
    """Returns the maximum number of draft tokens per sequence and step; 0 without drafts."""
    return int(speculative_config(rollout).get("num_speculative_tokens", 0))
