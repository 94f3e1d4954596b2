"""Tests of Transformer Engine layers with activations in host memory between the passes (`policy.offload_layers`).

Python of Transformer Engine and megatron-core is real; kernels and streams are simulated. So the saved tensors, the
formats and the references are the same as on a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest

from skyrl_mega.config.schema import BuildConfig, MoeConfig, PolicyConfig, PrecisionConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import te
from tests.cuda.programs import run
from tests.cuda.te_offload import Answer
from tests.support.selected import selected, some_nightly

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

LAYERS, MOVING = 4, [0, 2]
MODEL = BuildConfig(
    layers=LAYERS, hidden=256, heads=4, kv_heads=2, head_dim=128, experts=8, expert_ffn=128, tokenizer="none"
)
PARALLEL = ParallelDims(2, tensor=2, expert=2)
PLAIN = {
    "fused": PolicyConfig(spec="te"),
    "nothing fused": PolicyConfig(spec="te", fusions=[]),
    "selective": PolicyConfig(spec="te", recompute="selective"),
    "moe": PolicyConfig(spec="te", recompute="moe"),
    "deepep": PolicyConfig(spec="te", moe=MoeConfig(dispatcher="deepep")),
    "fp8_blockwise": PolicyConfig(spec="te", precision=PrecisionConfig("fp8_blockwise")),
    "fp8_current": PolicyConfig(spec="te", precision=PrecisionConfig("fp8_current")),
    "parameters in FP8": PolicyConfig(spec="te", precision=PrecisionConfig("fp8_blockwise", parameters="fp8")),
}
NAMES = some_nightly(PLAIN, PLAIN.keys() - {"fused", "selective", "parameters in FP8"})


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """Returns the results of two ranks; `<name>, moved` has two of the four layers in host memory."""
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("offload")
    build(MODEL, folder / "model", seed=1)
    plain = {name: PLAIN[name] for name in selected(request, "name")}
    moved = {f"{name}, moved": replace(policy, offload_layers=len(MOVING)) for name, policy in plain.items()}
    return run("te_offload", folder, PARALLEL, plain | moved)


@pytest.mark.parametrize("name", NAMES)
def test_no_bit_of_a_gradient_changes(answers: dict[str, list[Answer]], name: str) -> None:
    for offloaded, plain in zip(answers[f"{name}, moved"], answers[name], strict=True):
        np.testing.assert_array_equal(offloaded.hidden, plain.hidden)
        assert set(offloaded.gradients) == set(plain.gradients) and len(plain.gradients) > 10
        for parameter, gradient in plain.gradients.items():
            np.testing.assert_array_equal(offloaded.gradients[parameter], gradient, err_msg=parameter)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_does_not_wait(answers: dict[str, list[Answer]], name: str) -> None:
    """Checks that offloading adds no wait."""
    for offloaded, plain in zip(answers[f"{name}, moved"], answers[name], strict=True):
        assert offloaded.waits == plain.waits


@pytest.mark.parametrize("name", NAMES)
def test_what_layers_keep_is_in_host_memory(answers: dict[str, list[Answer]], name: str) -> None:
    """Compares the bytes on the device. Kept there are the table of rotations, read by all layers, recomputed tensors,
    and the last offloaded layer, because the backward pass starts there. No weight moves, not even in FP8."""
    for offloaded, plain in zip(answers[f"{name}, moved"], answers[name], strict=True):
        again = {"selective": 0.33}.get(name, 0.06)
        assert offloaded.kept == plain.kept == plain.between
        assert offloaded.between[0] <= again * offloaded.kept[0]
        assert offloaded.between[1:] == plain.between[1:]
        assert offloaded.most < plain.most - 0.9 * (1 - again) * offloaded.kept[0]
        moving = sum(offloaded.kept[layer] for layer in MOVING)
        assert (1 - again) * moving * 0.9 < offloaded.host < moving + len(MOVING) * 2**20
