"""Tests of Transformer Engine layers in FP8, forward and backward, in two ranks with tensor and expert parallelism.

Python of Transformer Engine and megatron-core is real: the rounding, row-wise and column-wise copies, padding of an
expert's rows, and gathers in FP8. Kernels are plain torch (`te_fp8_kernels`); a product checks that its tensors exist
and have sizes accepted by cuBLAS. The local spec, with rounding in our own code, serves as a comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from skyrl_mega.config.schema import BuildConfig, MoeConfig, PolicyConfig, PrecisionConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import te
from tests.cuda.linears import Products
from tests.cuda.programs import run
from tests.cuda.te_layers import Answer
from tests.cuda.test_waits import DISPATCH, EMBEDDING, off, planned
from tests.support.selected import selected, some_nightly

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

LAYERS = 2
MODEL = BuildConfig(
    layers=LAYERS, hidden=256, heads=4, kv_heads=2, head_dim=128, experts=8, expert_ffn=128, tokenizer="none"
)
PARALLEL = ParallelDims(2, tensor=2, expert=2)
BLACKWELL = 10, 0
RECIPES = {
    "fp8_blockwise": te.HOPPER,
    "fp8_current": te.HOPPER,
    "mxfp8": BLACKWELL,
    "fp8_current on Blackwell": BLACKWELL,
}
"""Recipe name → compute capability."""


def policy(spec: Any, recipe: str, **settings: Any) -> PolicyConfig:
    precision = PrecisionConfig(recipe.split()[0], parameters=settings.pop("parameters", "model"))
    return PolicyConfig(spec=spec, precision=precision, **settings)


BLOCKWISE = {
    "parameters": policy("te", "fp8_blockwise", parameters="fp8"),
    "selective": policy("te", "fp8_blockwise", recompute="selective"),
    "moe": policy("te", "fp8_blockwise", recompute="moe"),
    "full": policy("te", "fp8_blockwise", recompute="full"),
    "nothing fused": policy("te", "fp8_blockwise", fusions=[]),
    "deepep": policy("te", "fp8_blockwise", moe=MoeConfig(dispatcher="deepep")),
}
"""Policies with the recipe of Hopper's blocks."""
RARELY = ("fp8_current on Blackwell", "selective", "full", "nothing fused")
"""Names computed nightly only."""


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """Returns the results of two ranks by selected policy; `local …` rounds in our own code."""
    asked = {"fp8_blockwise", *selected(request, "name")}
    folder = tmp_path_factory.mktemp("fp8")
    build(MODEL, folder / "model", seed=1)
    by_policy = {}
    for capability in (te.HOPPER, BLACKWELL):
        names = [name for name, of in RECIPES.items() if of == capability and name in asked]
        policies = {name: policy("te", name) for name in names}
        policies |= {f"local {name}": policy("local", name) for name in names}
        if capability == te.HOPPER:
            policies |= {name: of for name, of in BLOCKWISE.items() if name in asked} | {
                "bfloat16": policy("te", "model")
            }
        if policies:
            by_policy |= run("te_layers", folder, PARALLEL, policies, capability)
    return by_policy


def hidden(ranks: list[Answer]) -> NDArray[np.float32]:
    """Returns the hidden states of all tokens."""
    return np.concatenate([of.hidden for of in ranks])


@pytest.mark.parametrize("name", some_nightly([*RECIPES, *BLOCKWISE], RARELY))
def test_the_host_waits_for_nothing_but_the_dispatchers_counts(answers: dict[str, list[Answer]], name: str) -> None:
    """Counts waits: rounding, padding of experts' rows and FP8 gathers cause no wait."""
    passes = {"moe": 2, "full": 2, "deepep": 0}.get(name, 1)
    for answer in answers[name]:
        waits = {key: count for key, count in answer.waits.items() if name != "nothing fused" or key == DISPATCH}
        assert waits == ({DISPATCH: passes * LAYERS} if passes else {})


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
@pytest.mark.parametrize("name", some_nightly(RECIPES, RARELY))
def test_an_experts_products(answers: dict[str, list[Answer]], name: str, layer: str) -> None:
    """Compares an expert's three products with a plain loop over the recipe's blocks, to bfloat16's rounding."""
    for answer in answers[name]:
        linear = answer.linears[layer]
        assert len(linear.splits) == MODEL.experts / PARALLEL.expert and sum(linear.splits) == len(linear.given)
        products = Products(name.split()[0])
        parts = [t.split(linear.splits) for t in (linear.given, linear.made, linear.of_made, linear.of_given)]
        for i, (x, y, g, of_x) in enumerate(zip(*parts, strict=True)):
            w, of_w = linear.weights[i], linear.of_weights[i]
            close(y, products.forward(x, w))
            close(of_x, products.of_given(g, w))
            close(of_w, products.of_weight(g, x))


