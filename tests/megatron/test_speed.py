"""Tests of speed settings: the settings become megatron-core fields, and missing packages are refused."""

from __future__ import annotations

import sys
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
from megatron.core import config as megatron_config
from megatron.core.transformer.transformer_config import TransformerConfig

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import MoeConfig, PolicyConfig
from skyrl_mega.megatron import speed

NAMES = {field.name for field in fields(TransformerConfig)}
ALL = dict.fromkeys(speed.FIELDS.values(), True)
NONE = dict.fromkeys(speed.FIELDS.values(), False)


@pytest.mark.parametrize(
    ("policy", "spec", "experts", "expected"),
    [
        (PolicyConfig(), "te", True, ALL),
        (PolicyConfig(), "te", False, ALL | {"moe_permute_fusion": False, "moe_router_fusion": False}),
        (PolicyConfig(), "local", True, NONE),
        (PolicyConfig(fusions=[]), "te", True, NONE),
        (PolicyConfig(fusions=["rope"]), "te", True, NONE | {"apply_rope_fusion": True}),
        (PolicyConfig(moe=MoeConfig(replay="rollout")), "te", True, ALL | {"moe_router_fusion": False}),
        (PolicyConfig(moe=MoeConfig(aux_loss=0.1)), "te", True, ALL | {"moe_router_fusion": False}),
    ],
)
def test_what_is_fused(policy: PolicyConfig, spec: Any, experts: bool, expected: dict[str, bool]) -> None:
    assert speed.fusions(policy, spec, experts) == expected


@pytest.mark.parametrize(
    ("kind", "experts", "expected"),
    [
        ("none", True, {}),
        ("full", True, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ("moe", True, {"recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]}),
        ("selective", True, {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}),
        ("selective", False, {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}),
    ],
)
def test_what_is_recomputed(kind: str, experts: bool, expected: dict[str, Any]) -> None:
    assert speed.recompute(PolicyConfig(recompute=kind), experts) == expected


def test_how_tokens_are_sent() -> None:
    assert speed.dispatcher(PolicyConfig()) == {"moe_token_dispatcher_type": "alltoall"}
    deepep = speed.dispatcher(PolicyConfig(moe=MoeConfig(dispatcher="deepep")))
    assert deepep == {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}


@pytest.mark.parametrize("kind", ["none", "full", "moe", "selective"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
def test_every_field_is_one_of_megatron_core(kind: str, dispatcher: str) -> None:
    policy = PolicyConfig(recompute=kind, moe=MoeConfig(dispatcher=dispatcher))
    assert set(speed.fields(policy, "te", True)) <= NAMES


def test_deepep_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PolicyConfig(moe=MoeConfig(dispatcher="deepep"))
    monkeypatch.setattr(megatron_config, "ENABLE_EXPERIMENTAL", False)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(UserError, match=r"^policy\.moe\.dispatcher = deepep: the package deep_ep cannot be imported"):
        speed.prepare(policy)
    speed.prepare(PolicyConfig())
    assert not megatron_config.is_experimental_enabled()
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    speed.prepare(policy)
    assert megatron_config.is_experimental_enabled()
