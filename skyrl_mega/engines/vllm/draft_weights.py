"""A repair of vLLM's loading of a draft model.

An engine of a run starts with random weights, which a sync replaces. A draft model takes part in no sync: its weights
are in files, and `draft_load_config` says so. vLLM 0.32 follows that setting for EAGLE's heads, but loads a draft model
like the policy's: with random weights, whose drafts are never accepted.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

PREFIX = "draft_model"
"""Prefix with which vLLM's runners load a draft model."""
_REPAIRED = "skyrl_mega_reads_draft_weights"


def read_draft_weights() -> None:
    """Makes vLLM's loader of random weights in this process load a draft model as `draft_load_config` says. May be
    called again."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    load = DummyModelLoader.load_model
    if hasattr(load, _REPAIRED):
        return

    @wraps(load)
    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        loader = get_model_loader(get_draft_load_config(vllm_config)) if prefix == PREFIX else self
        if isinstance(loader, DummyModelLoader):
            return load(loader, vllm_config, model_config, prefix)
        return loader.load_model(vllm_config, model_config, prefix)

    setattr(load_model, _REPAIRED, True)
    DummyModelLoader.load_model = load_model
