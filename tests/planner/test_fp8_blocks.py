"""Errors for FP8 parameters with blocks other than the wire's."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig, Config, LayoutConfig, PrecisionConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fp8_blocks, search
from skyrl_mega.weights.fp8.format import quantised
from skyrl_mega.weights.fp8.scales import without_own_blocks

MODELS = {
    f"{kind} heads of {head}, {columns} columns": BuildConfig(
        kind, hidden=256, layers=2, heads=8, kv_heads=4, head_dim=head, experts=4, expert_ffn=columns, ffn=columns
    )
    for kind in ("qwen3_moe", "qwen3")
    for head in (64, 128)
    for columns in (192, 256, 512)
}
CUTS = {
    "one": ParallelDims(1),
    "tp2": ParallelDims(2, tensor=2, expert_tensor=2),
    "tp4 pp2": ParallelDims(8, tensor=4, pipeline=2, expert_tensor=4),
    "tp2 ep2": ParallelDims(4, tensor=2, expert=2),
    "tp4 ep2 etp2": ParallelDims(8, tensor=4, expert=2, expert_tensor=2),
}


def described(model: str) -> tuple[dict[str, Any], Any]:
    hf = hf_config(MODELS[model])
    return hf, architecture(hf).describe(hf)


@pytest.mark.parametrize(
    ("model", "cut"),
    [(model, cut) for model in MODELS for cut, of in CUTS.items() if "moe" in model or of.expert == 1],
)
def test_two_sizes_decide_for_the_whole_layout(model: str, cut: str) -> None:
    """Compares with the layout of all ranks, stages and expert parallelism included."""
    hf, d = described(model)
    parallel = CUTS[cut]
    layout = architecture(hf).megatron_layout(hf, parallel, "te")
    tensor = fp8_blocks.differing_tensor(d, parallel.tensor, parallel.expert_tensor)
    assert (tensor is None) == (without_own_blocks(layout, quantised(layout.tensors)) is None)


def test_both_are_found() -> None:
    outcomes = {fp8_blocks.differing_tensor(described(model)[1], 1, 1) is None for model in MODELS}
    assert outcomes == {True, False}


def test_parameters_in_fp8_are_refused_and_others_are_not() -> None:
    config = Config()
    (_, d), (_, fits) = (described(f"qwen3 heads of {head}, 256 columns") for head in (64, 128))
    config.policy.precision = PrecisionConfig("fp8_blockwise", parameters="fp8")
    with pytest.raises(UserError, match=r"^policy\.precision\.parameters = fp8: blocks of .* of model\."):
        fp8_blocks.check(config, d, ParallelDims(1))
    fp8_blocks.check(config, fits, ParallelDims(1))
    config.policy.precision.parameters = "model"
    fp8_blocks.check(config, d, ParallelDims(1))


@pytest.mark.parametrize("model", list(MODELS))
def test_no_layout_is_offered_that_is_then_refused(model: str) -> None:
    """Checks `--suggest` for exactly the layouts with the wire's blocks."""
    _, d = described(model)
    config = Config()
    config.cluster.device = "cuda"
    config.policy.spec = "te"
    offered: dict[str, list[LayoutConfig]] = {}
    for parameters in ("model", "fp8"):
        config.policy.precision = PrecisionConfig("fp8_blockwise", parameters=parameters)
        offered[parameters] = [layout for _, layout in search._layouts(config, d, ranks=8)]

    def fits(layout: LayoutConfig) -> bool:
        parallel = ParallelDims.from_config(layout, 8)
        return fp8_blocks.differing_tensor(d, parallel.tensor, parallel.expert_tensor) is None

    assert offered["fp8"] == [layout for layout in offered["model"] if fits(layout)]
