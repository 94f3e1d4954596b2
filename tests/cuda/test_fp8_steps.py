"""Tests of training with Transformer Engine layers in each precision: losses, gradient norms, weights, log-probs.

Several micro-batches pass through megatron-core's schedule, data parallelism and optimizer, with Transformer Engine's
Adam. Kernels are plain torch. The comparison is the local spec in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import BuildConfig, OptimizerConfig, PolicyConfig, PrecisionConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import programs, te
from tests.cuda.linears import in_squares
from tests.cuda.te_fp8_kernels import spread
from tests.cuda.te_steps import STEPS, Answer, batch
from tests.megatron import layouts
from tests.support.ranks import run_ranks
from tests.support.selected import some_nightly

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

MODEL = BuildConfig(
    layers=2, hidden=256, heads=4, kv_heads=2, head_dim=128, experts=8, expert_ffn=128, tokenizer="none"
)
BIASES = BuildConfig("qwen2", layers=2, hidden=512, heads=4, kv_heads=2, head_dim=128, ffn=256, tokenizer="none")
MODELS = {
    "tp2 ep2": MODEL,
    "dp2": MODEL,
    "tp2, dense with biases": BIASES,
    "pp2": MODEL,
    "pp2 in chunks": dataclasses.replace(MODEL, layers=4),
    "cp2": MODEL,
    "cp4": MODEL,
    "cp2 by heads": MODEL,
}
LAYOUTS = {
    "tp2 ep2": ParallelDims(2, tensor=2, expert=2),
    "dp2": ParallelDims(2),
    "tp2, dense with biases": ParallelDims(2, tensor=2),
    "pp2": ParallelDims(2, pipeline=2),
    "pp2 in chunks": ParallelDims(2, pipeline=2, virtual_pipeline=2),
    "cp2": ParallelDims(2, context=2),
    "cp4": ParallelDims(4, context=4),
    "cp2 by heads": ParallelDims(2, context=2, context_exchange="all_to_all"),
}
PLAIN, BLOCKWISE, KEPT, PER_TENSOR = "model", "fp8_blockwise", "fp8_blockwise parameters", "fp8_current"
HOPPER = {
    "tp2 ep2": (PLAIN, BLOCKWISE, KEPT, PER_TENSOR),
    "dp2": (PLAIN, BLOCKWISE, KEPT),
    "tp2, dense with biases": (PLAIN, BLOCKWISE, KEPT, PER_TENSOR),
    "pp2": (PLAIN, BLOCKWISE, KEPT, PER_TENSOR),
    "pp2 in chunks": (PLAIN, BLOCKWISE, KEPT),
    "cp2": (PLAIN, BLOCKWISE, KEPT, PER_TENSOR),
    "cp4": (PLAIN, BLOCKWISE, KEPT),
    "cp2 by heads": (PLAIN, BLOCKWISE, KEPT, PER_TENSOR),
}
BLACKWELL = {
    "tp2 ep2": ("mxfp8",),
    "dp2": (),
    "tp2, dense with biases": ("mxfp8",),
    "pp2": ("mxfp8",),
    "cp2": ("mxfp8",),
}


def policy(name: str, clip: float = 0.0, **settings: Any) -> PolicyConfig:
    recipe, *parameters = name.split()
    precision = PrecisionConfig(recipe, parameters="fp8" if parameters else "model")
    optimizer = OptimizerConfig(lr=2e-3, clip_grad=clip)
    return PolicyConfig(
        spec="te", precision=precision, optimizer=optimizer, micro_tokens=64, logit_chunk=64, **settings
    )


def clip_of(layout: str) -> float:
    """Returns the clipping limit. Clipping makes a step depend on the order of a norm's sum, so only one layout
    clips."""
    return 1.0 if layout == "tp2 ep2" else 0.0


Found = dict[str, list[Answer]]


@pytest.fixture(scope="module", params=some_nightly(LAYOUTS, LAYOUTS.keys() - {"tp2 ep2", "dp2"}))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, layout: str) -> Found:
    """Returns each rank's results in each precision."""
    folder, parallel = tmp_path_factory.mktemp("steps"), LAYOUTS[layout]
    build(MODELS[layout], folder / "model", seed=1)
    by_precision: Found = {}
    for capability, names in ((te.HOPPER, HOPPER[layout]), ((10, 0), BLACKWELL.get(layout, ()))):
        policies = {name: policy(name, clip_of(layout), overlap=layout == "dp2") for name in names}
        if policies:
            by_precision |= programs.run("te_steps", folder, parallel, policies, capability)
    return by_precision


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory, layout: str) -> list[dict[str, float]]:
    """Returns the metrics of the same steps with the local spec in one process."""
    path = tmp_path_factory.mktemp("float32") / "model"
    build(MODELS[layout], path, seed=1)
    settings = dataclasses.replace(policy(PLAIN, clip_of(layout)), spec="local")
    (metrics,) = run_ranks(1, layouts.train, path, ParallelDims(1), settings, batch(path), STEPS)
    return list(metrics)


