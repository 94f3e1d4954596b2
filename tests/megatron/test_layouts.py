"""Tests of every layout and every split of the batch: losses and gradient norms must equal a single process's."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.schema import BuildConfig, MoeConfig
from skyrl_mega.models.tiny import build
from tests.megatron import layouts
from tests.support.ranks import run_ranks

SHAPES: dict[str, BuildConfig] = {
    "qwen3_moe": BuildConfig(layers=4, heads=8, kv_heads=4, head_dim=16),
    "glm4_moe": BuildConfig(architecture="glm4_moe"),
    "qwen2": BuildConfig(architecture="qwen2", head_dim=16, layers=4, tied=True),
}

BALANCED = MoeConfig(aux_loss=0.5)

BY_HEADS = {"context_exchange": "all_to_all"}

CUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("micro 40", 1, {}, {"micro_tokens": 40}),
    ("micro 1000", 1, {}, {"micro_tokens": 1000, "logit_chunk": 7}),
    ("recompute", 1, {}, {"recompute": "full"}),
    ("recompute MoE", 1, {}, {"recompute": "moe"}),
    ("TP2 EP2, recompute MoE", 2, {"tensor": 2, "expert": 2}, {"recompute": "moe"}),
    ("DP2", 2, {}, {}),
    ("TP2 ETP2", 2, {"tensor": 2}, {}),
    ("TP2, fused head", 2, {"tensor": 2}, {"head": "fused", "micro_tokens": 40}),
    ("PP2", 2, {"pipeline": 2}, {}),
    ("PP2 VPP2", 2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    ("PP2 of 3 and 1 layers", 2, {"pipeline": 2, "first_stage_layers": 3}, {}),
    ("PP2 of 1 and 3 layers", 2, {"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 3}, {}),
    ("CP2", 2, {"context": 2}, {}),
    ("EP2", 2, {"expert": 2}, {}),
    ("TP2 EP2", 2, {"tensor": 2, "expert": 2}, {}),
    ("TP2 PP2 EP2", 4, {"tensor": 2, "pipeline": 2, "expert": 2}, {}),
    ("TP2 CP2", 4, {"tensor": 2, "context": 2}, {}),
    ("CP2 by heads", 2, {"context": 2, **BY_HEADS}, {}),
    ("CP4 EP2 by heads", 4, {"context": 4, "expert": 2, **BY_HEADS}, {"micro_tokens": 40, "recompute": "moe"}),
    ("TP2 CP2 by heads", 4, {"tensor": 2, "context": 2, **BY_HEADS}, {}),
    ("CP2 DP2 by heads, recompute", 4, {"context": 2, **BY_HEADS}, {"recompute": "full"}),
    ("PP2 VPP2 CP2 by heads", 4, {"pipeline": 2, "virtual_pipeline": 2, "context": 2, **BY_HEADS}, {}),
    ("TP2 CP2 EP2 by heads, offload", 4, {"tensor": 2, "context": 2, "expert": 2, **BY_HEADS}, {"offload_layers": 2}),
    ("offload", 1, {}, {"offload_layers": 2}),
    ("TP2 EP2, offload, recompute MoE", 2, {"tensor": 2, "expert": 2}, {"offload_layers": 9, "recompute": "moe"}),
    ("PP2 VPP2, offload", 2, {"pipeline": 2, "virtual_pipeline": 2}, {"offload_layers": 1, "micro_tokens": 40}),
    ("TP2 PP2 VPP2 DP2", 8, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, {}),
]


BALANCED_CUTS = ("micro 40", "TP2 EP2, recompute MoE", "DP2", "TP2 ETP2", "PP2 VPP2", "CP2", "EP2")
"""Cuts with a load-balancing loss in the check of every change; nightly all."""
LARGE_CUTS = (
    "TP2 CP2",
    "CP4 EP2 by heads",
    "CP2 DP2 by heads, recompute",
    "PP2 VPP2 CP2 by heads",
    "TP2 CP2 EP2 by heads, offload",
    "TP2 PP2 VPP2 DP2",
)
"""Cuts left to the night also without a load-balancing loss: each of their sizes is in a smaller cut."""


def params(nightly: Container[str]) -> list[Any]:
    return [pytest.param(*c[1:], id=c[0], marks=[pytest.mark.nightly] if c[0] in nightly else []) for c in CUTS]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in SHAPES.items():
        build(config, folder / name, seed=1)
    return {name: folder / name for name in SHAPES}


@pytest.fixture(scope="module")
def single(models: dict[str, Path]) -> dict[str, list[dict[str, float]]]:
    """Returns three steps in a single process."""
    return {name: steps(path, 1, {}, {}) for name, path in models.items()}


@pytest.fixture(scope="module")
def balanced(models: dict[str, Path]) -> list[dict[str, float]]:
    """Returns three steps in a single process with a load-balancing loss as large as the policy loss."""
    return steps(models["qwen3_moe"], 1, {}, {"moe": BALANCED})


def steps(path: Path, ranks: int, sizes: dict[str, Any], changes: dict[str, Any]) -> list[dict[str, float]]:
    batch = layouts.some_batch(100)
    answers = run_ranks(
        ranks, layouts.train, path, layouts.layout(ranks, **sizes), layouts.policy_config(**changes), batch, 3
    )
    return max(answers, key=lambda a: len(a[0]))


@pytest.mark.parametrize(("ranks", "sizes", "changes"), params(LARGE_CUTS))
def test_a_moe_trains_the_same_in_every_layout(
    models: dict[str, Path],
    single: dict[str, list[dict[str, float]]],
    ranks: int,
    sizes: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    compare(steps(models["qwen3_moe"], ranks, sizes, changes), single["qwen3_moe"])


@pytest.mark.parametrize(("ranks", "sizes", "changes"), params({c[0] for c in CUTS} - {*BALANCED_CUTS}))
def test_experts_are_balanced_the_same_in_every_layout(
    models: dict[str, Path],
    balanced: list[dict[str, float]],
    ranks: int,
    sizes: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    actual = steps(models["qwen3_moe"], ranks, sizes, {**changes, "moe": BALANCED})
    compare(actual, balanced)
    for a, b in zip(actual, balanced, strict=True):
        assert a["expert_balance"] == pytest.approx(b["expert_balance"], rel=1e-5)


def test_sigmoid_experts_are_balanced_the_same_in_every_layout(models: dict[str, Path]) -> None:
    one, two = (
        steps(models["glm4_moe"], ranks, sizes, {"moe": BALANCED, "micro_tokens": 40})
        for ranks, sizes in ((1, {}), (2, {"tensor": 2, "expert": 2}))
    )
    compare(two, one)
    assert [step["expert_balance"] for step in two] == pytest.approx([s["expert_balance"] for s in one], rel=1e-5)


@pytest.mark.parametrize(("model", "sizes"), [("qwen3_moe", {"pipeline": 2}), ("qwen2", {"tensor": 2})], ids=str)
def test_layers_that_lie_in_host_memory_change_no_bit(
    models: dict[str, Path], model: str, sizes: dict[str, Any]
) -> None:
    """Trains on rows of different lengths with several rows open at the same time."""
    plain, moved = (steps(models[model], 2, sizes, {"micro_tokens": 40, "offload_layers": layers}) for layers in (0, 2))
    assert moved == plain


def test_what_balances_experts_is_in_the_gradient_and_not_in_the_loss(
    single: dict[str, list[dict[str, float]]], balanced: list[dict[str, float]]
) -> None:
    plain = single["qwen3_moe"]
    assert balanced[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)  # the metric holds the policy loss only
    assert balanced[0]["grad_norm"] > 1.1 * plain[0]["grad_norm"]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        (4, {"tensor": 2, "pipeline": 2}),
        (2, {"context": 2}),
        (2, {"context": 2, **BY_HEADS}),
    ],
    ids=["TP2", "PP2", "TP2 PP2", "CP2", "CP2 by heads"],
)
def test_a_dense_model_with_bias_and_tied_head_trains_the_same(
    models: dict[str, Path], single: dict[str, list[dict[str, float]]], ranks: int, sizes: dict[str, Any]
) -> None:
    compare(steps(models["qwen2"], ranks, sizes, {}), single["qwen2"])


def compare(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        for name in ("loss", "grad_norm", "entropy"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), f"step {step}, {name}"
    assert expected[0]["loss"] != pytest.approx(expected[2]["loss"], rel=1e-2)  # the steps changed the model