@pytest.mark.parametrize("name", some_nightly(RECIPES, RARELY))
def test_the_products_of_ranks_that_share_a_layer(answers: dict[str, list[Answer]], name: str) -> None:
    """Compares the products of a layer shared by ranks. Each rank holds some columns of attention's output and gets
    some rows of the summed output. The ranks gather all rows of the gradient as FP8 numbers."""
    ranks = [answer.linears["proj"] for answer in answers[name]]
    products = Products(name.split()[0])
    parts = [products.forward(rank.given, rank.weights[0]) for rank in ranks]
    close(torch.cat([rank.made for rank in ranks]), sum(parts), beside=sum(p.abs() for p in parts))
    gradient = torch.cat([rank.of_made for rank in ranks])
    for rank in ranks:
        close(rank.of_given, products.of_given(gradient, rank.weights[0]))
        close(rank.of_weights[0], products.of_weight(gradient, rank.given))


def close(actual: Tensor, expected: Tensor, beside: Tensor | None = None) -> None:
    """Checks equality to bfloat16's rounding of the result, or of the summands and the sum."""
    room = 2**-8 * expected.abs() if beside is None else 2**-7 * beside
    room = room + 1e-5 * (expected.abs().max() if len(expected) else 0)
    assert actual.shape == expected.shape
    assert not ((actual - expected).abs() > room).any()


@pytest.mark.parametrize("name", some_nightly(RECIPES, RARELY))
def test_fp8_layers_compute_what_local_ones_do(answers: dict[str, list[Answer]], name: str) -> None:
    """Compares hidden states with the local spec. The difference must be smaller than the difference of the local spec
    from bfloat16, whose noise changes some roundings."""
    engine, local, plain = (hidden(answers[n]) for n in (name, f"local {name}", "bfloat16"))
    assert off(engine, local) < 0.6 * off(local, plain) < 0.6 * 0.09
    assert off(engine, plain) < 1.1 * off(local, plain)
    for ours, other, reference in zip(answers[name], answers[f"local {name}"], answers["bfloat16"], strict=True):
        engine, local, plain = (of.gradients[EMBEDDING] for of in (ours, other, reference))
        assert off(engine, local) < 0.85 * off(local, plain)


@pytest.mark.parametrize("name", some_nightly(["parameters", "selective", "moe", "full"], RARELY))
def test_no_number_depends_on_where_weights_are_or_what_is_kept(answers: dict[str, list[Answer]], name: str) -> None:
    """Compares bits: FP8 parameters equal the rounding of bfloat16 parameters in a pass, and recomputation rounds as
    before."""
    for answer, reference in zip(answers[name], answers["fp8_blockwise"], strict=True):
        np.testing.assert_array_equal(answer.hidden, reference.hidden)
        assert set(answer.gradients) == set(reference.gradients)
        for parameter, gradient in answer.gradients.items():
            np.testing.assert_allclose(
                gradient, reference.gradients[parameter], rtol=1e-5, atol=1e-7, err_msg=parameter
            )


@pytest.mark.parametrize(
    "name", some_nightly([*RECIPES, *(n for n in BLOCKWISE if n not in ("deepep", "full"))], RARELY)
)
def test_a_layer_keeps_about_what_the_planner_says(answers: dict[str, list[Answer]], name: str) -> None:
    """Compares the kept bytes with the planner. The planner counts two bytes for each number, but some are kept as one
    byte, and an expert's few rows are padded to many."""
    for answer in answers[name]:
        settings = BLOCKWISE.get(name) or policy("te", name)
        assert 0.94 < planned(answer, settings, MODEL, PARALLEL) / answer.kept < 1.2
