"""Tests of a policy in an emulated FP8 recipe: products, layers, scales, and equal results in every layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_mega.config.precision import RECIPES, row_multiple
from skyrl_mega.config.schema import BuildConfig, OptimizerConfig, PolicyConfig, PrecisionConfig
from skyrl_mega.kernels.block_fp8 import BLOCK
from skyrl_mega.megatron import fp8_rounding as fp8
from skyrl_mega.megatron.emulated_fp8 import Linear
from skyrl_mega.megatron.packing import pack
from skyrl_mega.megatron.precision import drop_fp8_copies
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.pack import local_view
from skyrl_mega.weights.fp8.format import SUFFIX, quantised
from tests.megatron import layouts
from tests.support.ranks import run_ranks
from tests.weights.test_fp8_wire import whole_tensors

SHAPES = {
    "moe": BuildConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=128, experts=4, expert_ffn=256),
    "dense": BuildConfig(
        architecture="qwen2", layers=2, hidden=256, heads=2, kv_heads=2, head_dim=128, ffn=256, tied=True
    ),
    "odd": BuildConfig(layers=2, hidden=160, heads=4, kv_heads=2, head_dim=48, experts=2, expert_ffn=96),
}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "micro 40": (1, {}, {"micro_tokens": 40}),
    "TP2": (2, {"tensor": 2}, {}),
    "EP2": (2, {"expert": 2}, {}),
    "PP2": (2, {"pipeline": 2}, {}),
    "CP2": (2, {"context": 2}, {}),
    "DP2": (2, {}, {}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2}, {}),
    "TP2 PP2": (4, {"tensor": 2, "pipeline": 2}, {}),
    "PP2 EP2": (4, {"pipeline": 2, "expert": 2}, {}),
}
CASES = [
    *(("moe", recipe, name) for recipe in RECIPES for name in LAYOUTS),
    *(("dense", recipe, name) for recipe in RECIPES for name in LAYOUTS if "EP" not in name),
]
MARKS: dict[tuple[str, str, str], list[Any]] = {
    **{("moe", "fp8_blockwise", name): [] for name in ("micro 40", "TP2", "EP2", "CP2")},
    **{("moe", "fp8_current", name): [] for name in ("TP2", "EP2")},
    ("moe", "mxfp8", "TP2"): [],
    ("dense", "fp8_blockwise", "TP2"): [pytest.mark.slow],
    ("moe", "fp8_blockwise", "PP2"): [pytest.mark.slow],
}
"""Marks of the cases; a case with an empty list runs for every change."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in SHAPES.items():
        build(config, folder / name, seed=1)
    return {name: folder / name for name in SHAPES}


def policy(recipe: str, changes: dict[str, Any] | None = None, **precision: int) -> PolicyConfig:
    # With this eps Adam moves weights by gradients, not by signs; rounding decides the sign of a gradient near 0.
    values = {
        "optimizer": OptimizerConfig(lr=0.3, eps=1.0, clip_grad=0.5),
        "precision": PrecisionConfig(recipe, **precision),
    }
    return layouts.policy_config(**{**values, **(changes or {})})


def steps(path: Path, ranks: int, sizes: dict[str, int], config: PolicyConfig) -> list[dict[str, float]]:
    answers = run_ranks(ranks, layouts.train, path, layouts.layout(ranks, **sizes), config, layouts.some_batch(100), 2)
    return max(answers, key=lambda a: len(a[0]))


