"""Inputs of draft tokens: the package of suffix drafts, the directory of a draft model or head, and the layers of
multi-token prediction."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.drafts import EAGLE3_TARGETS, MTP_TARGETS, draft_method
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.drafts import HEADS
from skyrl_mega.config.schema.fields import Refusals
from skyrl_mega.hf_checkpoint import draft_head, index
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.quantization import block_fp8
from skyrl_mega.models.registry import architecture

PACKAGE = "arctic_inference"
"""Package used by vLLM for suffix drafts."""
KEY = "rollout.drafts.path"
METHOD = "rollout.drafts.method"
INSTEAD = "give rollout.drafts.method=ngram"


@raising
def check_suffix(config: Config) -> Refusals:
    """Raises a UserError for suffix drafts without the package `arctic-inference`."""
    if draft_method(config.rollout) == "suffix" and importlib.util.find_spec(PACKAGE) is None:
        why = "vLLM needs the package arctic-inference for suffix drafts, and it is not installed here"
        yield METHOD, why, f"install arctic-inference on every node, or {INSTEAD}", "suffix"


def check_draft_weights(config: Config, hf: Mapping[str, Any], *, planned: bool = False) -> list[str]:
    """Checks the weights of drafts, if any: files, family, vocabulary, the hidden states that a head reads, or the
    policy's layers of multi-token prediction.

    Args:
        config: The settings.
        hf: The policy's config.json.
        planned: True if nothing will be started: an absent directory is then returned, not refused.

    Returns:
        The absent directory of a draft model or head, if planned; else [].

    Raises:
        UserError: The weights cannot be used with this policy.
    """
    drafts, path = config.rollout.drafts, config.rollout.drafts.path
    if drafts.method == "mtp":
        _check_prediction_layers(config, hf, planned)
    if path is None:
        return []
    if drafts.method == "eagle3" and hf.get("model_type") not in EAGLE3_TARGETS:
        raise UserError(
            f"vLLM gives no hidden states of a {hf.get('model_type')} model to an EAGLE-3 head; allowed are models of "
            f"{', '.join(EAGLE3_TARGETS)}",
            key=METHOD,
            value=drafts.method,
            fix=INSTEAD,
        )
    if planned and not Path(path).exists():
        return [path]
    policy, draft = architecture(hf).describe(hf), index.read_config(Path(path))
    if drafts.method in HEADS:
        _check_head(config, draft, policy)
        tokens = draft["vocab_size"]
    else:
        index.check_files(Path(path))
        tokens = architecture(draft).describe(draft).vocab
    if tokens != policy.vocab:
        raise UserError(
            f"its vocabulary has {tokens} tokens, and the policy's {policy.vocab}: draft tokens are checked by number",
            key=KEY,
            value=path,
            fix=f"give weights for the policy's vocabulary, or {INSTEAD}",
        )
    return []


@raising
def _check_head(config: Config, head: Mapping[str, Any], policy: Decoder) -> Refusals:
    """Raises a UserError unless the directory has all tensors of a head of dense Llama layers for this policy."""
    path, method = Path(config.rollout.drafts.path or ""), config.rollout.drafts.method
    other = "give a head that was trained for this policy"
    if head.get("model_type") != "llama":
        why = f"config.json says model_type = {str(head.get('model_type'))[:40]}; heads of Llama layers are allowed"
        yield KEY, why, f"give a head with model_type llama, or {INSTEAD}"
    decoder = architecture(head).describe(head)
    if decoder.hidden != policy.hidden:
        yield KEY, f"its hidden states have {decoder.hidden} numbers, and the policy's {policy.hidden}", other
    index.check_tensors(path, draft_head.tensors(path, head, method))
    tokens = head.get("draft_vocab_size") or decoder.vocab
    if method == "eagle3" and tokens != decoder.vocab and "d2t" not in index.names_in(path):
        why = f"the head has {tokens} tokens of {decoder.vocab}, and its files have no tensor d2t that says which"
        yield KEY, why, "give the published files"
    taken = draft_head.taken_layers(head, policy.layers)
    inside = all(type(layer) is int and 0 <= layer <= policy.layers for layer in taken)
    if method == "eagle3" and not (inside and len(set(taken)) == len(taken)):
        yield KEY, f"the head reads the layers {str(taken)[:60]} of the policy, which has {policy.layers} layers", other


@raising
def _check_prediction_layers(config: Config, hf: Mapping[str, Any], planned: bool) -> Refusals:
    """Raises a UserError unless the model's files have layers of multi-token prediction that vLLM reads."""
    path, count = Path(config.model.path), hf.get("num_nextn_predict_layers")
    if hf.get("model_type") not in MTP_TARGETS:
        yield (
            METHOD,
            f"it has been tried with {', '.join(MTP_TARGETS)}; this is a {hf.get('model_type')} model",
            INSTEAD,
        )
    if type(count) is not int or count < 1:
        why = f"config.json of {path} says num_nextn_predict_layers = {str(count)[:20]}"
        yield METHOD, f"{why}: the model has no layer of multi-token prediction", INSTEAD
        return
    if planned and not any(path.glob("*.safetensors")):
        return
    if block_fp8(hf):
        yield METHOD, "layers of multi-token prediction have not been tried with a checkpoint in block FP8", INSTEAD
    last = architecture(hf).describe(hf).layers
    for layer in range(last, last + count):
        if not any(name.startswith(f"model.layers.{layer}.") for name in index.names_in(path)):
            why = f"config.json names {count} layers of multi-token prediction, and the files have no tensor"
            yield "model.path", f"{why} model.layers.{layer}.*", f"give the published files, or {INSTEAD}"
