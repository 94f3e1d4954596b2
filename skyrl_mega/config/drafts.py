"""Draft tokens of engines, in vLLM's terms: `rollout.drafts` merged with `rollout.options.speculative_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.config.schema.drafts import HEADS

OPTION = "speculative_config"
"""vLLM's engine argument."""
WEIGHTLESS = ("ngram", "suffix")
"""vLLM's methods without weights that propose on the CPU: an engine can leave the drafts of a step out."""
METHODS = {name: name for name in ("ngram", "suffix", *HEADS, "mtp")} | {"model": "draft_model"}
"""`rollout.drafts.method` → vLLM's method."""


FROM_FILES = ("model", *HEADS, "mtp")
"""Values of `rollout.drafts.method` with weights, which are read from files and never updated."""

EAGLE3_TARGETS = (
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "kimi_k2",
    "llama",
    "minimax_m2",
    "qwen2",
    "qwen3",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
"""`model_type` of the models that give hidden states to an EAGLE-3 head in vLLM 0.32."""
MTP_TARGETS = ("deepseek_v3", "glm4_moe")
"""`model_type` of the models whose layers of multi-token prediction an engine can read."""


def speculative_config(rollout: RolloutConfig) -> dict[str, Any]:
    """Returns vLLM's `speculative_config`; {} without draft tokens. Entries of `rollout.options.speculative_config`
    take precedence over `rollout.drafts`.

    The weights of drafts are read from files; vLLM would otherwise initialise them like the policy's, which a sync
    delivers.
    """
    drafts, given = rollout.drafts, rollout.options.get(OPTION)
    settings: dict[str, Any] = {}
    if drafts.method != "none":
        settings = {"method": METHODS[drafts.method], "num_speculative_tokens": drafts.max_tokens}
    if drafts.method == "ngram":
        settings |= {"prompt_lookup_min": drafts.shortest, "prompt_lookup_max": drafts.longest}
    if drafts.path:
        settings["model"] = drafts.path
    if drafts.method in FROM_FILES:
        settings["draft_load_config"] = {"load_format": "auto"}
    return {**settings, **given} if isinstance(given, Mapping) else settings


def draft_method(rollout: RolloutConfig) -> str:
    """Returns vLLM's name of the method of draft tokens: a value of `METHODS`, or the method given in
    `rollout.options.speculative_config`; "" without drafts."""
    return str(speculative_config(rollout).get("method", ""))


def draft_tokens(rollout: RolloutConfig) -> int:
    """Returns the maximum number of draft tokens per sequence and step; 0 without drafts."""
    return int(speculative_config(rollout).get("num_speculative_tokens", 0))
