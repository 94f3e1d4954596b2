"""Errors for impossible `policy.precision`, in a line with the allowed values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.precision import RECIPES, check_gpu
from skyrl_mega.config.schema import BuildConfig, PrecisionConfig
from skyrl_mega.models import fp8_widths
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims

R = "policy.precision.recipe"
KEPT = "policy.precision.parameters=fp8"
GPU = "cluster.device=cuda policy.ranks=1 rollout.engines=1 cluster.gpus_per_node=2"


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"{R}={recipe}" for recipe in ("model", *RECIPES)),
        f"{R}=mxfp8 policy.precision.first_layers=1 policy.precision.last_layers=1",
        f"{R}=fp8_blockwise model.dtype=bfloat16 {GPU}",
        f"{R}=fp8_blockwise {KEPT} weights.wire=fp8 model.dtype=bfloat16 {GPU}",
    ],
)
def test_what_is_possible_passes(base: Path, arguments: str) -> None:
    check(compose(base, arguments.split()))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (f"{R}=fp8_delayed", f"{R} = fp8_delayed: allowed is one of model, fp8_blockwise, fp8_current, mxfp8"),
        ("policy.precision.first_layers=1", "policy.precision.first_layers = 1: with policy.precision.recipe=model"),
        (f"{R}=fp8_current model.dtype=float32 {GPU}", "model.dtype = float32: allowed is bfloat16 where"),
        (f"{R}=fp8_current policy.spec=local model.dtype=bfloat16 {GPU}", f"{R} = fp8_current: with policy.spec=local"),
        (
            f"{R}=fp8_current {KEPT} weights.wire=fp8",
            f"{KEPT.replace('=', ' = ')}: only numbers of recipe fp8_blockwise",
        ),
        (f"{R}=fp8_blockwise {KEPT} weights.wire=fp8", f"{KEPT.replace('=', ' = ')}: it needs Transformer Engine's"),
        (
            f"{R}=fp8_blockwise {KEPT} model.dtype=bfloat16 {GPU}",
            f"{KEPT.replace('=', ' = ')}: engines get the weights",
        ),
        (
            f"{R}=fp8_blockwise {KEPT} weights.wire=fp8 policy.optimizer.streamed=true model.dtype=bfloat16 {GPU}",
            f"{KEPT.replace('=', ' = ')}: FP8 parameters are rounded from master weights on the GPU, and",
        ),
        ("policy.options.fp8=hybrid", "policy.options.fp8: the run decides it; use policy.precision"),
        ("policy.options.fp8_recipe=blockwise", "policy.options.fp8_recipe: the run decides it; use policy.precision"),
        (
            "policy.ddp_options.fp8_param_gather=true",
            "policy.ddp_options.fp8_param_gather: the run decides it; use policy.precision.parameters",
        ),
    ],
)
def test_what_is_impossible_is_refused(base: Path, arguments: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        check(compose(base, arguments.split()))
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "capability", "allowed"),
    [
        ("fp8_blockwise", (10, 0), "model, fp8_current, mxfp8"),
        ("mxfp8", (9, 0), "model, fp8_blockwise, fp8_current"),
        ("mxfp8", (12, 0), "model, fp8_current"),
        ("fp8_current", (8, 0), "model"),
    ],
)
def test_a_gpu_that_cannot_is_refused(recipe: str, capability: tuple[int, int], allowed: str) -> None:
    with pytest.raises(UserError, match=rf"^{R} = {recipe}: this GPU .*{capability[0]}\.\d\).*: {allowed}$"):
        check_gpu(PrecisionConfig(recipe), capability)
    for other in allowed.split(", "):
        check_gpu(PrecisionConfig(other), capability)


def widths(recipe: str, build: dict[str, Any], spec: Any = "local", first: int = 0, **layout: Any) -> None:
    sizes: dict[str, Any] = dict(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=128, experts=4, expert_ffn=256)
    hf = hf_config(BuildConfig(**(sizes | build)))
    parallel = ParallelDims(ranks=8, **layout)
    fp8_widths.check(architecture(hf).describe(hf), parallel, PrecisionConfig(recipe, first), spec)


@pytest.mark.parametrize(
    ("recipe", "build", "layout"),
    [
        ("fp8_blockwise", {}, dict(tensor=2, expert_tensor=2, expert=2)),
        ("fp8_blockwise", {"head_dim": 16, "hidden": 40, "expert_ffn": 24}, {}),
        ("fp8_blockwise", {"expert_ffn": 24}, dict(tensor=2, expert=4)),
        ("fp8_current", {"head_dim": 16, "expert_ffn": 24}, dict(tensor=2, expert=2)),
        ("mxfp8", {"head_dim": 32, "expert_ffn": 64}, dict(tensor=2, expert_tensor=2)),
        ("model", {"head_dim": 10, "expert_ffn": 6}, dict(tensor=2)),
    ],
)
def test_widths_of_which_a_cut_leaves_whole_blocks_pass(
    recipe: str, build: dict[str, Any], layout: dict[str, int]
) -> None:
    widths(recipe, build, **layout)


@pytest.mark.parametrize(
    ("recipe", "build", "spec", "layout", "line"),
    [
        (
            "fp8_blockwise",
            {"expert_ffn": 384},
            "local",
            dict(tensor=2, expert_tensor=2),
            r"policy.layout.expert_tensor = 2 leaves 192 of the model's 384 columns of an expert "
            r"\(moe_intermediate_size\) to a rank; it needs multiples of 128, as the cut would part numbers that share "
            r"a scale; allowed is policy.layout.expert_tensor of 1, 3, or policy.precision.recipe=model",
        ),
        (
            "fp8_blockwise",
            {"head_dim": 16},
            "local",
            dict(tensor=2),
            r"policy.layout.tensor = 2 leaves 32 of the model's 64 query columns .* of 1, or",
        ),
        ("mxfp8", {"expert_ffn": 48}, "te", {}, r"expert_tensor = 1 leaves 48 .* multiples of 32, as Transformer Eng"),
        ("fp8_current", {"hidden": 72}, "te", {}, r"multiples of 16, and the model's hidden size is 72; give"),
    ],
)
def test_widths_that_depend_on_the_cut_are_refused(
    recipe: str, build: dict[str, Any], spec: str, layout: dict[str, int], line: str
) -> None:
    with pytest.raises(UserError, match=rf"^{R} = {recipe}: .*{line}"):
        widths(recipe, build, spec, **layout)


def test_more_layers_than_a_stage_has_are_refused() -> None:
    widths("mxfp8", {}, first=2, pipeline=2)
    with pytest.raises(
        UserError,
        match=r"^policy\.precision\.first_layers = 3: .* 4 // 2 = 2, and one layer must remain in FP8; give at most 2",
    ):
        widths("mxfp8", {}, first=3, pipeline=2)
    with pytest.raises(
        UserError, match=r"^policy\.precision\.first_layers = 4 and last_layers = 0: all .*; give 3 together"
    ):
        widths("mxfp8", {}, first=4)