Single = Callable[[str, str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def single(models: dict[str, Path]) -> Single:
    """Returns a function for two steps of a model in a recipe, in a single process."""
    return cache(lambda model, recipe: steps(models[model], 1, {}, policy(recipe)))


@pytest.mark.parametrize(
    ("model", "recipe", "cut"),
    [pytest.param(*case, id=" ".join(case), marks=MARKS.get(case, [pytest.mark.nightly])) for case in CASES],
)
def test_every_layout_gives_the_single_process(
    models: dict[str, Path], single: Single, model: str, recipe: str, cut: str
) -> None:
    ranks, sizes, changes = LAYOUTS[cut]
    actual = steps(models[model], ranks, sizes, policy(recipe, changes))
    # Another order of a sum, as on another processor, sometimes rounds a number to E4M3's other neighbour. This changes
    # a step's loss and gradient a little. After the update a token may change its expert.
    for a, b, of_loss in zip(actual, single(model, recipe), (3e-5, 1e-3), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=of_loss)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=3e-3)


def test_recipes_compute_something_else_and_learn_as_much(single: Single) -> None:
    plain = single("moe", "model")
    losses = {recipe: single("moe", recipe) for recipe in RECIPES}
    for recipe, rows in losses.items():
        assert 1e-6 < abs(rows[0]["loss"] / plain[0]["loss"] - 1) < 3e-3, recipe
        assert rows[1]["loss"] == pytest.approx(plain[1]["loss"], rel=3e-3), recipe
    first = {recipe: (round(rows[0]["loss"], 6), round(rows[0]["grad_norm"], 6)) for recipe, rows in losses.items()}
    assert len(set(first.values())) == len(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_and_gradients_are_those_of_rounded_operands(recipe: str) -> None:
    """Compares each of the three products with float64 products of rounded operands."""
    make = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(*shape, generator=make) for shape in ((6, 200), (72, 200), (6, 72)))
    linear = Linear(recipe)
    if recipe == "fp8_blockwise":
        linear.weight = linear.transposed = fp8.blocks(w)  # blocks of 128 × 128 are covered by the wire's tests
        of_x, of_w, of_g = fp8.blocks(x), (fp8.blocks(w), fp8.blocks(w)), fp8.blocks(g)
    else:
        linear.round_weight(w)
        if recipe == "mxfp8":
            of_x, of_g = fp8.microscaled(x), fp8.microscaled(g)
            of_w = fp8.microscaled(w), fp8.microscaled(w.t()).t()
        else:
            of_x, rounded = (fp8.tensor(t, fp8.E4M3) for t in (x, w))
            of_w, of_g = (rounded, rounded), fp8.tensor(g, fp8.E5M2)
    inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
    bias = torch.randn(72, generator=make)
    out = linear(
        input=inputs[0], weight=inputs[1], bias=bias, allreduce_dgrad=False, sequence_parallel=False, tp_group=None
    )
    out.backward(g)
    expected = (
        of_x.double() @ of_w[0].double().t() + bias,
        of_g.double() @ of_w[1].double(),
        of_g.double().t() @ of_x.double(),
    )
    for actual, of in zip((out, inputs[0].grad, inputs[1].grad), expected, strict=True):
        assert actual is not None
        torch.testing.assert_close(actual.double(), of, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out.double(), x.double() @ w.double().t() + bias, rtol=1e-3, atol=1e-3)


def rounded_weights(
    rank: int, address: str, path: Path, parallel: ParallelDims, config: PolicyConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    opened = layouts.open_rank(rank, address, path, parallel, config)
    assert opened.fp8 is not None
    opened.fp8.begin()
    return {name: linear.weight for name, linear in opened.fp8.linears.items()}, opened.weights()


@pytest.mark.parametrize(
    ("model", "ranks", "sizes"),
    [("moe", 1, {}), ("odd", 2, {"tensor": 2}), ("odd", 2, {"expert": 2})],
    ids=["whole blocks", "TP2 parts blocks", "EP2"],
)
def test_weights_are_the_numbers_and_scales_of_the_wire(
    models: dict[str, Path], model: str, ranks: int, sizes: dict[str, int]
) -> None:
    """Compares bits with blocks of the whole tensors in a plain loop, as in the wire's tests, for every split of the
    tensors."""
    hf = json.loads((models[model] / "config.json").read_text())
    tensors = load_file(next(models[model].glob("*.safetensors")))
    names = quantised(tensors)
    numbers, scales = whole_tensors(tensors, names)
    parallel = layouts.layout(ranks, **sizes)
    for rank, (rounded, _) in enumerate(
        run_ranks(ranks, rounded_weights, models[model], parallel, policy("fp8_blockwise"))
    ):
        seen = set()
        for piece in architecture(hf).megatron_shard(hf, parallel, rank, "local").pieces:
            if piece.tensor not in names:
                assert piece.param not in rounded
                continue
            scale = scales[piece.tensor + SUFFIX].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            rows, columns = tensors[piece.tensor].shape
            whole = numbers[piece.tensor].float() * scale[:rows, :columns]
            assert torch.equal(local_view(rounded[piece.param], piece.offset, piece.box), whole[piece.box.slices()])
            seen.add(piece.param)
        assert seen == set(rounded)


def test_first_and_last_layers_are_left_out(models: dict[str, Path]) -> None:
    config = policy("mxfp8", first_layers=1)
    (rounded, params), *_ = run_ranks(1, rounded_weights, models["moe"], ParallelDims(), config)
    assert {name.split(".")[3] for name in rounded} == {"1"}
    linear = {name for name, p in params.items() if p.dim() == 2 and ".layers.1." in name and ".router." not in name}
    assert set(rounded) == linear and all(re.search(r"linear_(qkv|proj|fc1|fc2)\.weight$", name) for name in rounded)


def test_rows_of_transformer_engine_alone_are_padded() -> None:
    recipes = ("model", *RECIPES)
    assert [row_multiple(PrecisionConfig(recipe), "te") for recipe in recipes] == [1, 128, 16, 32]
    assert [row_multiple(PrecisionConfig(recipe), "local") for recipe in recipes] == [1] * 4


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2])
def test_rows_are_padded_and_what_counts_stays(context: int, tensor: int) -> None:
    batch = layouts.some_batch(100)
    for rank in range(context):
        plain, padded = (pack(batch, context=context, context_rank=rank, tensor=tensor, rows=rows) for rows in (1, 32))
        assert padded.tokens.shape[1] % (32 * tensor) == 0
        assert padded.tokens.shape[1] - plain.tokens.shape[1] < 32 * tensor
        for first, second in ((plain.source, padded.source), (plain.read, padded.read)):
            assert first[first >= 0].tolist() == second[second >= 0].tolist()
        assert padded.columns["weights"][padded.source < 0].abs().sum() == 0
        assert padded.columns["weights"].sum() == pytest.approx(float(plain.columns["weights"].sum()), abs=1e-6)
        assert bool(padded.padding[0, plain.tokens.shape[1] :].all())


def copies_after_a_pass(rank: int, address: str, path: Path) -> Any:
    opened = layouts.open_rank(rank, address, path, layouts.layout(1), layouts.policy_config())
    module = next(m for m in opened.chunks[0].modules() if hasattr(m, "weight"))
    vars(module)["_fp8_workspaces"] = cache = {"weight": torch.zeros(2)}
    _, micros = layouts.deal(layouts.some_batch(100, count=3), opened)
    opened.logprobs(micros)
    return len(cache)


def test_a_pass_ends_without_copies(models: dict[str, Path]) -> None:
    assert run_ranks(1, copies_after_a_pass, models["moe"]) == [0]


def test_copies_of_weights_are_let_go_after_a_pass() -> None:
    """Checks the drop of cached copies. Transformer Engine's modules cache in `_fp8_workspaces` and never clear the
    cache."""
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    cache = {"weight": torch.zeros(2)}
    vars(layer[0])["_fp8_workspaces"] = cache
    drop_fp8_copies([layer])
    assert cache == {} and vars(layer[0])["_fp8_workspaces"] is cache
