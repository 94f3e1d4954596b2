"""Draft models of engines (`rollout.drafts.method=model`): time of a step, and memory in addition to the policy's."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from skyrl_mega.config.drafts import OPTION
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.engine_weights import cache_itemsize, engine_bytes, kv_bytes_per_token


def draft_model(config: Config) -> Decoder | None:
    """Returns the draft model of the engines; None without a draft model, or if its directory is not on this machine.

    Raises:
        UserError: Its config.json cannot be used, or the model's family is unknown.
    """
    path = config.rollout.drafts.path
    return _described(path) if path and (Path(path) / "config.json").is_file() else None


@lru_cache(maxsize=4)
def _described(path: str) -> Decoder:
    hf = read_config(Path(path))
    return architecture(hf).describe(hf)


def without_drafts(config: Config) -> Config:
    """Returns the settings without draft tokens."""
    options = {name: value for name, value in config.rollout.options.items() if name != OPTION}
    return replace(config, rollout=replace(config.rollout, drafts=DraftsConfig(), options=options))


def draft_bytes(config: Config) -> tuple[int, int]:
    """Returns the bytes of a draft model in each engine worker: weights, and KV cache per token; zeros without one."""
    model, plain = draft_model(config), without_drafts(config)
    if model is None:
        return 0, 0
    return engine_bytes(plain, model), kv_bytes_per_token(model, config.rollout.tensor, cache_itemsize(config))
