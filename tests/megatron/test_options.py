"""Tests of megatron-core options: checked by name and type before a process starts, and set in the built model."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.megatron_options import DENIED
from skyrl_mega.config.schema import BuildConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import arguments, model, objectives
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.megatron import layouts
from tests.support.ranks import run_ranks

CONFIGURATIONS = {
    "policy.options": TransformerConfig,
    "policy.ddp_options": DistributedDataParallelConfig,
    "policy.optimizer.options": MegatronOptimizerConfig,
}


@pytest.mark.parametrize("key", CONFIGURATIONS)
def test_the_names_read_from_the_source_are_the_classes_fields(key: str) -> None:
    names = {field.name for field in fields(CONFIGURATIONS[key]) if not field.name.startswith("_")}
    assert set(arguments.fields(key)) == names
    assert set(DENIED[key]) <= names, "a denied field that this megatron-core does not have"


ALLOWED: list[dict[str, Any]] = [
    {"options": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}},
    {"options": {"attention_softmax_in_fp32": True, "moe_router_dtype": "fp64"}},
    {"ddp_options": {"bucket_size": 1000, "check_for_nan_in_grad": True}},
    {"optimizer": OptimizerConfig(options={"decoupled_lr": 1e-3})},
    {"optimizer": OptimizerConfig(options={"decoupled_lr": 1})},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"options": {"recompute_granularit": "selective"}},
        "policy.options.recompute_granularit: megatron-core has no such field; did you mean recompute_granularity",
    ),
    (
        {"ddp_options": {"bucketsize": 1}},
        "policy.ddp_options.bucketsize: megatron-core has no such field; did you mean",
    ),
    (
        {"ddp_options": {"bucket_size": "big"}},
        "policy.ddp_options.bucket_size = big: allowed is a whole number or null",
    ),
    ({"options": {"attention_softmax_in_fp32": 1}}, "attention_softmax_in_fp32 = 1: allowed is true or false"),
    (
        {"options": {"recompute_modules": "core_attn"}},
        "recompute_modules = core_attn: allowed is a list of str or null",
    ),
    ({"options": {"moe_router_dtype": "fp16"}}, "moe_router_dtype = fp16: allowed is one of fp32, fp64 or null"),
    ({"options": {"init_method": "x"}}, "policy.options.init_method = x: allowed is null"),
    ({"options": {"attention_backend": "flash"}}, "attention_backend = flash: allowed is nothing, as it is no plain"),
    (
        {"optimizer": OptimizerConfig(options={"decoupled_lr": True})},
        "policy.optimizer.options.decoupled_lr = true: allowed is a number or null",
    ),
]


@pytest.mark.parametrize("given", ALLOWED, ids=str)
def test_fields_of_megatron_core_pass(given: dict[str, Any]) -> None:
    arguments.check(PolicyConfig(**given))


@pytest.mark.parametrize(("given", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_other_names_and_values_are_refused_in_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        arguments.check(PolicyConfig(**given))
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_without_megatron_core_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "fields", lambda key: {})
    arguments.check(PolicyConfig(options={"recompute_granularit": "selective"}))


def test_an_annotation_in_quotes_is_read() -> None:
    annotation = ast.parse("x: 'Optional[int]'").body[0]
    assert isinstance(annotation, ast.AnnAssign)
    assert arguments._allows(annotation.annotation, None)
    assert not arguments._allows(annotation.annotation, "1")


def built(rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig) -> dict[str, Any]:
    """Returns settings of the model, DDP and optimizer of a real rank, and the metrics of a step."""
    opened = layouts.open_rank(rank, address, path, parallel, policy)
    _, micros = layouts.deal(layouts.some_batch(100), opened)
    ddp = opened.chunks[0]
    inner = [part.optimizer for part in model_parts(opened.optimizer)]
    return {
        "granularity": model.unwrap_gpt(ddp).config.recompute_granularity,
        "modules": model.unwrap_gpt(ddp).config.recompute_modules,
        "buckets": len(ddp.buffers[0].buckets),
        "adam": {type(adam).__name__ for adam in inner},
        "step": opened.train(micros, objectives.supervised),
    }


def model_parts(optimizer: Any) -> list[Any]:
    from skyrl_mega.megatron.moments import inner_optimizers

    return inner_optimizers(optimizer)


def test_options_are_in_the_built_model(tmp_path: Path) -> None:
    build(BuildConfig(), tmp_path / "model", seed=1)
    settings = layouts.policy_config(
        overlap=True,
        options={"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        ddp_options={"bucket_size": 1000},
        optimizer=OptimizerConfig(lr=1e-2, options={"decoupled_weight_decay": False}),
    )
    plain = layouts.policy_config(overlap=True)
    [ours] = run_ranks(1, built, tmp_path / "model", ParallelDims(), plain)
    [theirs] = run_ranks(1, built, tmp_path / "model", ParallelDims(), settings)
    assert (ours["granularity"], theirs["granularity"]) == (None, "selective")
    assert theirs["modules"] == ["mlp"]
    assert theirs["buckets"] > ours["buckets"] == 1
    assert (ours["adam"], theirs["adam"]) == ({"AdamW"}, {"Adam"})
    assert theirs["step"]["loss"] == pytest.approx(ours["step"]["loss"], rel=1e-6)


def test_what_megatron_core_refuses_is_one_line() -> None:
    options = {"recompute_granularity": "selective", "recompute_num_layers": 1}
    ours = dict(num_layers=2, hidden_size=8, num_attention_heads=2, params_dtype=torch.float32)
    with pytest.raises(UserError, match=r"policy\.options = \{recompute_granularity: .*: megatron-core refuses it: "):
        model.with_options(TransformerConfig, ours, options, "policy.options")
