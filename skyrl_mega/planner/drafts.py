"""Weights of draft tokens in engines (`rollout.drafts`): time of a step, and memory in addition to the policy's."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path

from skyrl_mega.common.limits import itemsize
from skyrl_mega.config.drafts import OPTION
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.drafts import HEADS, DraftsConfig
from skyrl_mega.hf_checkpoint import draft_head
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.engine_weights import cache_itemsize, engine_bytes, kv_bytes_per_token


def draft_model(config: Config, policy: Decoder) -> Decoder | None:
    """Returns the model that proposes draft tokens; None for drafts without weights, or if the directory of the weights
    is not on this machine.

    A head counts as a model of its layers with its own vocabulary, and multi-token prediction as the policy's last
    layer: a step with several drafts runs one layer several times.

    Raises:
        UserError: The config.json of the drafts cannot be used, or the family is unknown.
    """
    drafts = config.rollout.drafts
    if drafts.method == "mtp":
        return policy.of_one_layer(policy.layer(policy.layers - 1))
    path = drafts.path
    return _described(path) if path and (Path(path) / "config.json").is_file() else None


@lru_cache(maxsize=4)
def _described(path: str) -> Decoder:
    hf = read_config(Path(path))
    return architecture(hf).describe({**hf, "vocab_size": hf.get("draft_vocab_size") or hf["vocab_size"]})


def without_drafts(config: Config) -> Config:
    """Returns the settings without draft tokens."""
    options = {name: value for name, value in config.rollout.options.items() if name != OPTION}
    return replace(config, rollout=replace(config.rollout, drafts=DraftsConfig(), options=options))


def draft_bytes(config: Config, policy: Decoder) -> tuple[int, int]:
    """Returns the bytes that drafts need in each engine worker: for weights, and for KV cache per token. (0, 0) for
    drafts without weights, and if the directory of the weights is not on this machine. `policy` is the policy's model.

    Raises:
        UserError: The config.json or the files of the drafts cannot be used.
    """
    model, plain, drafts = draft_model(config, policy), without_drafts(config), config.rollout.drafts
    if model is None:
        return 0, 0
    if drafts.method in HEADS:
        weights = _head_bytes(config)
    elif drafts.method == "mtp":  # embedding and output projection are the policy's
        layer = engine_bytes(plain, replace(model, order=(0, 0))) - engine_bytes(plain, model)
        weights = layer + 2 * model.hidden**2 * itemsize(config.model.dtype)
    else:
        weights = engine_bytes(plain, model)
    return weights, kv_bytes_per_token(model, config.rollout.tensor, cache_itemsize(config))


def _head_bytes(config: Config) -> int:
    """Returns the bytes of a head in each engine worker: `fc` and norms whole, other matrices by tensor parallelism."""
    drafts = config.rollout.drafts
    path = Path(drafts.path or "")
    shapes = draft_head.tensors(path, read_config(path), drafts.method)
    whole = sum(prod(shape) for name, shape in shapes.items() if len(shape) == 1 or name == "fc.weight")
    shared = sum(map(prod, shapes.values())) - whole
    return (whole + -(-shared // config.rollout.tensor)) * itemsize(config.model.dtype)
