"""Inputs of draft tokens: the package of suffix drafts, and the directory of a draft model."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.drafts import draft_method
from skyrl_mega.config.schema import Config
from skyrl_mega.hf_checkpoint import index
from skyrl_mega.models.registry import architecture

PACKAGE = "arctic_inference"
"""Package used by vLLM for suffix drafts."""


def check_suffix(config: Config) -> None:
    """Raises a UserError for suffix drafts without the package `arctic-inference`."""
    if draft_method(config.rollout) == "suffix" and importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            "vLLM needs the package arctic-inference for suffix drafts, and it is not installed here",
            key="rollout.drafts.method",
            value="suffix",
            fix="install arctic-inference on every node, or give rollout.drafts.method=ngram",
        )


def check_draft_model(config: Config, hf: Mapping[str, Any], *, planned: bool = False) -> list[str]:
    """Checks the directory of a draft model: its files, its family, and its vocabulary.

    Args:
        config: The settings.
        hf: The policy's config.json.
        planned: True if nothing will be started: the directory may then be absent.

    Returns:
        The absent directory, if planned; else [].

    Raises:
        UserError: The directory cannot be used, or the vocabulary has another size than the policy's.
    """
    path = config.rollout.drafts.path
    if path is None:
        return []
    if planned and not Path(path).exists():
        return [path]
    index.check_files(Path(path))
    draft = index.read_config(Path(path))
    drafts, tokens = architecture(draft).describe(draft).vocab, architecture(hf).describe(hf).vocab
    if drafts != tokens:
        raise UserError(
            f"its vocabulary has {drafts} tokens, and the policy's {tokens}: draft tokens are checked by number",
            key="rollout.drafts.path",
            value=path,
            fix="give a model with the policy's vocabulary, or rollout.drafts.method=ngram",
        )
    return []