def column(ranks: list[Answer], metric: str, layout: str) -> list[float]:
    """Returns a metric of the steps, equal on all ranks; in a pipeline only the last stage reports a loss."""
    first, last = ranks[0].steps, ranks[-1].steps
    if LAYOUTS[layout].pipeline == 1:
        assert first == last
    assert all("grad_norm" in a and a.items() <= b.items() for a, b in zip(first, last, strict=True))
    return [step[metric] for step in last]


def test_losses_fall_as_in_float32(answers: Found, float32: list[dict[str, float]], layout: str) -> None:
    """Compares with float32. Rounding changes a loss by less than a hundredth, and a gradient norm by less than a
    twentieth with two layers, a tenth with four."""
    depth = MODELS[layout].layers / 2
    for name, ranks in answers.items():
        losses = column(ranks, "loss", layout)
        assert losses == pytest.approx([row["loss"] for row in float32], rel=0.005 if name == PLAIN else 0.01)
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.75 * losses[0]
        norms = [row["grad_norm"] for row in float32]
        near = 0.02 if name == PLAIN else 0.05
        assert column(ranks, "grad_norm", layout) == pytest.approx(norms, rel=near * depth), name
        assert name == PLAIN or losses != column(answers[PLAIN], "loss", layout), "nothing was rounded"


def test_nothing_depends_on_whether_parameters_are_in_fp8(answers: Found) -> None:
    """Compares losses, log-probs and weights bit by bit; the squares of a norm are added in another order."""
    for stored, rounded in zip(answers[KEPT], answers[BLOCKWISE], strict=True):
        losses = [[step.get("loss") for step in of.steps] for of in (stored, rounded)]
        assert losses[0] == losses[1]
        norms = [step["grad_norm"] for step in rounded.steps]
        assert [step["grad_norm"] for step in stored.steps] == pytest.approx(norms, rel=1e-5)
        for a, b in zip(stored.logprobs or [], rounded.logprobs or [], strict=True):
            np.testing.assert_array_equal(a, b)
        for name, weight in rounded.weights.items():
            numbers, scales = stored.weights[name], stored.weights.get(f"{name}_scale_inv")
            if scales is None:
                np.testing.assert_array_equal(numbers, weight, err_msg=name)
            else:
                values = spread(torch.from_numpy(scales), *numbers.shape)
                dequantised = torch.from_numpy(numbers).view(torch.float8_e4m3fn).float() * values
                torch.testing.assert_close(dequantised, in_squares(torch.from_numpy(weight)), rtol=1e-6, atol=0)


def test_logprobs_are_those_of_the_weights(answers: Found) -> None:
    """Compares log-probs after training with bfloat16: different, but by less than a twentieth of the two nats learned
    in the steps."""
    for name, ranks in answers.items():
        assert ranks[-1].logprobs, "the last stage has them"
        for answer, plain in zip(ranks, answers[PLAIN], strict=True):
            if not answer.logprobs:
                continue
            off = np.concatenate([a - b for a, b in zip(answer.logprobs or [], plain.logprobs or [], strict=True)])
            assert name == PLAIN or 0 < np.abs(off).mean() < 0.1, name
